// W and U of one chunk for every value head of one key head: A and its inverse never leave scratch,
// and the products of keys are computed once for all of them.
#include "device/cpu/chunk.hpp"
#include "device/cpu/inverse.hpp"
#include "device/state_unit.hpp"
#include "intra/kkt_solve_wu/cpu_layout.hpp"

/// dst = src with column c times scale[c]; n rows and columns.
static void scale_columns(Tile<BT> src, int n, const float* scale, Tile<BT> dst) {
  for (int r = 0; r < n; ++r)
    for (int c = 0; c < n; c += kLanes)
      store(dst.row(r) + c, load(src.row(r) + c) * load(scale + c));
}

constexpr kkt_solve_wu::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 head = block[0];
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto keys = tile_at<kScratch.keys>(memory);
  const auto keys_t = tile_at<kScratch.keys_t>(memory);
  const auto products = tile_at<kScratch.products>(memory);
  const auto n = tile_at<kScratch.n>(memory);
  const auto inverse = tile_at<kScratch.inverse>(memory);
  const auto block_row = tile_at<kScratch.block_row>(memory);
  const auto values = tile_at<kScratch.values>(memory);
  const auto w_rows = tile_at<kScratch.w>(memory);
  const auto u_rows = tile_at<kScratch.u>(memory);
  float* decay = vector_at<kScratch.decay>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* factor = vector_at<kScratch.factor>(memory);
  float* key_scale = vector_at<kScratch.key_scale>(memory);

  load_tile(rows_in(chunk, k, k_stride, head * K), rows, K, keys);
  transpose(keys, rows, K, keys_t);
  multiply<Layout::columns, Lower::c>(rows, rows, K, keys_t, keys_t, products);
  if constexpr (QK_L2NORM) load_column(k_rstd + chunk.token * e.H + head, e.H, rows, key_scale);
  if (KEEP_INVERSE && rows < BT) clear_rows(inverse, 0, rows, BT);
  for (int64 hv = head * e.group(); hv < (head + 1) * e.group(); ++hv) {
    const int64 at = chunk.token * e.HV + hv;
    load_gates<SCALAR_GATE>(G + at, e.HV, rows, decay);
    load_beta<BETA_SIGMOID, NEG_EIGVAL>(rows_in(chunk, beta, beta_stride, hv), rows, rate);
    for (int r = 0; r < rows; r += kLanes) store(factor + r, -load(rate + r));
    if constexpr (QK_L2NORM) scale_column(factor, key_scale, rows);
    decay_lower<1, QK_L2NORM>(products, rows, decay, factor, key_scale, n);
    invert_unit_lower(n, rows, inverse, block_row);
    if constexpr (KEEP_INVERSE) store_tile(inverse, rows, BT, Tinv + at * BT, int64{e.HV} * BT);
    for (int c = 0; c < V; c += BV) {
      const int columns = V - c < BV ? V - c : BV;
      load_tile<true>(rows_in(chunk, v, v_stride, hv * V + c), rows, columns, values, rate);
      multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, values, u_rows);
      store_tile(u_rows, rows, columns, u + at * V + c, int64{e.HV} * V, 1.0F / kValueUnit<Spec>);
    }
    for (int r = 0; r < rows; r += kLanes) store(factor + r, load(rate + r) * exp(load(decay + r)));
    if constexpr (QK_L2NORM) scale_column(factor, key_scale, rows);
    scale_columns(inverse, round_up(rows, kTileRows), factor, n);
    multiply<Layout::rows, Lower::a>(rows, K, rows, n, keys, w_rows);
    store_tile(w_rows, rows, K, w + at * K, int64{e.HV} * K);
  }
}
