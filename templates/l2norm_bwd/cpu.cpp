// The gradient of x from that of y = x rstd, for ROWS rows of K.
#include "common/cpu/rows.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void*) {
  const auto* x = static_cast<const DTYPE*>(a[0]);
  const auto* rstd = static_cast<const float*>(a[1]);
  const auto* dy = static_cast<const DTYPE*>(a[2]);
  auto* dx = static_cast<DTYPE*>(a[3]);
  const int64 total = e->B * e->T * H;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    Row<K> in, gradient;
    in.add(x + row * K);
    gradient.add(dy + row * K);
    l2norm_gradient(in, rstd[row], gradient);
    gradient.store_to(dx + row * K);
  }
}
