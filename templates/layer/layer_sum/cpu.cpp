// The gradient of norm_weight from its parts, BC columns.
#include "device/cpu/part_sums.hpp"

WYVERN_BLOCK { sum_parts<BC>(dnorm_weight_part, dnorm_weight, block[0] * BC, V, e.P); }
