#include "templates/forward/kda_fwd_h_o/layout.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/output/stages.hpp"
#include "templates/pool_contract.hpp"
#include "templates/scan/scan_contract.hpp"
#include "templates/scan/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_fwd_h_o {
namespace {

TiledView keys(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.K, kChunk, s.K / 64);
}
TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kChunk, s.BV / 64);
}

/// Bytes of shared memory. Only kernels with queries write checkpoints.
std::int64_t shared_bytes(const Spec& s, bool queries) {
  return HopperLayout(s, queries, queries && s.CHECKPOINTS).bytes;
}

std::string illegal(const Spec& s, const Limits& limits, bool queries) {
  if (!s.VECTOR_GATE) return "it needs a gate per key channel, whose decay is in its rows";
  if (s.BT != kChunk)
    return fmt::format("BT={} is not the {} rows of a warpgroup's product", s.BT, kChunk);
  if (!cuda::is_half(s)) return "wgmma has no fp32 products";
  if (s.U_DTYPE != s.DTYPE) return "U_DTYPE must be DTYPE: TMA loads U as 16-bit rows";
  if (s.K != 64 && s.K != 128 && s.K != 256)
    return fmt::format("K={} is not one of 64, 128 and 256, whose states a warpgroup can hold",
                       s.K);
  if (s.K == 256 && s.BV != kColumns)
    return fmt::format("BV={} with K=256 is more than shared memory holds", s.BV);
  if (s.K == 256 && queries && s.CHECKPOINT_OFFSETS)
    return "with K=256 no checkpoint may be inside a chunk";
  if (s.V % s.BV != 0) return fmt::format("V={} is not a multiple of BV={}", s.V, s.BV);
  if (s.NEG_EIGVAL) return "allow_neg_eigval needs more digits than 16-bit products keep";
  if (std::string reason = pool::checkpoint_problem(s); !reason.empty()) return reason;
  if (std::string reason = pool::scale_problem(s); !reason.empty()) return reason;
  return cuda::exceeds_shared(shared_bytes(s, queries), limits);
}

/// A chunk in a block of 64 columns of V; blocks of 128 take twice as long (fitted to times of
/// whole plans, one H200, 2026-11-26).
cost::Pace pace(const Spec& s) {
  if (s.K == 256) return {8, 1.86};
  const std::int64_t consumers = s.BV / kColumns;
  return {8, 1.26 * static_cast<double>(consumers)};
}

/// The same in a segment; with K = 256 not measured.
cost::Pace segment_pace(const Spec& s) {
  const cost::Pace whole = pace(s);
  const double part = s.K == 256 ? 1 : 0.92;
  return {part * whole.start, part * whole.chunk};
}

/// What all three kernels share.
Template scan_kernel(std::string name, std::string source, bool queries) {
  Template t;
  t.name = std::move(name);
  t.variant = "hopper";
  t.source = std::move(source);
  t.constants = scan::kConstants;
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kChunk})},
                {tunable::BV, cuda::integers({64, 128})},
                {tunable::num_stages, cuda::integers({4, 3, 2})}};
  const Presence vector{constant::VECTOR_GATE};
  t.tensor_maps = {{.name = "w_map", .argument = "w", .view = keys},
                   {.name = "kg_map", .argument = "kg", .view = keys, .when = vector},
                   {.name = "u_map", .argument = "u", .view = values}};
  t.illegal = [queries](const Spec& s, const Limits& limits) {
    return illegal(s, limits, queries);
  };
  return t;
}

/// The same with queries and the output.
Template output_kernel(std::string name, std::string source) {
  Template t = scan_kernel(std::move(name), std::move(source), true);
  t.constants =
      scan::joined(pool::with_checkpoints(pool::with_final_slots(t.constants)),
                   {constant::FINAL_STATE, constant::STATE_V_FIRST, constant::KEEP_STATES});
  t.tensor_maps.push_back({.name = "qg_map", .argument = "qg", .view = keys});
  t.strided = {"k", "o", "state"};
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.KEEP_STATES) return std::string("it does not write states and V'");
    return illegal(s, limits, true);
  };
  return t;
}

Geometry launch(const Spec& s, std::int64_t blocks, bool queries) {
  return Geometry{.grid = {blocks, 1, 1},
                  .threads = 128 * (1 + s.BV / kColumns),
                  .shared_bytes = shared_bytes(s, queries)};
}

/// Microseconds to load all blocks' tiles: with few chunks a block the scan is bandwidth-bound.
/// Half of the scores are loaded, in fp32.
double load_time(const Spec& s, const Extents& e, const Limits& limits) {
  const double chunk = kChunk * static_cast<double>(2 * (3 * s.K + s.BV) + 2 * kChunk);
  const double bytes_per_us = limits.bytes_per_us > 0 ? limits.bytes_per_us : 4.8e6;
  constexpr double kReached = 0.85;  // of peak bandwidth
  const std::int64_t blocks = e.NT * s.HV * (s.V / s.BV);
  return cost::kLaunch + pace(s).start +
         static_cast<double>(blocks) * chunk / (kReached * bytes_per_us);
}

/// Chunks of a split's overlap with fast decay: one, and the time of three to find its length.
constexpr int kOverlap = 4;

/// Splits of a sequence.
std::int64_t splits(const Spec& s, const Extents& e, const Limits& limits) {
  return hopper::sequence_splits(s, e, 4, limits);
}

/// Hopper: one block BV columns of V of a sequence, or of a split of it, and value head.
Template whole_sequences() {
  Template t = output_kernel("kda_fwd_h_o", "hopper.cu");
  t.summary = "The state scan and the output at once: neither states nor V' are written.";
  t.constants = scan::joined(t.constants, {constant::INITIAL_STATE, constant::HAS_INITIAL_STATE});
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::split_scan_cost(pace(s), splits(s, w.extents, limits), kOverlap, s, w, limits,
                                   load_time(s, w.extents, limits));
  };
  t.covers = {stages::fwd_h_segment, stages::fwd_h_combine, stages::fwd_h, stages::kda_fwd_o};
  t.additional = {hopper::slots_read({constant::INPLACE_STATE, constant::VECTOR_GATE})};
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return launch(s, hopper::unsplit_blocks(s, e) * splits(s, e, limits), true);
  };
  return t;
}

/// Hopper: one block BV columns of M or R of a value head and segment, but a sequence's last; with
/// SUMMARY it too.
Template segment() {
  // Errors of a segment's M grow with its length: past 64 chunks o was off by 5.0e-3, with slow
  // decay, gates unbounded and no norms (one H200, 2026-11-26).
  Template t =
      scan::split(scan_kernel("fwd_h_segment", "segment.cu", false), cuda::integers({16, 8, 32}));
  t.constants = scan::joined(t.constants, {constant::SUMMARY});
  t.covers = {stages::fwd_h_segment};
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::segment_cost(segment_pace(s), s.K + s.V, s, w, limits);
  };
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.K % s.BV != 0) return fmt::format("K={} is not a multiple of BV={}", s.K, s.BV);
    return illegal(s, limits, false);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, hopper::mapped_segments(s, e) * s.HV * ((s.K + s.V) / s.BV), false);
  };
  return t;
}

/// Hopper: one block BV columns of V of a segment and value head.
Template resume() {
  Template t = scan::split(output_kernel("kda_fwd_h_o_resume", "resume.cu"));
  t.summary = "The state scan and the output of all segments, from the states that enter them.";
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return hopper::scan_cost(segment_pace(s), s.V, s, w, limits);
  };
  t.covers = {stages::fwd_h, stages::kda_fwd_o};
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    return launch(s, e.NS * s.HV * (s.V / s.BV), true);
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {whole_sequences(), segment(), resume()}; }

}  // namespace wyvern::kda_fwd_h_o
