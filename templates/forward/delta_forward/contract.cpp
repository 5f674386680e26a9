#include <algorithm>
#include <functional>

#include "templates/forward/delta_forward/hopper_layout.hpp"
#include "templates/forward/stages.hpp"
#include "templates/gate/stages.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/intra/stages.hpp"
#include "templates/output/stages.hpp"
#include "templates/pool_contract.hpp"
#include "templates/rows/stages.hpp"
#include "templates/scan/scan_contract.hpp"
#include "templates/scan/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::delta_forward {
namespace {

TiledView keys(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.H, s.K, kRows, s.K / 64);
}
TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, s.BV / 64);
}
TiledView outputs(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, kColumns / 64);
}

/// [NT, HV, K, V]: one TMA store moves 64 columns of a state.
TiledView states(const Spec& s, const Extents& e) {
  return hopper::matrices(s, e, s.K, s.V, s.K, 1);
}

/// Splits of a sequence. Without a gate older states never decay, so a block scans all of it.
std::int64_t splits(const Spec& s, const Extents& e, const Limits& limits) {
  if (!s.SCALAR_GATE) return 1;
  return hopper::sequence_splits(s, e, 16, limits);
}

std::int64_t blocks(const Spec& s, const Extents& e, const Limits& limits) {
  return hopper::unsplit_blocks(s, e) * splits(s, e, limits);
}

/// Microseconds of a chunk in a block of 64 or 128 columns of V (one H200, 2026-11-26 and, of 128
/// columns, 2026-11-29). Norms take the time of the one prep warpgroup beside two consumers.
double chunk_time(const Spec& s) {
  if (s.K == 256) return 3.4;
  if (s.K == 64) return 1.33;
  if (s.BV == kColumns) return 1.83;
  return s.QK_L2NORM ? 2.8 : 2.6;
}

/// The same in a segment for its output. With K = 128, as that for its map, fitted to whole plans
/// (one H100 and one H200, 2026-11-26; one H200, 2026-11-29), off by 4 to 6%.
cost::Pace resume_pace(const Spec& s) {
  const double wide = s.QK_L2NORM ? 2.75 : 2.5;
  const double chunk = s.K == 256 ? 2.6 : s.K == 64 ? 0.84 : s.BV > kColumns ? wide : 2.0;
  return {6, (s.K == 128 || s.GATED ? 1.0 : 1.25) * chunk};
}

/// And for its map: with a gate the mean of slow decay and of fast, where most maps are 0.
cost::Pace map_pace(const Spec& s) {
  if (s.K != 128) return resume_pace(s);
  if (!s.GATED) return {9, s.BV > kColumns ? 1.7 : 1.05};
  return {6, s.BV > kColumns ? 1.05 : 0.8};
}

/// Microseconds that so many elements take at a part of memory's rate.
double moved(std::int64_t elements, double part, const Spec& s, const Limits& limits) {
  constexpr double kH200 = 4.8e6;
  const double rate = limits.bytes_per_us > 0 ? limits.bytes_per_us : kH200;
  return static_cast<double>(elements) * static_cast<double>(size_of(s.DTYPE)) / (part * rate);
}

/// Elements of q, k, v and o.
std::int64_t rows(const Spec& s, const Workload& w) {
  return 2 * w.extents.B * w.extents.T * (s.H * s.K + s.HV * s.V);
}

/// Microseconds of these rows at two thirds of memory's rate, which a pass from given maps cannot
/// beat with many heads. One H100, 2026-11-28, 64 heads, 8,192 tokens: 256 in one kernel, 390 with
/// segments of 32 chunks, whose maps and summary alone take 190.
double moved_rows(const Spec& s, const Workload& w, const Limits& limits) {
  return moved(rows(s, w), 0.67, s, limits);
}

/// The same with V' and the states of chunks, which a pass that keeps them cannot beat. Three
/// quarters: what delta_scans, which writes as much, reaches on an H200.
double moved_with_kept(const Spec& s, const Workload& w, const Limits& limits) {
  const std::int64_t kept = s.HV * s.V * (w.extents.B * w.extents.T + w.extents.NT * s.K);
  return moved(rows(s, w) + kept, 0.75, s, limits);
}

/// Of a sequence's blocks of 128 columns two split the columns where slow decay keeps them from
/// splitting the tokens.
double pass_cost(const Spec& s, const Workload& w, const Limits& limits) {
  const bool halves = s.BV > kColumns;
  return hopper::split_scan_cost({0, chunk_time(s)}, splits(s, w.extents, limits), halves ? 8 : 16,
                                 s, w, limits, /*least=*/0, /*slow=*/halves ? 0.73 : 1);
}

std::string illegal_anywhere(const Spec& s) {
  if (s.BT != kRows)
    return fmt::format("BT={} is not the {} rows of a warpgroup's product", s.BT, kRows);
  if (!cuda::is_half(s)) return "wgmma has no fp32 products";
  if (s.K != 64 && s.K != 128 && s.K != 256)
    return fmt::format("K={} is not one of 64, 128 and 256, whose states a warpgroup can hold",
                       s.K);
  if (s.K == 256 && s.BV != kColumns)
    return fmt::format("BV={} with K=256 is more than shared memory holds", s.BV);
  if (s.BV != kColumns && s.QK_L2NORM && s.DTYPE == DType::fp16)
    return fmt::format("BV={} leaves no registers for fp16 rows with norms", s.BV);
  if (s.V % s.BV != 0) return fmt::format("V={} is not a multiple of BV={}", s.V, s.BV);
  if (s.BATCH_INVARIANT && s.BV != kColumns)
    return fmt::format("BV={} defers decay, so that bits depend on earlier chunks", s.BV);
  if (s.NEG_EIGVAL) return "allow_neg_eigval needs more digits than 16-bit products keep";
  if (s.KEEP_INVERSE) return "it does not write chunks' inverses";
  if (std::string reason = pool::checkpoint_problem(s); !reason.empty()) return reason;
  return pool::scale_problem(s);
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (std::string reason = illegal_anywhere(s); !reason.empty()) return reason;
  return cuda::exceeds_shared(HopperLayout(s, s.CHECKPOINTS).bytes, limits);
}

std::string illegal_with_output(const Spec& s, const Limits& limits) {
  if (s.KEEP_STATES) return "it does not write chunks' states";
  return illegal(s, limits);
}

std::string illegal_with_norm(const Spec& s, const Limits& limits) {
  if (std::string reason = hopper::norm_problem(s); !reason.empty()) return reason;
  if (std::string reason = illegal_with_output(s, limits); !reason.empty()) return reason;
  return cuda::exceeds_shared(HopperLayout(s, s.CHECKPOINTS, true).bytes, limits);
}

std::string illegal_with_kept(const Spec& s, const Limits& limits) {
  if (!s.KEEP_STATES) return "it writes chunks' states, which nothing asks for";
  if (std::string reason = illegal_anywhere(s); !reason.empty()) return reason;
  if (s.K > 128) return fmt::format("K={} leaves no room for states beside checkpoints'", s.K);
  if (s.CHECKPOINTS) return "it writes states of chunks or of checkpoints, not both";
  return cuda::exceeds_shared(HopperLayout(s, false, false, true).bytes, limits);
}

/// The stages of the whole pass.
std::vector<Cover> whole_pass() {
  return {
      hopper::when({stages::l2norm_rstd, {{"x", "q"}, {"rstd", "q_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::l2norm_rstd, {{"x", "k"}, {"rstd", "k_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::gate, {{"g_log", "g"}}}, {constant::GATE_IN_KERNEL}),
      hopper::when({stages::chunk_local_cumsum}, {constant::SCALAR_GATE}),
      stages::scaled_dot_kkt,
      stages::solve_tril,
      stages::recompute_w_u,
      stages::fwd_h_segment,
      stages::fwd_h_combine,
      stages::fwd_h,
      stages::fwd_o};
}

/// What all four kernels share.
Template scan_kernel(std::string name, std::string source) {
  Template t;
  t.name = std::move(name);
  t.variant = "hopper";
  t.source = std::move(source);
  t.constants = {constant::DTYPE,       constant::BETA_DTYPE,  constant::G_DTYPE,
                 constant::K,           constant::V,           constant::VARLEN,
                 constant::SCALAR_GATE, constant::VECTOR_GATE, constant::GATE_IN_KERNEL,
                 constant::HAS_DT_BIAS, constant::QK_L2NORM,   constant::BETA_SIGMOID,
                 constant::NEG_EIGVAL,  constant::STATE_UNIT};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kRows})},
                {tunable::BV, cuda::integers({64, 128})},
                {tunable::num_stages, cuda::integers({3, 2})}};
  t.tensor_maps = {{.name = "k_map", .argument = "k", .view = keys},
                   {.name = "v_map", .argument = "v", .view = values}};
  t.strided = {"k", "v", "beta", "g"};
  t.illegal = illegal;
  return t;
}

/// The same with queries and the output.
Template output_kernel(std::string name, std::string source) {
  Template t = scan_kernel(std::move(name), std::move(source));
  t.constants = scan::joined(pool::with_checkpoints(pool::with_final_slots(t.constants)),
                             {constant::FINAL_STATE, constant::STATE_V_FIRST});
  t.tensor_maps.insert(t.tensor_maps.begin(), {.name = "q_map", .argument = "q", .view = keys});
  t.tensor_maps.push_back({.name = "o_map", .argument = "o", .view = outputs});
  t.strided = {"q", "k", "v", "beta", "g", "o", "state"};
  t.illegal = illegal_with_output;
  return t;
}

Geometry launch(const Spec& s, std::int64_t blocks, bool normalizes = false, bool keeps = false) {
  const HopperLayout layout(s, s.CHECKPOINTS, normalizes, keeps);
  return Geometry{.grid = {blocks, 1, 1},
                  .threads = 128 * (1 + layout.prep_groups + layout.consumers),
                  .shared_bytes = layout.bytes};
}

/// Hopper: one block BV columns of V of a sequence and value head.
Template one_kernel() {
  Template t = output_kernel("delta_forward", "hopper.cu");
  t.summary = "The forward pass in one kernel, for a gate a head or none: the state stays on chip.";
  t.cost = pass_cost;
  t.covers = whole_pass();
  t.additional = {hopper::slots_read({constant::INPLACE_STATE, constant::SCALAR_GATE})};
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return launch(s, blocks(s, e, limits));
  };
  return t;
}

/// Hopper: the same with the norm of o, one block a sequence and value head. A chunk takes half as
/// long again, since nothing overlaps the epilogue of two consumers (one H100, 2026-11-27).
Template with_norm() {
  Template t = output_kernel("delta_forward_norm", "hopper.cu");
  t.summary = "The forward pass and the norm of o in one kernel, for a gate a head or none.";
  t.tunables[1] = {tunable::BV, cuda::integers({128})};
  t.tensor_maps.push_back({.name = "norm_gate_map", .argument = "norm_gate", .view = outputs});
  t.covers = whole_pass();
  t.illegal = illegal_with_norm;
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return 1.5 * hopper::split_scan_cost({0, chunk_time(s)}, splits(s, w.extents, limits), 16, s, w,
                                         limits);
  };
  t.additional = {hopper::slots_read({constant::INPLACE_STATE, constant::SCALAR_GATE})};
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return launch(s, blocks(s, e, limits), true);
  };
  return hopper::with_output_norm(std::move(t));
}

/// Of a kernel with an output: the same that keeps the states that enter chunks and V'. Staging a
/// state takes its part of each chunk, and with 128 columns one of the pipeline's stages.
Template keeping(Template t, std::string summary,
                 std::function<std::int64_t(const Spec&, const Extents&, const Limits&)> blocks) {
  t.name += "_keep";
  t.summary = std::move(summary);
  t.keeps = {{"h", {constant::KEEP_STATES}}, {"v_new", {constant::KEEP_STATES}}};
  t.tensor_maps.push_back(
      {.name = "h_map", .argument = "h", .view = states, .when = {constant::KEEP_STATES}});
  t.tensor_maps.push_back(
      {.name = "v_new_map", .argument = "v_new", .view = outputs, .when = {constant::KEEP_STATES}});
  t.illegal = illegal_with_kept;
  t.cost = [cost = std::move(t.cost)](const Spec& s, const Workload& w, const Limits& limits) {
    return std::max(1.15 * cost(s, w, limits), moved_with_kept(s, w, limits));
  };
  t.geometry = [blocks = std::move(blocks)](const Spec& s, const Extents& e, const Limits& limits) {
    return launch(s, blocks(s, e, limits), false, true);
  };
  return t;
}

/// Hopper: one block BV columns of M or R of a value head and segment, but a sequence's last; with
/// SUMMARY it too.
Template segment() {
  Template t = scan::split(scan_kernel("delta_segment", "segment.cu"));
  t.constants = scan::joined(t.constants, {constant::SUMMARY});
  t.covers = {stages::delta_segment};
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.K % s.BV != 0) return fmt::format("K={} is not a multiple of BV={}", s.K, s.BV);
    if (std::string reason = scan::summary_problem(s); !reason.empty()) return reason;
    return illegal(s, limits);
  };
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::segment_cost(map_pace(s), s.K + s.V, s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, hopper::mapped_segments(s, e) * s.HV * ((s.K + s.V) / s.BV));
  };
  return t;
}

std::int64_t segment_blocks(const Spec& s, const Extents& e, const Limits&) {
  return e.NS * s.HV * (s.V / s.BV);
}

/// Hopper: one block BV columns of V of a segment and value head.
Template resume() {
  Template t = scan::split(output_kernel("delta_resume", "resume.cu"));
  t.summary = "The forward pass over all segments at once, from the states that enter them.";
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return std::max(hopper::scan_cost(resume_pace(s), s.V, s, w, limits),
                    s.SEGMENTS_GIVEN ? moved_rows(s, w, limits) : 0);
  };
  t.covers = scan::joined({stages::delta_resume}, hopper::resumed(whole_pass()));
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return launch(s, segment_blocks(s, e, limits));
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {
      one_kernel(),
      with_norm(),
      segment(),
      resume(),
      keeping(one_kernel(), "The forward pass in one kernel, which keeps states and V'.", blocks),
      keeping(resume(), "The forward pass over all segments at once, which keeps states and V'.",
              segment_blocks)};
}

}  // namespace wyvern::delta_forward
