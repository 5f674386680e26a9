#include "templates/scan_contract.hpp"

namespace wyvern::fwd_h_segment {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "fwd_h_segment";
  t.stages = {"fwd_h_segment"};
  t.summary = "What each segment but a sequence's last does to a state: S -> M S + R.";
  t.arguments = scan::joined(
      scan::kInputs, {
                         {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
                         {"segment_M", Access::out, "fp32", {"NS", "HV", "K", "K"}, ""},
                         {"segment_R", Access::out, "fp32", {"NS", "HV", "K", "V"}, ""},
                     });
  t.constants = scan::kConstants;
  return t;
}

/// CUDA, sm_80 and up: one block BV columns of a segment's M or R, for one value head.
Template portable() {
  Template t = scan::split(scan::portable(stage()));
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = scan::segment_tiles(constants, config);
    return scan::cuda_geometry(constants, config, e.NS * constants.integer("HV") * tiles);
  };
  return t;
}

/// One call: BV columns of a segment's M or R, for one value head.
Template cpu() {
  Template t = scan::split(scan::cpu(stage()));
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    return Geometry{.grid = {scan::segment_tiles(constants, config), constants.integer("HV"), e.NS},
                    .shared_bytes = scan::cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu()}; }

}  // namespace wyvern::fwd_h_segment
