// The inverse of a unit lower triangular matrix.
#pragma once

#include "device/cpu/product.hpp"

namespace wyvern::cpu {

/// Rows that are eliminated one by one; above that whole blocks are multiplied.
constexpr int kSolveBlock = 16;

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
/// whole kSolveBlock, and that square is what is written of `x`. `product_` is scratch of
/// kSolveBlock rows; all three have `ld` floats between rows.
static void invert_unit_lower(const float* n, int64 ld, int rows, float* x, float* product_) {
  clear_rows(x, ld, 0, round_up(rows, kSolveBlock), round_up(rows, kSolveBlock));
  for (int i = 0; i < rows; i += kSolveBlock)
    detail::invert_block(n + i * ld + i, x + i * ld + i, ld);
  for (int i = kSolveBlock; i < rows; i += kSolveBlock) {
    multiply<Layout::rows, Lower::b>(kSolveBlock, i, i, n + i * ld, ld, x, ld, product_, ld);
    multiply(kSolveBlock, i, kSolveBlock, x + i * ld + i, ld, product_, ld, x + i * ld, ld);
  }
}

}  // namespace wyvern::cpu
