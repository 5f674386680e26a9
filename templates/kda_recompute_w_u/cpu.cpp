// W, qg, kg and U of one chunk and value head, BV columns at a time.
#include "common/cpu/kda.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void* memory) {
  const auto* q = static_cast<const DTYPE*>(a[0]);
  const auto* k = static_cast<const DTYPE*>(a[1]);
  const auto* v = static_cast<const DTYPE*>(a[2]);
  const auto* beta = static_cast<const BETA_DTYPE*>(a[3]);
  const auto* Tinv = static_cast<const DTYPE*>(a[4]);
  const auto* Gk = static_cast<const float*>(a[5]);
  const auto* q_rstd = static_cast<const float*>(a[6]);
  const auto* k_rstd = static_cast<const float*>(a[7]);
  auto* w = static_cast<DTYPE*>(a[10]);
  auto* qg = static_cast<DTYPE*>(a[11]);
  auto* kg = static_cast<DTYPE*>(a[12]);
  auto* u = static_cast<U_DTYPE*>(a[13]);
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, *e, static_cast<const int32*>(a[8]),
                                         static_cast<const int32*>(a[9]));
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
