#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/output/chunk_columns_contract.hpp"
#include "templates/output/fwd_o/cpu_layout.hpp"
#include "templates/output/fwd_o/layout.hpp"
#include "templates/output/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::fwd_o {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_o";
  t.covers = {stages::fwd_o};
  t.constants = {constant::DTYPE,  constant::K,           constant::V,
                 constant::VARLEN, constant::SCALAR_GATE, constant::QK_L2NORM};
  t.strided = {"q", "k"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// CUDA, sm_80 and up. Two tiles of K are too few for a second buffer to pay: with one, an H200
/// took 207 us instead of 230.
Template portable() {
  Template t = chunk_columns::portable(stage(), {64, 32, 16, 128}, shared_bytes);
  t.fallback = [common = t.fallback](Spec& s, const Limits& limits) {
    common(s, limits);
    if (s.BT == 64 && s.K <= 2 * s.BK) s.num_stages = 1;
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {portable(), cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV,
                                            value_columns, constant::H)};
}

}  // namespace wyvern::fwd_o
