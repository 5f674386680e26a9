// The sum over a head's value heads, for ROWS rows of K.
#include "device/cpu/rows.hpp"

WYVERN_BLOCK {
  const int64 total = e.B * e.T * e.H;
  const int64 first = block[0] * ROWS;
  const int64 end = first + ROWS < total ? first + ROWS : total;
  for (int64 row = first; row < end; ++row) {
    Row<K> gradient;
    for (int i = 0; i < GROUP; ++i) gradient.add(dy_heads + (row * GROUP + i) * K);
    gradient.store_to(dy + row * K);
  }
}
