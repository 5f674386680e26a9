// Rows of o to e4m3, ROWS groups of 128 columns, which share a scale.
#include "device/cpu/quantize.hpp"

WYVERN_BLOCK {
  const int64 groups = int64{e.HV} * (V / kScaledColumns);  // of a token
  const int64 total = e.B * e.T * groups;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 i = first; i < end; ++i) {
    const int64 token = i / groups, group = i % groups;
    const float scale =
        quantize(o_norm + i * kScaledColumns, o + token * o_stride + group * kScaledColumns);
    store_scale<Spec>(o_scale, token, group, scale, e);
  }
}
