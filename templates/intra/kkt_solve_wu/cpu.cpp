// W and U of one chunk for every value head of one key head: A and its inverse never leave scratch,
// and the products of keys are computed once for all of them.
#include "device/cpu/chunk.hpp"
#include "device/cpu/inverse.hpp"

/// dst = src with column c times scale[c]; n rows and columns.
static void scale_columns(const float* src, int64 ld, int n, const float* scale, float* dst) {
  for (int r = 0; r < n; ++r)
    for (int c = 0; c < n; c += kLanes)
      store(dst + r * ld + c, load(src + r * ld + c) * load(scale + c));
}

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 head = block[0];
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* keys = scratch.tile(BT, K);
  float* keys_t = scratch.tile(K, BT);
  float* products = scratch.tile(BT, BT);
  float* n = scratch.tile(BT, BT);
  float* inverse = scratch.tile(BT, BT);
  float* product_ = scratch.tile(kSolveBlock, BT);
  float* values = scratch.tile(BT, BV);
  float* result = scratch.tile(BT, K > BV ? K : BV);
  float* decay = scratch.vector(BT);
  float* rate = scratch.vector(BT);
  float* factor = scratch.vector(BT);
  float* key_scale = scratch.vector(BT);
  constexpr int64 kRow = row_stride(BT), kKeyRow = row_stride(K), kValueRow = row_stride(BV);

  const DTYPE* chunk_keys = k + (chunk.token * H + head) * K;
  load_tile(chunk_keys, int64{H} * K, rows, K, keys, kKeyRow);
  transpose<true>(keys, kKeyRow, rows, K, keys_t, kRow);
  multiply<Layout::columns, Lower::c>(rows, rows, K, keys_t, kRow, keys_t, kRow, products, kRow);
  if constexpr (QK_L2NORM) load_column(k_rstd + chunk.token * H + head, H, rows, key_scale);
  if (KEEP_INVERSE && rows < BT) clear_rows(inverse, kRow, 0, rows, BT);
  for (int64 hv = head * (HV / H); hv < (head + 1) * (HV / H); ++hv) {
    const int64 at = chunk.token * HV + hv;
    load_gates<SCALAR_GATE>(G + at, HV, rows, decay);
    load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);
    for (int r = 0; r < rows; r += kLanes) store(factor + r, -load(rate + r));
    if constexpr (QK_L2NORM) scale_column(factor, key_scale, rows);
    decay_lower<1, QK_L2NORM>(products, kRow, rows, decay, factor, key_scale, n);
    invert_unit_lower(n, kRow, rows, inverse, product_);
    if constexpr (KEEP_INVERSE) store_tile(inverse, kRow, rows, BT, Tinv + at * BT, int64{HV} * BT);
    for (int c = 0; c < V; c += BV) {
      const int columns = V - c < BV ? V - c : BV;
      load_tile<true>(v + at * V + c, int64{HV} * V, rows, columns, values, kValueRow, rate);
      multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, kRow, values, kValueRow,
                                       result, kValueRow);
      store_tile(result, kValueRow, rows, columns, u + at * V + c, int64{HV} * V);
    }
    for (int r = 0; r < rows; r += kLanes) store(factor + r, load(rate + r) * exp(load(decay + r)));
    if constexpr (QK_L2NORM) scale_column(factor, key_scale, rows);
    scale_columns(inverse, kRow, round_up(rows, kTileRows), factor, n);
    multiply<Layout::rows, Lower::a>(rows, K, rows, n, kRow, keys, kKeyRow, result, kKeyRow);
    store_tile(result, kKeyRow, rows, K, w + at * K, int64{HV} * K);
  }
}
