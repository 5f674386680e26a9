#include "templates/reverse_scan_contract.hpp"

namespace wyvern::bwd_dhu {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu";
  t.stages = {"bwd_dhu_segment", "bwd_dhu_combine", "bwd_dhu"};
  t.summary = "The reverse state scan: the gradient of every chunk's leaving state, and dU.";
  t.arguments = scan::joined(
      reverse_scan::kInputs,
      {
          {"dht", Access::in, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"}, "FINAL_STATE"},
          {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"chunk_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"dh", Access::out, "DTYPE", {"NT", "HV", "K", "V"}, ""},
          {"du", Access::out, "DTYPE", {"B", "T", "HV", "V"}, ""},
          {"dinitial_state", Access::out, "fp32", {"N", "HV", "STATE_ROWS", "STATE_COLS"},
           "INITIAL_STATE"},
      });
  t.constants = scan::joined(reverse_scan::kConstants,
                             {"INITIAL_STATE", "FINAL_STATE", "STATE_V_FIRST"});
  return t;
}

/// CUDA, sm_80 and up: one block BV value columns of a sequence and value head.
Template portable() {
  Template t = reverse_scan::portable(stage());
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return reverse_scan::cuda_geometry(constants, config, e.N * constants.integer("HV") * tiles);
  };
  return t;
}

/// One call: all chunks of one sequence, one value head, BV columns of the state.
Template cpu() {
  Template t = reverse_scan::cpu(stage());
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = cuda::ceil_div(constants.integer("V"), config.integer("BV"));
    return Geometry{.grid = {tiles, constants.integer("HV"), e.N},
                    .shared_bytes = reverse_scan::cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu()}; }

}  // namespace wyvern::bwd_dhu
