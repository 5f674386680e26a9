// Rows of o normalized, gated and then quantized, ROWS of V elements.
#include "device/cpu/norm_rows.hpp"
#include "device/cpu/quantize.hpp"

WYVERN_BLOCK {
  const int64 total = e.B * e.T * e.HV;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    const int64 token = row / e.HV, column = row % e.HV * V;
    const DTYPE* const from = o_raw + row * V;
    const DTYPE* const gate = norm_gate + token * norm_gate_stride + column;
    const float rstd = row_rstd<Spec>(from, e.norm_eps);
    for (int c = 0; c < V; c += kScaledColumns) {
      DTYPE y[kScaledColumns];
      normalize<Spec>(from + c, gate + c, norm_weight + c, kScaledColumns, rstd, y);
      store_scale<Spec>(o_scale, token, (column + c) / kScaledColumns,
                        quantize(y, o + token * o_stride + column + c), e);
    }
  }
}
