#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/output/chunk_columns_contract.hpp"
#include "templates/output/kda_fwd_o/cpu_layout.hpp"
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
  t.constants = {constant::DTYPE, constant::K, constant::V, constant::VARLEN};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() {
  return {chunk_columns::portable(stage(), {64, 32, 16}, shared_bytes),
          cpu_chunks_by_columns(stage(), scratch_bytes<ScratchLayout>, tunable::BV, value_columns)};
}

}  // namespace wyvern::kda_fwd_o
