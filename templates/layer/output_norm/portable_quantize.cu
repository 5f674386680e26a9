// Rows of o normalized, gated and then quantized.
#include "device/cuda/quantize.cuh"
#include "layer/output_norm/rows.cuh"

WYVERN_KERNEL(kThreads, 0) {
  normalize_rows(o_raw, norm_gate, norm_gate_stride, norm_weight, e,
                 [&](const Row& row, int at, const Part& y) {
                   Vector<float8_e4m3, kVector> codes;
                   const float scale = quantize(y, codes);
                   if (!row.active || at >= V) return;
                   const int64 column = row.column + at;
                   store_vector(o + row.token * o_stride + column, codes);
                   if (at % kScaledColumns == 0)
                     store_scale<Spec>(o_scale, row.token, column / kScaledColumns, scale, e);
                 });
}
