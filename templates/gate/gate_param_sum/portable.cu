// Sums over chunk slots, a block BC columns of one output.
#include "device/cuda/part_sums.cuh"

WYVERN_KERNEL(num_warps * 32, 0) {
  const int head_tiles = HAS_A_LOG ? ceil_div(e.HV, BC) : 0;
  if (block_index() < head_tiles)
    sum_parts<Spec>(dA_part, dA_log, block_index(), e.HV, e.NT);
  else
    sum_parts<Spec>(dbias_part, ddt_bias, block_index() - head_tiles, e.HV * GATE_K, e.NT);
}
