#include "templates/steps/stages.hpp"
#include "templates/steps/steps_contract.hpp"

namespace wyvern::compress_steps {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "compress_steps";
  t.covers = {stages::compress_steps};
  t.constants = steps::kRowConstants;
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {steps::portable(stage(), [](const Spec&) { return std::int64_t{1}; }),
          steps::cpu(stage())};
}

}  // namespace wyvern::compress_steps
