// The inverse of a unit lower triangular matrix.
#pragma once

#include "device/cpu/inverse_layout.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

namespace detail {

/// x = (I - n)^-1 for one kSolveBlock square, n strictly lower: forward substitution, column by
/// column of n, so that only one multiplication and addition separate a row from the next.
[[gnu::noinline]] static void invert_block(const float* n, float* x, int64 ld) {
  for (int c = 0; c < kSolveBlock; c += kLanes) {
    const i32 columns = lane_numbers() + c;
    f32 row[kSolveBlock];
#pragma clang loop unroll(full)
    for (int r = 0; r < kSolveBlock; ++r) row[r] = columns == r ? splat(1.0F) : f32{};
#pragma clang loop unroll(full)
    for (int s = 0; s < kSolveBlock; ++s) {
#pragma clang loop unroll(full)
      for (int r = s + 1; r < kSolveBlock; ++r) row[r] += n[r * ld + s] * row[s];
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < kSolveBlock; ++r) store(x + r * ld + c, row[r]);
  }
}

}  // namespace detail

/// x = (I - n)^-1 for n strictly lower, by blocks of kSolveBlock: the diagonal ones first, then row
/// of blocks i: X_i = X_ii (N_i X). `n` has zeros elsewhere in the square of `rows` rounded up to
/// whole kSolveBlock, and that square is what is written of `x`. `block_row` is scratch of
/// kSolveBlock rows.
template <int C>
static void invert_unit_lower(Tile<C> n, int rows, Tile<C> x, Tile<C> block_row) {
  clear_rows(x, 0, round_up(rows, kSolveBlock), round_up(rows, kSolveBlock));
  for (int i = 0; i < rows; i += kSolveBlock)
    detail::invert_block(n.from(i, i).data, x.from(i, i).data, n.kStride);
  for (int i = kSolveBlock; i < rows; i += kSolveBlock) {
    multiply<Layout::rows, Lower::b>(kSolveBlock, i, i, n.from(i), x, block_row);
    multiply(kSolveBlock, i, kSolveBlock, x.from(i, i), block_row, x.from(i));
  }
}

}  // namespace wyvern::cpu
