// Shared by the contracts of Hopper templates: views of tensors for TMA, and how many blocks a
// sequence is split over.
#pragma once

#include <algorithm>
#include <cstdint>

#include "templates/cost.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/layer/stages.hpp"
#include "templates/scan/stages.hpp"
#include "templates/tiled_view.hpp"

namespace wyvern::hopper {

/// Covers a stage that operators have only with these flags.
inline Cover when(Cover cover, const Presence& flags) {
  cover.only_when = flags;
  return cover;
}

/// The stages of a pass where earlier kernels have found the states that enter segments.
inline std::vector<Cover> resumed(std::vector<Cover> pass) {
  for (Cover& cover : pass) {
    if (cover.stage == &stages::fwd_h_segment)
      cover = when(std::move(cover), {!constant::SEGMENTS_GIVEN});
    else if (cover.stage != &stages::fwd_h_combine)
      continue;
    cover.done = true;
  }
  return pass;
}

/// Has a kernel whose last cover writes o, all columns of V in a block, normalize o too.
inline Template with_output_norm(Template t) {
  t.constants.push_back(constant::NORM_SILU);
  t.strided.push_back("norm_gate");
  t.covers.back().rename = {{"o", "o_raw"}};
  t.covers.push_back(stages::output_norm);
  return t;
}

/// Empty, or why it cannot.
inline std::string norm_problem(const Spec& s) {
  if (s.KEEP_OUTPUT) return "it does not write o before the norm";
  if (s.V == s.BV) return {};
  return fmt::format("V={} is not BV={}: a block must have whole rows of o", s.V, s.BV);
}

/// x [tokens, heads, width] of `type` as panels whose rows fill the swizzle's 128 bytes; one TMA
/// load or store moves `rows` tokens of `panels_a_box` panels of one head.
inline TiledView panels(const Extents& e, DType type, std::int64_t heads, std::int64_t width,
                        std::int64_t rows, std::int64_t panels_a_box) {
  const auto size = static_cast<std::int64_t>(size_of(type));
  const std::int64_t panel = 128 / size;
  return {.dims = {panel, e.B * e.T, width / panel, heads},
          .strides = {heads * width * size, 128, width * size},
          .box = {panel, rows, panels_a_box, 1},
          .swizzle = Swizzle::bytes128};
}

/// Matrices of a chunk slot and value head, [NT, HV, rows, columns]; a TMA load or store moves
/// `part` rows of `panels` panels of 64 columns.
inline TiledView matrices(const Spec& s, const Extents& e, std::int64_t rows, std::int64_t columns,
                          std::int64_t part, std::int64_t panels) {
  const auto size = static_cast<std::int64_t>(size_of(s.DTYPE));
  return {.dims = {64, rows, columns / 64, e.NT * s.HV},
          .strides = {columns * size, 64 * size, rows * columns * size},
          .box = {64, part, panels, 1},
          .swizzle = Swizzle::bytes128};
}

/// For each sequence and value head, how many warps of its splits have read their initial state.
/// With states updated in place the last split may overwrite that slot, so it waits until all
/// others' warps have read it (device/cuda/split.cuh).
inline Argument slots_read(const Presence& when) {
  return {"slots_read", Access::scratch, DType::int32, {extent::N, constant::HV}, when};
}

/// Blocks of a scan without splits, each with BV columns of V of a sequence and value head.
inline std::int64_t unsplit_blocks(const Spec& s, const Extents& e) {
  return e.N * s.HV * (s.V / s.BV);
}

/// Splits of a sequence: as many as leave a multiprocessor for each block, with at least `least`
/// chunks each in the mean sequence. 1 with BATCH_INVARIANT, where bits must not depend on the
/// number of sequences.
inline std::int64_t sequence_splits(const Spec& s, const Extents& e, std::int64_t least,
                                    const Limits& limits) {
  const std::int64_t blocks = unsplit_blocks(s, e);
  if (s.BATCH_INVARIANT || blocks == 0) return 1;
  const std::int64_t chunks = e.NT / e.N;
  return std::max<std::int64_t>(1, std::min(limits.multiprocessors / blocks, chunks / least));
}

/// Cost of a scan with `splits` splits of a sequence: the mean of its cost with fast decay, where a
/// split's overlap is `overlap` chunks, and with slow decay, where the overlap of the last split is
/// all of the sequence before it; `slow` is the latter's part where there are splits. Both are at
/// least `least`.
inline double split_scan_cost(cost::Pace pace, std::int64_t splits, std::int64_t overlap,
                              const Spec& s, const Workload& w, const Limits& limits,
                              double least = 0, double slow = 1) {
  const std::int64_t longest = cost::longest_scan(w);
  if (longest == 0) return cost::kLaunch;
  const auto chunks = static_cast<double>(longest);
  const auto slots = static_cast<double>(w.extents.NT);
  const std::int64_t of_a_slot = s.HV * (s.V / s.BV) * splits;
  const auto blocks = slots * static_cast<double>(of_a_slot);
  const double even = std::min(1.0, slots / (static_cast<double>(w.extents.N) * chunks));
  const auto time = [&](std::int64_t length) {
    const auto each = static_cast<double>(length);
    return std::max(least, cost::scans(pace, each, blocks * each / chunks, limits, even));
  };
  const std::int64_t own = cuda::ceil_div(longest, splits);
  if (splits == 1) return time(longest);
  return 0.5 * (time(std::min(own + overlap, longest)) + slow * time(longest));
}

/// Cost of scans to the end of each sequence, or of each segment where sequences are split. A value
/// head has `columns` columns of states, a block BV of them.
inline double scan_cost(cost::Pace pace, std::int64_t columns, const Spec& s, const Workload& w,
                        const Limits& limits) {
  const auto longest = static_cast<double>(cost::longest_scan(w));
  const std::int64_t tiles = s.HV * (columns / s.BV);
  const auto chunks = static_cast<double>(w.extents.NT * tiles);
  const auto scans = static_cast<double>((w.shape.SEG == 0 ? w.extents.N : w.extents.NS) * tiles);
  const double even = longest * scans == 0 ? 1 : std::min(1.0, chunks / (longest * scans));
  return cost::scans(pace, longest, chunks, limits, even);
}

/// Segments whose maps are found: all but each sequence's last, with SUMMARY all.
inline std::int64_t mapped_segments(const Spec& s, const Extents& e) {
  return e.NS - (s.SUMMARY ? 0 : e.N);
}

/// The same for these segments.
inline double segment_cost(cost::Pace pace, std::int64_t columns, const Spec& s, Workload w,
                           const Limits& limits) {
  w.extents.NS = mapped_segments(s, w.extents);
  if (!s.SUMMARY) w.extents.NT = w.extents.NS * w.shape.SEG;
  return scan_cost(pace, columns, s, w, limits);
}

}  // namespace wyvern::hopper
