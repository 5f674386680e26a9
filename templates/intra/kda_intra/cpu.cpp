// Aqk and A of one chunk and value head.
#include "device/cpu/kda.hpp"
#include "intra/kda_intra/cpu_layout.hpp"

using Intra = IntraProducts<Spec>;
constexpr kda_intra::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0];
  const IntraRows at{chunk.token * e.HV + hv, chunk.token * e.H + e.key_head(hv), chunk.rows, e};
  if (at.rows <= 0) return;

  const Intra intra = Intra::at<kScratch.intra>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* scale = vector_at<kScratch.scale>(memory);

  const int64 key = e.key_head(hv) * K;
  intra.load(at, rows_in(chunk, q, q_stride, key), rows_in(chunk, k, k_stride, key),
             rows_in(chunk, erase, erase_stride, hv * K), Gk, q_rstd, k_rstd, scale);
  load_rates<Spec>(rows_in(chunk, beta, beta_stride, hv), at.rows, rate);
  for (int first = 0; first < at.rows; first += Intra::kStrip) {
    const int strip = intra.strip(first, at.rows);
    for (int i = 0; i < strip; ++i) {
      const int r = first + i;
      const int64 to = (at.row + int64{r} * e.HV) * BT;
      masked_row(intra.products.row(i), 1.0F, r + 1, BT, Aqk + to);
      masked_row(intra.products.row(strip + i), rate[r], r, BT, A + to);
    }
  }
}
