#include "templates/reverse_scan_contract.hpp"

namespace wyvern::bwd_dhu_segment {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "bwd_dhu_segment";
  t.stages = {"bwd_dhu_segment"};
  t.summary = "What each segment but a first one does to a state's gradient: dS -> dM dS + dR.";
  t.arguments = scan::joined(
      reverse_scan::kInputs,
      {
          {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
          {"segment_dM", Access::out, "fp32", {"NS", "HV", "K", "K"}, ""},
          {"segment_dR", Access::out, "fp32", {"NS", "HV", "K", "V"}, ""},
      });
  t.constants = reverse_scan::kConstants;
  return t;
}

/// CUDA, sm_80 and up: one block BV columns of a segment's dM or dR, for one value head.
Template portable() {
  Template t = scan::split(reverse_scan::portable(stage()));
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = scan::segment_tiles(constants, config);
    return reverse_scan::cuda_geometry(constants, config, e.NS * constants.integer("HV") * tiles);
  };
  return t;
}

/// One call: BV columns of a segment's dM or dR, for one value head.
Template cpu() {
  Template t = scan::split(reverse_scan::cpu(stage()));
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t tiles = scan::segment_tiles(constants, config);
    return Geometry{.grid = {tiles, constants.integer("HV"), e.NS},
                    .shared_bytes = reverse_scan::cpu_scratch(constants, config)};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu()}; }

}  // namespace wyvern::bwd_dhu_segment
