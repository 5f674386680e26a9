// W and U of one chunk and value head.
#include "common/cpu/chunk.hpp"
#include "common/cpu/product.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void* memory) {
  const auto* k = static_cast<const DTYPE*>(a[0]);
  const auto* v = static_cast<const DTYPE*>(a[1]);
  const auto* beta = static_cast<const BETA_DTYPE*>(a[2]);
  const auto* Tinv = static_cast<const DTYPE*>(a[3]);
  const auto* G = static_cast<const float*>(a[4]);
  const auto* k_rstd = static_cast<const float*>(a[5]);
  auto* w = static_cast<DTYPE*>(a[8]);
  auto* u = static_cast<U_DTYPE*>(a[9]);
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, *e, static_cast<const int32*>(a[6]),
                                         static_cast<const int32*>(a[7]));
  const int64 hv = block[0], head = hv / (HV / H);
  const int64 at = chunk.token * HV + hv;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* inverse = scratch.tile(BT, BT);
  float* factor = scratch.tile(BT, BV);
  float* result = scratch.tile(BT, BV);
  float* rate = scratch.vector(BT);
  float* decay = scratch.vector(BT);
  float* key_scale = scratch.vector(BT);
  constexpr int64 kInverseRow = row_stride(BT), kRow = row_stride(BV);

  load_tile(Tinv + at * BT, int64{HV} * BT, rows, BT, inverse, kInverseRow);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);
  load_gates<SCALAR_GATE>(G + at, HV, rows, decay);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile<true>(v + at * V + c, int64{HV} * V, rows, columns, factor, kRow, rate);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, kInverseRow, factor, kRow,
                                     result, kRow);
    store_tile(result, kRow, rows, columns, u + at * V + c, int64{HV} * V);
  }
  for (int r = 0; r < rows; r += kLanes) store(rate + r, load(rate + r) * exp(load(decay + r)));
  if constexpr (QK_L2NORM) {
    load_column(k_rstd + chunk.token * H + head, H, rows, key_scale);
    scale_column(rate, key_scale, rows);
  }
  for (int c = 0; c < K; c += BV) {
    const int columns = K - c < BV ? K - c : BV;
    load_tile<true>(k + (chunk.token * H + head) * K + c, int64{H} * K, rows, columns, factor, kRow,
                    rate);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, kInverseRow, factor, kRow,
                                     result, kRow);
    store_tile(result, kRow, rows, columns, w + at * K + c, int64{HV} * K);
  }
}
