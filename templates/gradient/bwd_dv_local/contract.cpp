#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/gradient/bwd_dv_local/layout.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/output/chunk_columns_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::bwd_dv_local {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dv_local";
  t.covers = {stages::bwd_dv_local};
  t.constants = {constant::DTYPE, constant::H,      constant::HV,          constant::K,
                 constant::V,     constant::VARLEN, constant::SCALAR_GATE, constant::QK_L2NORM};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// Scratch of one block, as bwd_dv_local/cpu.cpp hands it out.
std::int64_t cpu_scratch(const Spec& s) {
  const std::int64_t BT = s.BT, BV = s.BV;
  const std::int64_t K = s.K;
  return fp32_bytes(scratch::tile(BT, K) + scratch::tile(K, BT) + 2 * scratch::tile(BT, BT) +
                    2 * scratch::tile(BT, BV) + 3 * scratch::vector(BT));
}

/// One call: a chunk, the value heads of one key head, BV columns of V at a time.
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
    return Geometry{.grid = {s.H, e.NT, 1}, .shared_bytes = cpu_scratch(s)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {chunk_columns::portable(stage(), {64, 32, 16, 128}, shared_bytes), cpu(stage())};
}

}  // namespace wyvern::bwd_dv_local
