// Aqk and A of one chunk and value head.
#include "device/cpu/kda.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
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
