// Aqk and A of one chunk and value head.
#include "common/cpu/kda.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block,
                              void* memory) {
  const auto* q = static_cast<const DTYPE*>(a[0]);
  const auto* k = static_cast<const DTYPE*>(a[1]);
  const auto* beta = static_cast<const BETA_DTYPE*>(a[2]);
  const auto* Gk = static_cast<const float*>(a[3]);
  const auto* q_rstd = static_cast<const float*>(a[4]);
  const auto* k_rstd = static_cast<const float*>(a[5]);
  auto* Aqk = static_cast<float*>(a[8]);
  auto* A = static_cast<float*>(a[9]);
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, *e, static_cast<const int32*>(a[6]),
                                         static_cast<const int32*>(a[7]));
  const int64 hv = block[0], head = hv / (HV / H);
  const int rows = chunk.rows;
  if (rows <= 0) return;

  constexpr int64 kRow = row_stride(BT), kKeyRow = row_stride(K);
  constexpr int kStrip = kAnchorRows<SAFE_GATE>;
  Scratch scratch(memory);
  const IntraTiles tiles{scratch.tile(BT, K),         scratch.tile(BT, K), scratch.tile(BT, K),
                         scratch.tile(K, BT),         scratch.tile(K, BT),
                         scratch.tile(2 * kStrip, K), scratch.tile(K, BT)};
  float* products = scratch.tile(2 * kStrip, BT);
  float* rate = scratch.vector(BT);
  float* scale = scratch.vector(BT);

  const int64 at_k = chunk.token * H + head, at = chunk.token * HV + hv;
  if constexpr (QK_L2NORM) load_column(q_rstd + at_k, H, rows, scale);
  load_tile<QK_L2NORM>(q + at_k * K, int64{H} * K, rows, K, tiles.q, kKeyRow, scale);
  if constexpr (QK_L2NORM) load_column(k_rstd + at_k, H, rows, scale);
  load_tile<QK_L2NORM>(k + at_k * K, int64{H} * K, rows, K, tiles.k, kKeyRow, scale);
  load_tile(Gk + at * K, int64{HV} * K, rows, K, tiles.G, kKeyRow);
  transpose<true>(tiles.k, kKeyRow, rows, K, tiles.k_t, kRow);
  transpose<true>(tiles.G, kKeyRow, rows, K, tiles.G_t, kRow);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);

  for (int first = 0; first < rows; first += kStrip) {
    const int strip =
        strip_products<SAFE_GATE>(tiles, kKeyRow, kRow, K, first, rows, products);
    for (int i = 0; i < strip; ++i) {
      const int r = first + i;
      const int64 to = (at + int64{r} * HV) * BT;
      masked_row(products + i * kRow, 1.0F, r + 1, BT, Aqk + to);
      masked_row(products + (strip + i) * kRow, rate[r], r, BT, A + to);
    }
  }
}
