// Rows of o normalized and gated.
#include "layer/output_norm/rows.cuh"

WYVERN_KERNEL(kThreads, 0) {
  normalize_rows(o_raw, norm_gate, norm_gate_stride, norm_weight, e,
                 [&](const Row& row, int at, const Part& y) {
                   if (row.active && at < V)
                     store_vector(o + row.token * o_stride + row.column + at, y);
                 });
}
