// Aqk, W, U, qg and kg of one chunk and value head: A and its inverse never leave scratch.
#include "device/cpu/inverse.hpp"
#include "device/cpu/kda.hpp"
#include "device/state_unit.hpp"
#include "intra/kda_intra_solve_wu/cpu_layout.hpp"

using Intra = IntraProducts<Spec>;
constexpr kda_intra_solve_wu::ScratchLayout kScratch{Spec{}};

/// Writes Aqk and sets n = -A.
static void split_strips(const Intra& intra, const IntraRows& at, const float* rate, Tile<BT> n,
                         float* Aqk) {
  const int columns = round_up(at.rows, kSolveBlock);
  for (int first = 0; first < at.rows; first += Intra::kStrip) {
    const int strip = intra.strip(first, at.rows);
    for (int i = 0; i < strip; ++i) {
      const int r = first + i;
      masked_row(intra.products.row(i), 1.0F, r + 1, BT, Aqk + (at.row + int64{r} * at.e.HV) * BT);
      masked_row(intra.products.row(strip + i), -rate[r], r, columns, n.row(r));
    }
  }
  clear_rows(n, at.rows, columns, columns);
}

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0];
  const IntraRows at{chunk.token * e.HV + hv, chunk.token * e.H + e.key_head(hv), chunk.rows, e};
  const int rows = at.rows;
  if (rows <= 0) return;

  const Intra intra = Intra::at<kScratch.intra>(memory);
  const auto n = tile_at<kScratch.n>(memory);
  const auto inverse = tile_at<kScratch.inverse>(memory);
  const auto block_row = tile_at<kScratch.block_row>(memory);
  const auto key_factor = tile_at<kScratch.key_factor>(memory);
  const auto value_factor = tile_at<kScratch.value_factor>(memory);
  const auto w_rows = tile_at<kScratch.w>(memory);
  const auto u_rows = tile_at<kScratch.u>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* scale = vector_at<kScratch.scale>(memory);

  const int64 key = e.key_head(hv) * K;
  intra.load(at, rows_in(chunk, q, q_stride, key), rows_in(chunk, k, k_stride, key),
             rows_in(chunk, erase, erase_stride, hv * K), Gk, q_rstd, k_rstd, scale);
  load_rates<Spec>(rows_in(chunk, beta, beta_stride, hv), rows, rate);
  split_strips(intra, at, rate, n, Aqk);
  if (KEEP_INVERSE && rows < BT) clear_rows(inverse, 0, rows, BT);
  invert_unit_lower(n, rows, inverse, block_row);
  if constexpr (KEEP_INVERSE) store_tile(inverse, rows, BT, Tinv + at.row * BT, int64{e.HV} * BT);

  decay_keys(intra.q, intra.k, intra.G, rows, K, rate, key_factor);
  if constexpr (ERASE_WRITE)
    multiply_elements(rows_in(chunk, erase, erase_stride, hv * K), rows, K, key_factor);
  store_tile(intra.q, rows, K, qg + at.row * K, int64{e.HV} * K);
  store_tile(intra.k, rows, K, kg + at.row * K, int64{e.HV} * K);
  multiply<Layout::rows, Lower::a>(rows, K, rows, inverse, key_factor, w_rows);
  store_tile(w_rows, rows, K, w + at.row * K, int64{e.HV} * K);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile<true>(rows_in(chunk, v, v_stride, hv * V + c), rows, columns, value_factor, rate);
    if constexpr (ERASE_WRITE)
      multiply_elements(rows_in(chunk, write, write_stride, hv * V + c), rows, columns,
                        value_factor);
    multiply<Layout::rows, Lower::a>(rows, columns, rows, inverse, value_factor, u_rows);
    store_tile(u_rows, rows, columns, u + at.row * V + c, int64{e.HV} * V, 1.0F / kValueUnit<Spec>);
  }
}
