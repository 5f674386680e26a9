// The sum over a head's value heads and the gradient of x from it, for ROWS rows of K.
#include "device/cpu/rows.hpp"

WYVERN_BLOCK {
  const int64 total = e.B * e.T * e.H;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    Row<K> in, gradient;
    in.add(x + row / e.H * x_stride + row % e.H * K);
    for (int i = 0; i < GROUP; ++i) gradient.add(dy_heads + (row * GROUP + i) * K);
    l2norm_gradient(in, rstd[row], gradient);
    gradient.store_to(dx + row * K);
  }
}
