// A of one chunk for every value head of one key head: their products of keys are the same.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "intra/scaled_dot_kkt/cpu_layout.hpp"

constexpr scaled_dot_kkt::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 head = block[0];
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto keys = tile_at<kScratch.keys>(memory);
  const auto products = tile_at<kScratch.products>(memory);
  const auto result = tile_at<kScratch.result>(memory);
  float* decay = vector_at<kScratch.decay>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* key_scale = vector_at<kScratch.key_scale>(memory);

  transpose(rows_in(chunk, k, k_stride, head * K).first, k_stride, rows, K, keys);
  multiply<Layout::columns, Lower::c>(rows, rows, K, keys, keys, products);
  if constexpr (QK_L2NORM) load_column(k_rstd + chunk.token * e.H + head, e.H, rows, key_scale);
  if (rows < BT) clear_rows(result, 0, rows, BT);
  for (int64 hv = head * e.group(); hv < (head + 1) * e.group(); ++hv) {
    const int64 at = chunk.token * e.HV + hv;
    load_gates<SCALAR_GATE>(G + at, e.HV, rows, decay);
    load_beta<BETA_SIGMOID, NEG_EIGVAL>(rows_in(chunk, beta, beta_stride, hv), rows, rate);
    if constexpr (QK_L2NORM) scale_column(rate, key_scale, rows);
    decay_lower<1, QK_L2NORM>(products, rows, decay, rate, key_scale, result);
    store_tile(result, rows, BT, A + at * BT, int64{e.HV} * BT);
  }
}
