#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/output/chunk_columns_contract.hpp"
#include "templates/output/kda_fwd_o/layout.hpp"
#include "templates/output/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_fwd_o {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_fwd_o";
  t.covers = {stages::kda_fwd_o};
  t.constants = {constant::DTYPE, constant::HV, constant::K, constant::V, constant::VARLEN};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// Scratch of one block, as kda_fwd_o/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Spec& s) {
  const std::int64_t BT = s.BT, BV = s.BV;
  const std::int64_t K = s.K;
  return fp32_bytes(scratch::tile(BT, K) + scratch::tile(BT, BT) +
                    scratch::tile(std::max(K, BT), BV) + scratch::tile(BT, BV) +
                    scratch::vector(BT));
}

/// One call: a chunk, one value head, BV columns of V at a time.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, {64, 32, 16}}, {tunable::BV, {128, 64}}};
  t.illegal = [](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem("BV", s.BV, s.V);
    return problem.empty() ? scratch_problem(cpu_scratch(s), limits) : problem;
  };
  t.fallback = [](Spec& s, const Limits&) { s.BV = column_block(s.V, 128); };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {s.HV, e.NT, 1}, .shared_bytes = cpu_scratch(s)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {chunk_columns::portable(stage(), {64, 32, 16}, shared_bytes), cpu(stage())};
}

}  // namespace wyvern::kda_fwd_o
