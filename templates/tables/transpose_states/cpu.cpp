// The states of one chunk slot and value head with their value columns first.
#include "device/cpu/tile.hpp"

WYVERN_BLOCK {
  const int64 at = (block[1] * e.HV + block[0]) * K * V;
  transpose(h + at, V, K, V, h_v_first + at, K);
}
