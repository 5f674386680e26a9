#include "templates/cpu_contract.hpp"
#include "templates/gdn2/gdn2_intra/cpu_layout.hpp"
#include "templates/gdn2/gdn2_intra/layout.hpp"
#include "templates/gdn2/stages.hpp"
#include "templates/intra/intra_contract.hpp"

namespace wyvern::gdn2_intra {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "gdn2_intra";
  t.covers = {stages::gdn2_intra};
  t.constants = {constant::DTYPE,  constant::BETA_DTYPE, constant::K,
                 constant::VARLEN, constant::SAFE_GATE,  constant::QK_L2NORM};
  t.strided = {"q", "k", "erase"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() {
  return {intra::products(stage(), shared_bytes),
          cpu_chunks(stage(), scratch_bytes<ScratchLayout>)};
}

}  // namespace wyvern::gdn2_intra
