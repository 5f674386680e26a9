#include "templates/backward/kda_pass_contract.hpp"
#include "templates/backward/kda_scans/layout.hpp"
#include "templates/backward/stages.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/scan/scan_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_scans {
namespace {

TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, s.BV / 64);
}
TiledView rows(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, 1);
}
/// [NT, HV, V, K]: one TMA store moves 64 rows of one state.
TiledView states(const Spec& s, const Extents& e) {
  return {.dims = {64, s.V, s.K / 64, e.NT * s.HV},
          .strides = {s.K * 2, 128, s.V * s.K * 2},
          .box = {64, kColumns, s.K / 64, 1},
          .swizzle = Swizzle::bytes128};
}
/// [NT, HV, count, BT, width]: a TMA load or store moves `panels` panels of 64 columns of one
/// matrix of a chunk and head.
TiledView matrices(const Spec& s, const Extents& e, std::int64_t count, std::int64_t width,
                   std::int64_t panels) {
  return {.dims = {64, e.NT * s.HV * count * kRows, width / 64, 1},
          .strides = {width * 2, 128, 128},
          .box = {64, kRows, panels, 1},
          .swizzle = Swizzle::bytes128};
}
TiledView decayed_rows(const Spec& s, const Extents& e) { return matrices(s, e, 3, s.K, s.K / 64); }
TiledView squares(const Spec& s, const Extents& e) { return matrices(s, e, 2, kRows, 1); }
TiledView chunk_values(const Spec& s, const Extents& e) { return matrices(s, e, 1, s.V, 1); }

/// One block BV columns of V of a sequence, value head and each of `directions`.
Template scans(std::string name, std::string source, std::int64_t directions) {
  const bool output = directions == 2;
  Template t;
  t.name = std::move(name);
  t.variant = "hopper";
  t.source = std::move(source);
  // Fitted to times of whole passes (one H200, 2026-11-25) and of summaries (one H100, 2026-11-27).
  const double wide = output ? 1.95 : 1.3, narrow = output ? 1.4 : 0.75;
  t.cost = [=](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::scan_cost({4, s.BV > kColumns ? wide : narrow}, directions * s.V, s, w, limits);
  };
  t.constants = {constant::DTYPE,  constant::K,           constant::V,
                 constant::VARLEN, constant::FINAL_STATE, constant::STATE_V_FIRST};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kRows})},
                {tunable::BV, cuda::integers({128, 64})},
                {tunable::num_stages, cuda::integers({3, 2})}};
  t.tensor_maps = {{.name = "rows_map", .argument = "decayed_rows", .view = decayed_rows},
                   {.name = "do_map", .argument = "do", .view = values},
                   {.name = "squares_map", .argument = "squares", .view = squares}};
  t.strided = {"do"};
  t.illegal = [output](const Spec& s, const Limits& limits) -> std::string {
    if (std::string reason = kda_pass::unsupported(s); !reason.empty()) return reason;
    if (s.V % s.BV != 0) return fmt::format("V={} is not a multiple of BV={}", s.V, s.BV);
    return cuda::exceeds_shared(HopperLayout(s, output).bytes, limits);
  };
  t.geometry = [directions, output](const Spec& s, const Extents& e, const Limits&) {
    const HopperLayout layout(s, output);
    return Geometry{.grid = {directions * e.N * s.HV * (s.V / s.BV), 1, 1},
                    .threads = 128 * (1 + layout.consumers),
                    .shared_bytes = layout.bytes};
  };
  return t;
}

/// Hopper: both scans, and what they find for each chunk.
Template whole() {
  Template t = scans("kda_scans", "hopper.cu", 2);
  t.covers = {stages::kda_scans};
  t.constants = scan::joined(t.constants, {constant::STATE_DTYPE, constant::INITIAL_STATE});
  t.tensor_maps =
      scan::joined(t.tensor_maps, {{.name = "v_map", .argument = "v", .view = values},
                                   {.name = "state_map", .argument = "states", .view = states},
                                   {.name = "z_map", .argument = "z", .view = chunk_values},
                                   {.name = "dstate_map", .argument = "dstates", .view = states},
                                   {.name = "dv_map", .argument = "dv", .view = rows}});
  t.strided.emplace_back("v");
  return t;
}

/// Hopper: the reverse scan alone.
Template summary() {
  Template t = scans("kda_scans_summary", "summary.cu", 1);
  t.covers = {stages::kda_scans_summary};
  t.constants.emplace_back(constant::SUMMARY);
  return t;
}

}  // namespace

std::vector<Template> contract() { return {whole(), summary()}; }

}  // namespace wyvern::kda_scans
