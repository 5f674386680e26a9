// The gradients of norm_weight, conv_weight and conv_bias from their parts. A block has BC columns
// of the first, or kConvSumColumns of the others, since those have many.
#include "device/cuda/part_sums.cuh"
#include "layer/layout.hpp"

struct ConvSums {
  static constexpr int BC = layer_sum::kConvSumColumns;
  static constexpr int num_warps = Spec::num_warps;
};

WYVERN_KERNEL(num_warps * 32, 0) {
  int tile = block_index();
  if constexpr (OUTPUT_NORM) {
    constexpr int kTiles = ceil_div(V, BC);
    if (tile < kTiles) return sum_parts<Spec>(dnorm_weight_part, dnorm_weight, tile, V, e.P);
    tile -= kTiles;
  }
  if constexpr (SHORT_CONV) {
    const int channels = e.H * K + STEPS * (e.H * K + e.HV * V);
    const int tiles = ceil_div(channels * CONV_WIDTH, ConvSums::BC);
    if (tile < tiles)
      return sum_parts<ConvSums>(dconv_weight_part, dconv_weight, tile, channels * CONV_WIDTH,
                                 e.TP);
    if constexpr (HAS_CONV_BIAS)
      sum_parts<ConvSums>(dconv_bias_part, dconv_bias, tile - tiles, channels, e.TP);
  }
}
