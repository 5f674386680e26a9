// The states of one chunk slot and value head with their value columns first.
#include "common/cpu/tile.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents*, const int64* block, void*) {
  const int64 at = (block[1] * HV + block[0]) * K * V;
  transpose<false>(static_cast<const DTYPE*>(a[0]) + at, V, K, V, static_cast<DTYPE*>(a[1]) + at,
                   K);
}
