// The gradient of x from that of y = x rstd, for ROWS rows of K.
#include "device/cpu/rows.hpp"

WYVERN_BLOCK {
  const int64 total = e.B * e.T * e.H;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    Row<K> in, gradient;
    in.add(x + row / e.H * x_stride + row % e.H * K);
    gradient.add(dy + row * K);
    l2norm_gradient(in, rstd[row], gradient);
    gradient.store_to(dx + row * K);
  }
}
