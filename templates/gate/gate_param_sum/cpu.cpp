// Sums over chunk slots of BC columns of one output.
#include "device/cpu/part_sums.hpp"

WYVERN_BLOCK {
  const int64 head_tiles = HAS_A_LOG ? (e.HV + BC - 1) / BC : 0;
  if (block[0] < head_tiles)
    sum_parts<BC>(dA_part, dA_log, block[0] * BC, e.HV, e.NT);
  else
    sum_parts<BC>(dbias_part, ddt_bias, (block[0] - head_tiles) * BC, e.HV * GATE_K, e.NT);
}
