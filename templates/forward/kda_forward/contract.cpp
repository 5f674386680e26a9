// For the layout's loops: that header is compiled by NVRTC too, where there is none.
#include <initializer_list>

#include "templates/forward/kda_forward/hopper_layout.hpp"
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

namespace wyvern::kda_forward {
namespace {

TiledView keys(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.H, s.K, kSlice, 1);
}
TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kSlice, s.BV / 64);
}
TiledView gates(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.G_DTYPE, s.HV, s.K, kSlice,
                        s.K * static_cast<std::int64_t>(size_of(s.G_DTYPE)) / 128);
}

/// Splits of a sequence.
std::int64_t splits(const Spec& s, const Extents& e, const Limits& limits) {
  return hopper::sequence_splits(s, e, 4, limits);
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (s.BT != kChunk) return fmt::format("BT={} must be {}", s.BT, kChunk);
  // Decayed rows need fp32's range, which bf16 has and fp16 lacks.
  if (s.DTYPE != DType::bf16) return "DTYPE must be bf16: decayed rows need its range";
  if (s.K != 64 && s.K != 128)
    return fmt::format("K={} is not one of 64 and 128, whose states a warpgroup can hold", s.K);
  if (s.V % s.BV != 0) return fmt::format("V={} is not a multiple of BV={}", s.V, s.BV);
  if (s.NEG_EIGVAL) return "allow_neg_eigval needs more digits than 16-bit products keep";
  if (s.ERASE_WRITE) return "it has beta, no erase and write gates";
  if (s.KEEP_STATES || s.KEEP_INVERSE) return "it does not write chunks' states or inverses";
  if (std::string reason = pool::checkpoint_problem(s); !reason.empty()) return reason;
  if (std::string reason = pool::scale_problem(s); !reason.empty()) return reason;
  return cuda::exceeds_shared(HopperLayout(s, s.CHECKPOINTS).bytes, limits);
}

std::string illegal_with_norm(const Spec& s, const Limits& limits) {
  if (std::string reason = hopper::norm_problem(s); !reason.empty()) return reason;
  if (std::string reason = illegal(s, limits); !reason.empty()) return reason;
  return cuda::exceeds_shared(HopperLayout(s, s.CHECKPOINTS, true).bytes, limits);
}

/// A chunk in a block of 64 or 128 columns of V (one H200, 2026-11-26; means of fast and slow
/// decay), after a start in which the load warpgroups prepare the first slices.
cost::Pace pace(const Spec& s) {
  if (s.BV > kColumns) return {12, s.K == 64 ? 2.2 : 5};
  return {12, s.K == 64 ? 2.2 : load_warpgroups(s.BV, s.num_stages) > 2 ? 3.4 : 3.5};
}

/// The same in a segment, for its map.
cost::Pace segment_pace(const Spec& s) {
  return {12, s.K == 64 ? 1.9 : s.BV > kColumns ? 4.3 : 3.2};
}
/// Microseconds of all segment maps with fast decay, where they are 0.
constexpr double kDecayed = 30;
/// How much longer a chunk takes with the norm of o (one H100, 2026-11-28).
constexpr double kNormFactor = 1.27;
/// Chunks of a split's overlap with fast decay: one, and the time of two to find its length.
constexpr int kOverlap = 3;

/// The stages of the whole pass.
std::vector<Cover> whole_pass() {
  return {
      hopper::when({stages::l2norm_rstd, {{"x", "q"}, {"rstd", "q_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::l2norm_rstd, {{"x", "k"}, {"rstd", "k_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::kda_gate, {{"g_log", "g"}}}, {constant::GATE_IN_KERNEL}),
      {stages::chunk_local_cumsum, {{"G", "Gk"}}},
      stages::kda_intra,
      stages::solve_tril,
      stages::kda_recompute_w_u,
      stages::fwd_h_segment,
      stages::fwd_h_combine,
      stages::fwd_h,
      stages::kda_fwd_o};
}

/// What all four kernels share.
Template scan_kernel(std::string name, std::string source) {
  Template t;
  t.name = std::move(name);
  t.variant = "hopper";
  t.source = std::move(source);
  t.constants = {constant::DTYPE,
                 constant::BETA_DTYPE,
                 constant::G_DTYPE,
                 constant::K,
                 constant::V,
                 constant::VARLEN,
                 constant::SCALAR_GATE,
                 constant::VECTOR_GATE,
                 constant::GATE_IN_KERNEL,
                 constant::HAS_A_LOG,
                 constant::HAS_DT_BIAS,
                 constant::LOWER_BOUND,
                 constant::QK_L2NORM,
                 constant::BETA_SIGMOID,
                 constant::NEG_EIGVAL,
                 constant::ERASE_WRITE,
                 constant::STATE_UNIT};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kChunk})},
                {tunable::BV, cuda::integers({128, 64})},
                {tunable::num_stages, cuda::integers({13, 11, 10, 9})}};
  t.tensor_maps = {{.name = "k_map", .argument = "k", .view = keys},
                   {.name = "v_map", .argument = "v", .view = values},
                   {.name = "g_map", .argument = "g", .view = gates}};
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
  t.strided = {"q", "k", "v", "beta", "g", "o", "state"};
  return t;
}

Geometry launch(const Spec& s, std::int64_t blocks, bool normalizes = false) {
  return Geometry{.grid = {blocks, 1, 1},
                  .threads = threads(s.BV, s.num_stages),
                  .shared_bytes = HopperLayout(s, s.CHECKPOINTS, normalizes).bytes};
}

/// Hopper: one block BV columns of V of a sequence and value head.
Template one_kernel() {
  Template t = output_kernel("kda_forward", "hopper.cu");
  t.summary = "The forward pass in one kernel, for a gate a key channel: the state stays on chip.";
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::split_scan_cost(pace(s), splits(s, w.extents, limits), kOverlap, s, w, limits);
  };
  t.covers = whole_pass();
  t.additional = {hopper::slots_read({constant::INPLACE_STATE})};
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return launch(s, hopper::unsplit_blocks(s, e) * splits(s, e, limits));
  };
  return t;
}

/// Hopper: the same with the norm of o, one block a sequence and value head.
Template with_norm() {
  Template t = output_kernel("kda_forward_norm", "hopper.cu");
  t.summary = "The forward pass and the norm of o in one kernel, for a gate a key channel.";
  t.tunables[1] = {tunable::BV, cuda::integers({128})};
  t.covers = whole_pass();
  t.illegal = illegal_with_norm;
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    cost::Pace slower = pace(s);
    slower.chunk *= kNormFactor;
    return hopper::split_scan_cost(slower, splits(s, w.extents, limits), kOverlap, s, w, limits);
  };
  t.additional = {hopper::slots_read({constant::INPLACE_STATE})};
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return launch(s, hopper::unsplit_blocks(s, e) * splits(s, e, limits), true);
  };
  return hopper::with_output_norm(std::move(t));
}

/// Hopper: one block BV columns of M or R of a value head and segment, but a sequence's last; with
/// SUMMARY it too.
Template segment() {
  Template t = scan::split(scan_kernel("kda_segment", "segment.cu"));
  t.constants = scan::joined(t.constants, {constant::SUMMARY});
  t.covers = {stages::kda_segment};
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.K % s.BV != 0) return fmt::format("K={} is not a multiple of BV={}", s.K, s.BV);
    if (std::string reason = scan::summary_problem(s); !reason.empty()) return reason;
    return illegal(s, limits);
  };
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    const double slow = hopper::segment_cost(segment_pace(s), s.K + s.V, s, w, limits);
    return 0.5 * (slow + std::min(slow, cost::kLaunch + kDecayed));
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, hopper::mapped_segments(s, e) * s.HV * ((s.K + s.V) / s.BV));
  };
  return t;
}

/// Hopper: one block BV columns of V of a segment and value head.
Template resume() {
  Template t = scan::split(output_kernel("kda_resume", "resume.cu"));
  t.summary = "The forward pass over all segments at once, from the states that enter them.";
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::scan_cost(pace(s), s.V, s, w, limits);
  };
  t.covers = scan::joined({stages::kda_resume}, hopper::resumed(whole_pass()));
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, e.NS * s.HV * (s.V / s.BV));
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {one_kernel(), with_norm(), segment(), resume()}; }

}  // namespace wyvern::kda_forward
