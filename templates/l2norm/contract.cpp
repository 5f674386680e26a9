#include "templates/cpu_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::l2norm {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "l2norm";
  t.stages = {"l2norm"};
  t.summary = "y = x / sqrt(sum(x^2) + 1e-6) over the last dimension.";
  t.arguments = {
      {"x", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"y", Access::out, "DTYPE", {"B", "T", "H", "K"}, ""},
  };
  t.constants = {"DTYPE", "H", "K"};
  return t;
}

/// One call: ROWS vectors of K.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "l2norm/cpu.cpp";
  t.tunables = {{"ROWS", {64, 256}}};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t) { return Config{{"ROWS", 256}}; };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t rows = config.integer("ROWS");
    return Geometry{.grid = {(e.B * e.T * constants.integer("H") + rows - 1) / rows, 1, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {cpu(stage())}; }

}  // namespace wyvern::l2norm
