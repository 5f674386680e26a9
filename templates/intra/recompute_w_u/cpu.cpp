// W and U of one chunk and value head.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/state_unit.hpp"
#include "intra/recompute_w_u/cpu_layout.hpp"

constexpr recompute_w_u::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0], head = e.key_head(hv);
  const int64 at = chunk.token * e.HV + hv;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto inverse = tile_at<kScratch.inverse>(memory);
  const auto factor = tile_at<kScratch.factor>(memory);
  const auto result = tile_at<kScratch.result>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* decay = vector_at<kScratch.decay>(memory);
  float* key_scale = vector_at<kScratch.key_scale>(memory);

  load_tile(Tinv + at * BT, int64{e.HV} * BT, rows, BT, inverse);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(rows_in(chunk, beta, beta_stride, hv), rows, rate);
  load_gates<SCALAR_GATE>(G + at, e.HV, rows, decay);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile<true>(rows_in(chunk, v, v_stride, hv * V + c), rows, columns, factor, rate);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, factor, result);
    store_tile(result, rows, columns, u + at * V + c, int64{e.HV} * V, 1.0F / kValueUnit<Spec>);
  }
  for (int r = 0; r < rows; r += kLanes) store(rate + r, load(rate + r) * exp(load(decay + r)));
  if constexpr (QK_L2NORM) {
    load_column(k_rstd + chunk.token * e.H + head, e.H, rows, key_scale);
    scale_column(rate, key_scale, rows);
  }
  for (int c = 0; c < K; c += BV) {
    const int columns = K - c < BV ? K - c : BV;
    load_tile<true>(rows_in(chunk, k, k_stride, head * K + c), rows, columns, factor, rate);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, factor, result);
    store_tile(result, rows, columns, w + at * K + c, int64{e.HV} * K);
  }
}
