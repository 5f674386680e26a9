// Shared by the contracts of Hopper templates: views of tensors for TMA, and how many blocks a
// sequence is split over.
#pragma once

#include <algorithm>
#include <cstdint>

#include "templates/cost.hpp"
#include "templates/cuda_contract.hpp"

namespace wyvern::hopper {

/// Where the operator has a stage only with these flags.
inline Cover when(Cover cover, const Presence& flags) {
  cover.only_when = flags;
  return cover;
}

/// x [tokens, heads, width] of `type` as panels whose rows fill the swizzle's 128 bytes; one TMA
/// load or store moves `rows` tokens of `panels_a_copy` panels of one head.
inline TiledView panels(const Extents& e, DType type, std::int64_t heads, std::int64_t width,
                        std::int64_t rows, std::int64_t panels_a_copy) {
  const auto size = static_cast<std::int64_t>(size_of(type));
  const std::int64_t panel = 128 / size;
  return {.dims = {panel, e.B * e.T, width / panel, heads},
          .strides = {heads * width * size, 128, width * size},
          .box = {panel, rows, panels_a_copy, 1},
          .swizzle = Swizzle::bytes128};
}

/// How many warps of the blocks that share a sequence, other than the one that writes its final
/// state, need the slot no more that it starts from: where states are updated in place, both may be
/// one (device/cuda/split.cuh).
inline Argument slots_read(const Presence& when) {
  return {"slots_read", Access::scratch, DType::int32, {extent::N, constant::HV}, when};
}

/// Walks side by side, of BV columns of V each, were no sequence shared out.
inline std::int64_t chains(const Spec& s, const Extents& e) { return e.N * s.HV * (s.V / s.BV); }

/// Blocks that share a sequence: as many as find a multiprocessor of their own, with shares of
/// `least` chunks of the mean sequence or more. One where bits are not to depend on how many walks
/// there are.
inline std::int64_t sequence_shares(const Spec& s, const Extents& e, std::int64_t least,
                                    const Limits& limits) {
  const std::int64_t walks = chains(s, e);
  if (s.BATCH_INVARIANT || walks == 0) return 1;
  const std::int64_t chunks = e.NT / e.N;
  return std::max<std::int64_t>(1, std::min(limits.multiprocessors / walks, chunks / least));
}

/// Cost of a scan split over `parts` blocks, each with BV columns of V: the
/// mean of gates that fade in `before` chunks, with which a block begins so many in front of its
/// share, and of gates that last, with which it walks through all of the sequence up to there; both
/// no less than `least`.
inline double shared_walk_cost(cost::Pace pace, std::int64_t parts, std::int64_t before,
                               const Spec& s, const Workload& w, const Limits& limits,
                               double least = 0) {
  const std::int64_t longest = cost::longest_walk(w);
  if (longest == 0) return cost::kLaunch;
  const auto chunks = static_cast<double>(longest);
  const auto slots = static_cast<double>(w.extents.NT);
  const std::int64_t of_a_slot = s.HV * (s.V / s.BV) * parts;
  const auto blocks = slots * static_cast<double>(of_a_slot);
  const double even = std::min(1.0, slots / (static_cast<double>(w.extents.N) * chunks));
  const auto time = [&](std::int64_t walk) {
    const auto each = static_cast<double>(walk);
    return std::max(least, cost::walks(pace, each, blocks * each / chunks, limits, even));
  };
  const std::int64_t share = cuda::ceil_div(longest, parts);
  if (parts == 1) return time(longest);
  return 0.5 * (time(std::min(share + before, longest)) + time(longest));
}

/// What walks take whose blocks have BV of the `columns` of all states of a value head: to the end
/// of each sequence, or of each segment where they are split.
inline double walk_cost(cost::Pace pace, std::int64_t columns, const Spec& s, const Workload& w,
                        const Limits& limits) {
  const auto longest = static_cast<double>(cost::longest_walk(w));
  const std::int64_t tiles = s.HV * (columns / s.BV);
  const auto chunks = static_cast<double>(w.extents.NT * tiles);
  const auto walks = static_cast<double>((w.shape.SEG == 0 ? w.extents.N : w.extents.NS) * tiles);
  const double even = longest * walks == 0 ? 1 : std::min(1.0, chunks / (longest * walks));
  return cost::walks(pace, longest, chunks, limits, even);
}

/// The same of all segments but each sequence's last.
inline double segment_cost(cost::Pace pace, std::int64_t columns, const Spec& s, Workload w,
                           const Limits& limits) {
  w.extents.NS -= w.extents.N;
  w.extents.NT = w.extents.NS * w.shape.SEG;
  return walk_cost(pace, columns, s, w, limits);
}

}  // namespace wyvern::hopper
