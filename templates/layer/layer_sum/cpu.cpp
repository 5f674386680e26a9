// The gradients of norm_weight, conv_weight and conv_bias from their parts, BC columns of one.
#include "device/cpu/part_sums.hpp"

WYVERN_BLOCK {
  int64 tile = block[0];
  // Whether the tile was one of these columns.
  const auto sum = [&](const float* parts, float* sums, int64 columns, int64 count) {
    const int64 tiles = (columns + BC - 1) / BC;
    if (tile < tiles) sum_parts<BC>(parts, sums, tile * BC, columns, count);
    tile -= tiles;
    return tile < 0;
  };
  const int64 channels = int64{e.H} * K + STEPS * (int64{e.H} * K + int64{e.HV} * V);
  if (OUTPUT_NORM && sum(dnorm_weight_part, dnorm_weight, V, e.P)) return;
  if (SHORT_CONV && sum(dconv_weight_part, dconv_weight, channels * CONV_WIDTH, e.TP)) return;
  if (HAS_CONV_BIAS) sum(dconv_bias_part, dconv_bias, channels, e.TP);
}
