// Aqk and A of one chunk and value head; what rows of A are made of is erase k.
#include "device/cpu/gdn2.hpp"
#include "device/cpu/kda.hpp"
#include "gdn2/gdn2_intra/cpu_layout.hpp"

using Intra = IntraProducts<Spec>;
constexpr gdn2_intra::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0];
  const IntraRows at{chunk.token * e.HV + hv, chunk.token * e.H + e.key_head(hv), chunk.rows, e};
  if (at.rows <= 0) return;

  Intra intra = Intra::at<kScratch.intra>(memory);
  intra.erasing = tile_at<kScratch.erasing>(memory);
  const int64 key = e.key_head(hv) * K;
  intra.load(at, rows_in(chunk, q, q_stride, key), rows_in(chunk, k, k_stride, key), Gk, q_rstd,
             k_rstd, vector_at<kScratch.scale>(memory));
  load_tile(rows_in(chunk, erase, erase_stride, hv * K), at.rows, K, intra.erasing);
  multiply_elements(intra.erasing, intra.k, at.rows, K, intra.erasing);
  for (int first = 0; first < at.rows; first += Intra::kStrip) {
    const int strip = intra.strip(first, at.rows);
    for (int i = 0; i < strip; ++i) {
      const int r = first + i;
      const int64 to = (at.row + int64{r} * e.HV) * BT;
      masked_row(intra.products.row(i), 1.0F, r + 1, BT, Aqk + to);
      masked_row(intra.products.row(strip + i), 1.0F, r, BT, A + to);
    }
  }
}
