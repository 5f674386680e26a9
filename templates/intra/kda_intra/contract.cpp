#include "templates/cpu_contract.hpp"
#include "templates/intra/intra_contract.hpp"
#include "templates/intra/kda_intra/cpu_layout.hpp"
#include "templates/intra/kda_intra/layout.hpp"
#include "templates/intra/stages.hpp"

namespace wyvern::kda_intra {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "kda_intra";
  t.covers = {stages::kda_intra};
  t.constants = {constant::DTYPE,        constant::BETA_DTYPE, constant::K,
                 constant::VARLEN,       constant::SAFE_GATE,  constant::QK_L2NORM,
                 constant::BETA_SIGMOID, constant::NEG_EIGVAL};
  t.strided = {"q", "k", "beta", "erase"};
  return t;
}

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

}  // namespace

std::vector<Template> contract() {
  return {intra::products(stage(), shared_bytes),
          cpu_chunks(stage(), scratch_bytes<ScratchLayout>)};
}

}  // namespace wyvern::kda_intra
