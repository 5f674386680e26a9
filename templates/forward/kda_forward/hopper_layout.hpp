// Shared memory and warps of a block of kda_forward.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::kda_forward {

constexpr int kChunk = 64;       ///< tokens, of the plan; the kernel itself knows slices only
constexpr int kSlice = 16;       ///< tokens
constexpr int kBlockWords = 20;  ///< of a `Block`
constexpr int kColumns = 64;     ///< of V that a consumer warpgroup has

/// Load warpgroups: the first warp loads slices, the others prepare them in turns. Three where
/// there are registers for them, and pipeline stages that keep them busy.
constexpr int load_warpgroups(long long BV, long long stages) {
  return BV == kColumns && stages >= 13 ? 3 : 2;
}
/// Of a block.
constexpr int threads(long long BV, long long stages) {
  return 128 * (load_warpgroups(BV, stages) + static_cast<int>(BV) / kColumns);
}

/// `num_stages` pipeline stages of a slice each: rows of k above rows of q, which become k exp(G)
/// and q exp(G); gates, which become k exp(G_C - G); v; (I + A)^-1 - I with the scores of queries
/// to its right; and factors of rows and channels. The latest output of each consumer warp.
template <class S>
struct HopperLayout {
  int tiles;                          ///< bytes of a stage of tiles
  int factors;                        ///< floats of a stage of factors
  cuda::sm90::SwizzledPlace rows, v;  ///< the first stage
  cuda::sm90::SwizzledPlace gates;    ///< in units of 16 bits: G_DTYPE may have 32
  cuda::sm90::SwizzledPlace square;   ///< columns 0 to 15: the inverse; 16 to 31: scores
  /// The first stage. decay: of a channel over the slice; beta; erase: of S k_r in u_r; key: of
  /// k_r; query: of q_r in o_r.
  cuda::ArrayPlace decay, beta, erase, key, query;
  cuda::ArrayPlace bias;    ///< dt_bias in the gate's form
  cuda::ArrayPlace output;  ///< 16 x 16 elements a warp
  /// With the norm of o, for two slices: the gate's input, eight columns of a row after another;
  /// and sums of squares of a row's columns by warp.
  cuda::ArrayPlace gate, squares;
  /// With checkpoints, one a stage: 1 + the row of the checkpoint at the slice's end, or 0.
  cuda::ArrayPlace checkpoint;
  cuda::ArrayPlace block;  ///< a copy of the `Block`, for warps with few registers
  /// One a stage: tiles loaded by TMA; the slice prepared; consumers done with the stage.
  cuda::sm90::BarrierPlace tiles_full, slice_full, empty;
  int bytes;

  constexpr explicit HopperLayout(const S& s, bool checkpoints = false, bool normalizes = false) {
    const int stages = static_cast<int>(s.num_stages);
    cuda::LayoutBuilder at;
    rows = cuda::sm90::swizzled_tile(at, 2 * kSlice, s.K, s.DTYPE);
    gates = cuda::sm90::swizzled_tile(
        at, kSlice, s.K * static_cast<long long>(size_of(s.G_DTYPE)) / 2, s.DTYPE);
    v = cuda::sm90::swizzled_tile(at, kSlice, s.BV, s.DTYPE);
    square = cuda::sm90::swizzled_tile(at, kSlice, kColumns, s.DTYPE);
    tiles = at.bytes;
    at.bytes *= stages;
    const int first = at.bytes;
    decay = at.array(cuda::sm90::channel_floats(s.K));
    for (cuda::ArrayPlace* place : {&beta, &erase, &key, &query}) *place = at.array(kSlice);
    factors = (at.bytes - first) / 4;
    at.bytes = first + stages * factors * 4;
    bias = at.array(s.K);
    output = at.array(kSlice * s.BV, s.DTYPE);
    if (normalizes) {
      gate = at.array(2 * kSlice * s.BV, s.DTYPE);
      squares = at.array(2 * kSlice * s.BV / 16);
    }
    if (checkpoints) checkpoint = at.array(stages, DType::int32);
    block = at.array(kBlockWords, DType::int32);
    tiles_full = cuda::sm90::barriers(at, stages);
    slice_full = cuda::sm90::barriers(at, stages);
    empty = cuda::sm90::barriers(at, stages);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::kda_forward
