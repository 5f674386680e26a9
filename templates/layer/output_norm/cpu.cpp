// Rows of o normalized and gated, ROWS of V elements.
#include "device/cpu/norm_rows.hpp"

WYVERN_BLOCK {
  const int64 total = e.B * e.T * e.HV;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    const int64 token = row / e.HV, column = row % e.HV * V;
    const DTYPE* const from = o_raw + row * V;
    normalize<Spec>(from, norm_gate + token * norm_gate_stride + column, norm_weight, V,
                    row_rstd<Spec>(from, e.norm_eps), o + token * o_stride + column);
  }
}
