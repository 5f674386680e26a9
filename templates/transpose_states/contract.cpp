#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::transpose_states {
namespace {

constexpr std::int64_t kSquare = 64;

/// What every variant shares. BT says how many chunk slots there are, and nothing else.
Template stage() {
  Template t;
  t.name = "transpose_states";
  t.stages = {"transpose_states"};
  t.summary = "The states entering every chunk with their value columns first.";
  t.arguments = {
      {"h", Access::in, "DTYPE", {"NT", "HV", "K", "V"}, ""},
      {"h_v_first", Access::out, "DTYPE", {"NT", "HV", "V", "K"}, ""},
  };
  t.constants = {"DTYPE", "HV", "K", "V"};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  return t;
}

/// CUDA, sm_80 and up: one block a square of a state.
Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})}, {"num_warps", cuda::integers({8, 4})}};
  t.source = "transpose_states/portable.cu";
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"num_warps", std::int64_t{8}}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t squares = cuda::ceil_div(constants.integer("K"), kSquare) *
                                 cuda::ceil_div(constants.integer("V"), kSquare);
    return cuda::launch(e.NT * constants.integer("HV") * squares, config,
                        cuda::tile_bytes(kSquare, kSquare, constants.dtype("DTYPE")));
  };
  return t;
}

/// One call: a state.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "transpose_states/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}};
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values& constants, const Config&, const Extents& e) {
    return Geometry{.grid = {constants.integer("HV"), e.NT, 1}};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(stage()), cpu(stage())}; }

}  // namespace wyvern::transpose_states
