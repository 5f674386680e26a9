// Shared by the templates that pass states, or gradients of them, from segment to segment:
// fwd_h_combine, bwd_dhu_combine, and to a sequence's end: fwd_h_summary, bwd_dhu_summary.
#pragma once

#include "templates/scan/scan_contract.hpp"

namespace wyvern::combine {

inline std::int64_t shared_bytes(const Spec& s) { return cuda::CombineLayout(s).bytes; }

/// CUDA, sm_80 and up: one block BV value columns of a sequence and value head; each warp sixteen
/// of the BK rows of M that are in registers at a time.
inline Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::BV, cuda::integers({16, 32})},
                {tunable::BK, cuda::integers({128, 64, 32})},
                {tunable::num_warps, cuda::integers({8, 4, 2})},
                {tunable::precision, cuda::kPrecisionValues},
                scan::segments()};
  t.source = "portable.cu";
  t.illegal = [](const Spec& s, const Limits& limits) {
    if (s.BK != 16 * s.num_warps)
      return fmt::format("BK={} is not 16 rows for each of {} warps", s.BK, s.num_warps);
    return cuda::exceeds_shared(shared_bytes(s), limits);
  };
  t.redundant = [](const Spec&) { return false; };
  t.fallback = [](Spec& s, const Limits& limits) {
    // A segment takes 2.05 us with 16 columns and 3.2 with 32 (one H200, 2026-11-28, K = V = 128),
    // so that one wave of wide blocks beats two of narrow ones.
    s.BV = s.HV * cuda::ceil_div(s.V, 16) > std::max(limits.multiprocessors, 132) ? 32 : 16;
    // All rows of a state at once, or the 128 that eight warps hold.
    s.num_warps = s.K > 64 ? 8 : s.K > 32 ? 4 : 2;
    s.BK = 16 * s.num_warps;
    s.precision = cuda::is_half(s) ? Precision::tf32 : Precision::tf32x3;
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t tiles = cuda::ceil_div(s.V, s.BV);
    return cuda::launch_rows(e.N, s.HV * tiles, s, shared_bytes(s));
  };
  return t;
}

/// One call: all segments of one sequence, one value head, BV columns of the state.
inline Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, kCpuChunkSizes}, {tunable::BV, {128, 64, 32}}, scan::segments()};
  t.illegal = [](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem("BV", s.BV, s.V);
    return problem.empty() ? scratch_problem(scratch_bytes<cpu::SegmentStatesLayout>(s), limits)
                           : problem;
  };
  t.fallback = [](Spec& s, const Limits&) { s.BV = column_block(s.V, 64); };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t tiles = cuda::ceil_div(s.V, s.BV);
    return Geometry{.grid = {tiles, s.HV, e.N},
                    .shared_bytes = scratch_bytes<cpu::SegmentStatesLayout>(s)};
  };
  return t;
}

/// The same where blocks write what leaves a sequence, `tiles(s)` a value head, in fp32.
inline std::vector<Template> summaries(const Template& stage, std::int64_t (*tiles)(const Spec&)) {
  Template cuda = portable(stage);
  for (Tunable& tunable : cuda.tunables)
    if (tunable.name == tunable::precision.name)
      tunable.values = {Precision::tf32x3, Precision::ieee};
  cuda.fallback = [fallback = cuda.fallback](Spec& s, const Limits& limits) {
    fallback(s, limits);
    s.precision = Precision::tf32x3;
  };
  cuda.geometry = [tiles](const Spec& s, const Extents& e, const Limits&) {
    return cuda::launch_rows(e.N, s.HV * tiles(s), s, shared_bytes(s));
  };
  Template host = cpu(stage);
  host.geometry = [tiles](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {tiles(s), s.HV, e.N},
                    .shared_bytes = scratch_bytes<cpu::SegmentStatesLayout>(s)};
  };
  std::vector<Template> all{std::move(cuda), std::move(host)};
  for (Template& t : all)
    for (Tunable& tunable : t.tunables)
      if (tunable.name == tunable::SEG.name) tunable.values = cuda::integers({16, 8, 32});
  return all;
}

}  // namespace wyvern::combine
