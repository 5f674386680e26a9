// What a block of kda_forward.hopper keeps in shared memory.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_forward {

constexpr int kChunk = 64;    ///< tokens, of the plan; the kernel itself knows slices only
constexpr int kRows = 16;     ///< of a slice
constexpr int kColumns = 64;  ///< of V that a warpgroup has

/// Warps in front of those of the state. The first brings slices, the others prepare them in turns:
/// more than eight where there are registers for them, and buffers that keep them busy.
constexpr int front_warps(long long BV, long long stages) {
  return BV == kColumns && stages >= 13 ? 12 : 8;
}

/// Of `num_stages` slices, each: rows of k above rows of q, which become k exp(G) and q exp(G);
/// gates, which become k exp(G_C - G); v; the inverse of I + A, less I, with the scores of queries
/// to its right; and factors of rows and channels. The latest output of each warp of the state.
template <class S>
struct HopperLayout {
  int slots;                          ///< bytes from one slice's tiles to the next's
  int factors;                        ///< floats from one slice's factors to the next's
  cuda::sm90::SwizzledPlace rows, v;  ///< the first slice's
  cuda::sm90::SwizzledPlace gates;    ///< in units of 16 bits: G_DTYPE may have 32
  cuda::sm90::SwizzledPlace square;   ///< columns 0 to 15: the inverse; 16 to 31: scores
  /// The first slice's. decay: of a channel over the slice; beta; erase: of S k_r in u_r; key: of
  /// k_r; query: of q_r in o_r.
  cuda::ArrayPlace decay, beta, erase, key, query;
  cuda::ArrayPlace bias;    ///< dt_bias as the gate's form takes it
  cuda::ArrayPlace output;  ///< 16 x 16 elements a warp
  /// With checkpoints: of each slice 1 above the row of the one at its end, or 0.
  cuda::ArrayPlace checkpoint;
  cuda::sm90::BarrierPlace loaded, ready, free;
  int bytes;

  constexpr explicit HopperLayout(const S& s, bool checkpoints = false) {
    const int stages = static_cast<int>(s.num_stages);
    cuda::LayoutBuilder at;
    rows = cuda::sm90::swizzled_tile(at, 2 * kRows, s.K, s.DTYPE);
    gates = cuda::sm90::swizzled_tile(
        at, kRows, s.K * static_cast<long long>(size_of(s.G_DTYPE)) / 2, s.DTYPE);
    v = cuda::sm90::swizzled_tile(at, kRows, s.BV, s.DTYPE);
    square = cuda::sm90::swizzled_tile(at, kRows, kColumns, s.DTYPE);
    slots = at.bytes;
    at.bytes *= stages;
    const int first = at.bytes;
    decay = at.array(cuda::sm90::channel_floats(s.K));
    for (cuda::ArrayPlace* place : {&beta, &erase, &key, &query}) *place = at.array(kRows);
    factors = (at.bytes - first) / 4;
    at.bytes = first + stages * factors * 4;
    bias = at.array(s.K);
    output = at.array(kRows * s.BV, s.DTYPE);
    if (checkpoints) checkpoint = at.array(stages, DType::int32);
    loaded = cuda::sm90::barriers(at, stages);
    ready = cuda::sm90::barriers(at, stages);
    free = cuda::sm90::barriers(at, stages);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_forward
