// Aqk and A of one chunk and value head.
#include "common/cpu/kda.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void* memory) {
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
  const int64 hv = block[0];
  const IntraRows at{chunk.token * HV + hv, chunk.token * H + hv / (HV / H), chunk.rows};
  if (at.rows <= 0) return;

  constexpr int64 kRow = row_stride(BT), kKeyRow = row_stride(K);
  constexpr int kStrip = kAnchorRows<SAFE_GATE>;
  Scratch scratch(memory);
  const IntraTiles tiles(scratch, BT, K, kStrip);
  float* rate = scratch.vector(BT);
  float* scale = scratch.vector(BT);

  load_intra<QK_L2NORM, H, HV, K, BT>(tiles, at, q, k, Gk, q_rstd, k_rstd, scale);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at.row, HV, at.rows, rate);
  for (int first = 0; first < at.rows; first += kStrip) {
    const int strip = strip_products<SAFE_GATE>(tiles, kKeyRow, kRow, K, first, at.rows);
    for (int i = 0; i < strip; ++i) {
      const int r = first + i;
      const int64 to = (at.row + int64{r} * HV) * BT;
      masked_row(tiles.products + i * kRow, 1.0F, r + 1, BT, Aqk + to);
      masked_row(tiles.products + (strip + i) * kRow, rate[r], r, BT, A + to);
    }
  }
}
