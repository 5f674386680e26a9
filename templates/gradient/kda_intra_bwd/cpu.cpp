// The products inside a chunk of one value head, their gradients added to those through the states,
// BK columns of K at a time.
#include "device/cpu/kda_backward.hpp"
#include "gradient/kda_intra_bwd/cpu_layout.hpp"

using Intra = IntraBackward<BT, BK, SAFE_GATE, RatesOf<Spec>>;
constexpr kda_intra_bwd::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0], head = e.key_head(hv);
  const int64 at = chunk.token * e.HV + hv, key_at = chunk.token * e.H + head;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const int64 stride = int64{e.HV} * K;
  const auto tiles = key_tiles_at<kScratch.tiles>(memory);
  const auto work = intra_scratch_at<kScratch.work>(memory);
  const auto d = product_gradients_at<kScratch.d>(memory);
  float* rate = vector_at<kScratch.rate>(memory);
  float* q_scale = vector_at<kScratch.q_scale>(memory);
  float* k_scale = vector_at<kScratch.k_scale>(memory);
  float* ones = vector_at<kScratch.ones>(memory);
  float* row_sums = vector_at<kScratch.row_sums>(memory);
  const auto rates = tile_at<kScratch.rates>(memory);
  const auto gradients = tile_at<kScratch.gradients>(memory);

  load_tile(dAqk + at * BT, int64{e.HV} * BT, rows, BT, d.dAqk);
  load_tile(dA + at * BT, int64{e.HV} * BT, rows, BT, d.dA);
  take_diagonal(d, rows);
  if constexpr (!ERASE_WRITE) {
    load_beta<BETA_SIGMOID, NEG_EIGVAL>(rows_in(chunk, beta, beta_stride, hv), rows, rate);
    fill_column(row_sums, 0.0F, rows * kLanes);
  }
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + key_at, e.H, rows, q_scale);
    load_column(k_rstd + key_at, e.H, rows, k_scale);
  }
  for (int r = 0; r < BT; ++r) ones[r] = 1.0F;
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    load_tile<QK_L2NORM>(rows_in(chunk, q, q_stride, head * K + c), rows, columns, tiles.q,
                         q_scale);
    load_tile<QK_L2NORM>(rows_in(chunk, k, k_stride, head * K + c), rows, columns, tiles.k,
                         k_scale);
    load_tile(Gk + at * K + c, stride, rows, columns, tiles.G);
    load_tile(dq_inter + at * K + c, stride, rows, columns, tiles.dq);
    load_tile(dk_inter + at * K + c, stride, rows, columns, tiles.dk);
    load_tile(dGk_inter + at * K + c, stride, rows, columns, tiles.dG);
    if constexpr (ERASE_WRITE) {
      load_tile(rows_in(chunk, erase, erase_stride, hv * K + c), rows, columns, rates);
      load_tile(derase_inter + at * K + c, stride, rows, columns, gradients);
    }
    const RatesOf<Spec> of_columns{ERASE_WRITE ? rates.data : rate,
                                   ERASE_WRITE ? gradients.data : row_sums};
    Intra{tiles, work, d, of_columns, ones, rows, columns}.run();
    store_tile(tiles.dq, rows, columns, dq + at * K + c, stride);
    store_tile(tiles.dk, rows, columns, dk + at * K + c, stride);
    store_tile(tiles.dG, rows, columns, dGk + at * K + c, stride);
    if constexpr (ERASE_WRITE) store_tile(gradients, rows, columns, derase + at * K + c, stride);
  }
  if constexpr (ERASE_WRITE) return;
  for (int r = 0; r < rows; ++r)
    store_part(dbeta + at + r * e.HV,
               splat((dbeta_inter[at + r * e.HV] + sum(load(row_sums + r * kLanes))) *
                     beta_slope<BETA_SIGMOID, NEG_EIGVAL>(rate[r])),
               1);
}
