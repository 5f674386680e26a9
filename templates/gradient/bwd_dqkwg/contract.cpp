#include "templates/cpu_contract.hpp"
#include "templates/gradient/backward_contract.hpp"
#include "templates/gradient/bwd_dqkwg/layout.hpp"
#include "templates/gradient/stages.hpp"

namespace wyvern::bwd_dqkwg {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dqkwg";
  t.covers = {stages::bwd_dqkwg};
  t.constants = {constant::DTYPE, constant::H,      constant::HV,          constant::K,
                 constant::V,     constant::VARLEN, constant::SCALAR_GATE, constant::QK_L2NORM};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// Scratch of one block, as bwd_dqkwg/cpu.cpp hands it out.
std::int64_t scratch_floats(const Spec& s) {
  const std::int64_t BT = s.BT, BK = s.BK;
  const std::int64_t V = s.V;
  return 2 * scratch::tile(BT, V) + scratch::tile(V, BT) + 2 * scratch::tile(BT, BT) +
         5 * scratch::tile(BT, BK) + 2 * scratch::tile(V, BK) + 9 * scratch::vector(BT);
}

}  // namespace

std::vector<Template> contract() {
  return {backward::portable(stage(), shared_bytes), cpu_chunks(stage(), scratch_floats)};
}

}  // namespace wyvern::bwd_dqkwg
