// The gradient of norm_weight from its parts, a block BC columns.
#include "device/cuda/part_sums.cuh"

WYVERN_KERNEL(num_warps * 32, 0) {
  sum_parts<Spec>(dnorm_weight_part, dnorm_weight, block_index(), V, e.P);
}
