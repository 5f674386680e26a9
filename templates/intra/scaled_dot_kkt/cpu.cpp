// A of one chunk for every value head of one key head: their products of keys are the same.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 head = block[0];
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* keys = scratch.tile(K, BT);  // transposed
  float* products = scratch.tile(BT, BT);
  float* result = scratch.tile(BT, BT);
  float* decay = scratch.vector(BT);
  float* rate = scratch.vector(BT);
  float* key_scale = scratch.vector(BT);
  constexpr int64 kRow = row_stride(BT);

  transpose<true>(k + (chunk.token * H + head) * K, int64{H} * K, rows, K, keys, kRow);
  multiply<Layout::columns, Lower::c>(rows, rows, K, keys, kRow, keys, kRow, products, kRow);
  if constexpr (QK_L2NORM) load_column(k_rstd + chunk.token * H + head, H, rows, key_scale);
  if (rows < BT) clear_rows(result, kRow, 0, rows, BT);
  for (int64 hv = head * (HV / H); hv < (head + 1) * (HV / H); ++hv) {
    const int64 at = chunk.token * HV + hv;
    load_gates<SCALAR_GATE>(G + at, HV, rows, decay);
    load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);
    if constexpr (QK_L2NORM) scale_column(rate, key_scale, rows);
    decay_lower<1, QK_L2NORM>(products, kRow, rows, decay, rate, key_scale, result);
    store_tile(result, kRow, rows, BT, A + at * BT, int64{HV} * BT);
  }
}
