#include "templates/backward/delta_scans/layout.hpp"
#include "templates/backward/stages.hpp"
#include "templates/backward/views.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/scan/scan_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::delta_scans {
namespace {

using backward_views::keys;
using backward_views::matrices;

/// v or do, of a block's columns.
TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, s.BV / 64);
}
/// 64 columns of dV.
TiledView rows(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, 1);
}
/// [NT, HV, V, K]: one TMA store moves 64 rows of one state.
TiledView states(const Spec& s, const Extents& e) {
  return matrices(s, e, s.V, s.K, kColumns, s.K / 64);
}
/// [NT, HV, BT, V]: one TMA store moves 64 columns of a chunk and head.
TiledView chunks(const Spec& s, const Extents& e) {
  return {.dims = {64, e.NT * s.HV * kRows, s.V / 64, 1},
          .strides = {s.V * 2, 128, 128},
          .box = {64, kRows, 1, 1},
          .swizzle = Swizzle::bytes128};
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (s.BT != kRows)
    return fmt::format("BT={} is not the {} rows of a warpgroup's product", s.BT, kRows);
  if (s.DTYPE != DType::bf16) return "DTYPE must be bf16: products include factors down to 2^-40";
  if (s.K != 64 && s.K != 128 && s.K != 256)
    return fmt::format(
        "K={} is not one of 64, 128 and 256, whose states fit into a warpgroup's registers", s.K);
  if (s.K == 256 && s.BV != kColumns)
    return fmt::format("BV={} with K=256 is more than shared memory holds", s.BV);
  if (s.V % s.BV != 0) return fmt::format("V={} is not a multiple of BV={}", s.V, s.BV);
  return cuda::exceeds_shared(HopperLayout(s).bytes, limits);
}

/// What all share.
Template scans(std::string name, std::string source) {
  Template t;
  t.name = std::move(name);
  t.variant = "hopper";
  t.source = std::move(source);
  t.constants = {
      constant::DTYPE,     constant::BETA_DTYPE,  constant::G_DTYPE,     constant::K,
      constant::V,         constant::VARLEN,      constant::SCALAR_GATE, constant::GATE_IN_KERNEL,
      constant::HAS_A_LOG, constant::HAS_DT_BIAS, constant::QK_L2NORM,   constant::BETA_SIGMOID,
      constant::NEG_EIGVAL};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kRows})},
                {tunable::BV, cuda::integers({128, 64})},
                {tunable::num_stages, cuda::integers({3, 2})}};
  t.tensor_maps = {{.name = "q_map", .argument = "q", .view = keys},
                   {.name = "k_map", .argument = "k", .view = keys},
                   {.name = "do_map", .argument = "do", .view = values}};
  t.strided = {"q", "k", "beta", "g", "do"};
  t.illegal = illegal;
  return t;
}

/// The reverse scan where it writes what it finds for each chunk.
Template reverse_scans(std::string name, std::string source) {
  Template t = scans(std::move(name), std::move(source));
  t.constants = scan::joined(t.constants, {constant::STATE_DTYPE, constant::INITIAL_STATE,
                                           constant::FINAL_STATE, constant::STATE_V_FIRST});
  t.tensor_maps =
      scan::joined(t.tensor_maps, {{.name = "dstate_map", .argument = "dstates", .view = states},
                                   {.name = "dv_map", .argument = "dv", .view = rows}});
  return t;
}

/// Has the template read v.
Template with_values(Template t) {
  t.tensor_maps.insert(t.tensor_maps.begin() + 2,
                       {.name = "v_map", .argument = "v", .view = values});
  t.strided.push_back("v");
  return t;
}

/// Both scans where they write what they find for each chunk.
Template written_scans(std::string name, std::string source) {
  Template t = with_values(reverse_scans(std::move(name), std::move(source)));
  t.tensor_maps.insert(t.tensor_maps.begin() + 4,
                       {{.name = "state_map", .argument = "states", .view = states},
                        {.name = "z_map", .argument = "z", .view = chunks}});
  return t;
}

/// Blocks for so many columns of states.
Geometry launch(const Spec& s, std::int64_t columns) {
  const HopperLayout layout(s);
  return Geometry{.grid = {columns / s.BV, 1, 1},
                  .threads = 128 * (1 + layout.prep_groups + layout.consumers),
                  .shared_bytes = layout.bytes};
}

/// Microseconds of a chunk in a block (one H200, 2026-11-26).
double chunk_time(const Spec& s) {
  return s.K == 256 ? 4.1 : s.K == 64 ? 1.3 : s.BV > kColumns ? 3 : 2.3;
}

/// The same in a segment: maps that have decayed to 0 are skipped.
cost::Pace segment_pace(const Spec& s) {
  const double part = (s.BV > kColumns ? 0.75 : 0.83) * (s.SCALAR_GATE ? 1.0 : 1.15);
  return {8, part * chunk_time(s)};
}

/// Hopper: one block BV columns of V of a sequence, value head and direction.
Template whole() {
  Template t = written_scans("delta_scans", "hopper.cu");
  t.covers = {stages::delta_scans};
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::scan_cost({4, chunk_time(s)}, 2 * s.V, s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, 2 * e.N * s.HV * s.V);
  };
  return t;
}

/// Columns of a segment's M, R and dR; with SUMMARY of dM and dR.
std::int64_t map_columns(const Spec& s) { return s.K + (s.SUMMARY ? 1 : 2) * s.V; }

/// Hopper: one block BV of these columns of a segment and value head.
Template segment() {
  Template t = scan::split(with_values(scans("delta_scans_segment", "segment.cu")));
  t.constants = scan::joined(t.constants, {constant::SUMMARY});
  t.covers = {stages::delta_scans_segment};
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.K % s.BV != 0) return fmt::format("K={} is not a multiple of BV={}", s.K, s.BV);
    if (std::string reason = scan::summary_problem(s); !reason.empty()) return reason;
    return illegal(s, limits);
  };
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::segment_cost(segment_pace(s), map_columns(s), s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, e.NS * s.HV * map_columns(s));
  };
  return t;
}

/// Hopper: one block BV columns of V of a segment, value head and direction.
Template resume() {
  Template t = scan::split(written_scans("delta_scans_resume", "resume.cu"));
  t.summary = "Both scans of all segments at once, from the states and gradients at their ends.";
  t.covers = {stages::delta_scans_resume, stages::delta_scans};
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::scan_cost(segment_pace(s), 2 * s.V, s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, 2 * e.NS * s.HV * s.V);
  };
  return t;
}

/// Hopper: one block BV columns of V of a sequence and value head.
Template reverse() {
  Template t = reverse_scans("delta_reverse", "reverse.cu");
  t.covers = {stages::delta_reverse};
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::scan_cost({4, chunk_time(s)}, s.V, s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, e.N * s.HV * s.V);
  };
  return t;
}

/// Hopper: one block BV columns of V of a segment and value head.
Template reverse_resume() {
  Template t = scan::split(reverse_scans("delta_reverse_resume", "reverse_resume.cu"));
  t.summary = "The reverse scan of all segments at once, from the gradients at their ends.";
  t.covers = {stages::delta_reverse_resume, stages::delta_reverse};
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::scan_cost(segment_pace(s), s.V, s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, e.NS * s.HV * s.V);
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {whole(), segment(), resume(), reverse(), reverse_resume()};
}

}  // namespace wyvern::delta_scans
