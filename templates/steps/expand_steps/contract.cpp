#include "templates/steps/stages.hpp"
#include "templates/steps/steps_contract.hpp"

namespace wyvern::expand_steps {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "expand_steps";
  t.covers = {stages::expand_steps};
  t.constants = steps::kRowConstants;
  t.strided = {"x"};
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {steps::portable(stage(), [](const Spec& s) { return s.STEPS; }), steps::cpu(stage())};
}

}  // namespace wyvern::expand_steps
