// W, qg, kg and U of one chunk and value head, BV columns at a time.
#include "device/cpu/kda.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0], head = hv / (HV / H);
  const int64 at = chunk.token * HV + hv, at_k = chunk.token * H + head;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* inverse = scratch.tile(BT, BT);
  float* queries = scratch.tile(BT, BV);
  float* keys = scratch.tile(BT, BV);
  float* gates = scratch.tile(BT, BV);
  float* factor = scratch.tile(BT, BV);
  float* rate = scratch.vector(BT);
  float* q_scale = scratch.vector(BT);
  float* k_scale = scratch.vector(BT);
  constexpr int64 kInverseRow = row_stride(BT), kRow = row_stride(BV);

  load_tile(Tinv + at * BT, int64{HV} * BT, rows, BT, inverse, kInverseRow);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile<true>(v + at * V + c, int64{HV} * V, rows, columns, factor, kRow, rate);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, kInverseRow, factor, kRow,
                                     queries, kRow);
    store_tile(queries, kRow, rows, columns, u + at * V + c, int64{HV} * V);
  }
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + at_k, H, rows, q_scale);
    load_column(k_rstd + at_k, H, rows, k_scale);
  }
  for (int c = 0; c < K; c += BV) {
    const int columns = K - c < BV ? K - c : BV;
    load_tile<QK_L2NORM>(q + at_k * K + c, int64{H} * K, rows, columns, queries, kRow, q_scale);
    load_tile<QK_L2NORM>(k + at_k * K + c, int64{H} * K, rows, columns, keys, kRow, k_scale);
    load_tile(Gk + at * K + c, int64{HV} * K, rows, columns, gates, kRow);
    decay_keys(queries, keys, gates, kRow, rows, columns, rate, factor);
    store_tile(queries, kRow, rows, columns, qg + at * K + c, int64{HV} * K);
    store_tile(keys, kRow, rows, columns, kg + at * K + c, int64{HV} * K);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, kInverseRow, factor, kRow,
                                     queries, kRow);
    store_tile(queries, kRow, rows, columns, w + at * K + c, int64{HV} * K);
  }
}
