// Aqk, W, U, qg and kg of one chunk and value head: A and its inverse never leave scratch.
#include "device/cpu/inverse.hpp"
#include "device/cpu/kda.hpp"

constexpr int64 kRow = row_stride(BT), kKeyRow = row_stride(K), kValueRow = row_stride(BV);

/// Writes Aqk and sets n = -A.
static void split_strips(const IntraTiles& tiles, const IntraRows& at, const float* rate, float* n,
                         float* Aqk) {
  constexpr int kStrip = kAnchorRows<SAFE_GATE>;
  const int columns = round_up(at.rows, kSolveBlock);
  for (int first = 0; first < at.rows; first += kStrip) {
    const int strip = strip_products<SAFE_GATE>(tiles, kKeyRow, kRow, K, first, at.rows);
    for (int i = 0; i < strip; ++i) {
      const int r = first + i;
      masked_row(tiles.products + i * kRow, 1.0F, r + 1, BT, Aqk + (at.row + int64{r} * HV) * BT);
      masked_row(tiles.products + (strip + i) * kRow, -rate[r], r, columns, n + r * kRow);
    }
  }
  clear_rows(n, kRow, at.rows, columns, columns);
}

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0];
  const IntraRows at{chunk.token * HV + hv, chunk.token * H + hv / (HV / H), chunk.rows};
  const int rows = at.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  const IntraTiles tiles(scratch, BT, K, kAnchorRows<SAFE_GATE>);
  float* n = scratch.tile(BT, BT);
  float* inverse = scratch.tile(BT, BT);
  float* product_ = scratch.tile(kSolveBlock, BT);
  float* factor = scratch.tile(BT, K > BV ? K : BV);
  float* result = scratch.tile(BT, K > BV ? K : BV);
  float* rate = scratch.vector(BT);
  float* scale = scratch.vector(BT);

  load_intra<QK_L2NORM, H, HV, K, BT>(tiles, at, q, k, Gk, q_rstd, k_rstd, scale);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at.row, HV, rows, rate);
  split_strips(tiles, at, rate, n, Aqk);
  if (KEEP_INVERSE && rows < BT) clear_rows(inverse, kRow, 0, rows, BT);
  invert_unit_lower(n, kRow, rows, inverse, product_);
  if constexpr (KEEP_INVERSE)
    store_tile(inverse, kRow, rows, BT, Tinv + at.row * BT, int64{HV} * BT);

  decay_keys(tiles.q, tiles.k, tiles.G, kKeyRow, rows, K, rate, factor);
  store_tile(tiles.q, kKeyRow, rows, K, qg + at.row * K, int64{HV} * K);
  store_tile(tiles.k, kKeyRow, rows, K, kg + at.row * K, int64{HV} * K);
  multiply<Layout::rows, Lower::a>(rows, K, rows, inverse, kRow, factor, kKeyRow, result, kKeyRow);
  store_tile(result, kKeyRow, rows, K, w + at.row * K, int64{HV} * K);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile<true>(v + at.row * V + c, int64{HV} * V, rows, columns, factor, kValueRow, rate);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, kRow, factor, kValueRow, result,
                                     kValueRow);
    store_tile(result, kValueRow, rows, columns, u + at.row * V + c, int64{HV} * V);
  }
}
