// The products inside a chunk of one value head, their gradients added to those through the states,
// BK columns of K at a time.
#include "device/cpu/kda_backward.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 hv = block[0], head = hv / (HV / H);
  const int64 at = chunk.token * HV + hv, key_at = chunk.token * H + head;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  using Intra = IntraBackward<BT, BK, SAFE_GATE>;
  constexpr int64 kRow = Intra::kRow, kKeys = int64{H} * K, kWide = int64{HV} * K;
  Scratch scratch(memory);
  const auto tile = [&] { return scratch.tile(BT, BK); };
  const KeyTiles tiles{
      .q = tile(), .k = tile(), .G = tile(), .dq = tile(), .dk = tile(), .dG = tile()};
  const IntraScratch work = take_intra_scratch<BT, BK>(scratch);
  const ProductGradients d{scratch.tile(BT, BT), scratch.tile(BT, BT), scratch.vector(BT)};
  float* rate = scratch.vector(BT);
  float* q_scale = scratch.vector(BT);
  float* k_scale = scratch.vector(BT);
  float* ones = scratch.vector(BT);
  float* row_sums = scratch.vector(BT * 16);

  load_tile(dAqk + at * BT, int64{HV} * BT, rows, BT, d.dAqk, Intra::kSquare);
  load_tile(dA + at * BT, int64{HV} * BT, rows, BT, d.dA, Intra::kSquare);
  take_diagonal<BT>(d, rows);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + key_at, H, rows, q_scale);
    load_column(k_rstd + key_at, H, rows, k_scale);
  }
  for (int r = 0; r < BT; ++r) ones[r] = 1.0F;
  clear_rows(row_sums, kLanes, 0, rows, kLanes);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    load_tile<QK_L2NORM>(q + key_at * K + c, kKeys, rows, columns, tiles.q, kRow, q_scale);
    load_tile<QK_L2NORM>(k + key_at * K + c, kKeys, rows, columns, tiles.k, kRow, k_scale);
    load_tile(Gk + at * K + c, kWide, rows, columns, tiles.G, kRow);
    load_tile(dq_inter + at * K + c, kWide, rows, columns, tiles.dq, kRow);
    load_tile(dk_inter + at * K + c, kWide, rows, columns, tiles.dk, kRow);
    load_tile(dGk_inter + at * K + c, kWide, rows, columns, tiles.dG, kRow);
    Intra{tiles, work, d, rate, ones, row_sums, rows, columns}.run();
    store_tile(tiles.dq, kRow, rows, columns, dq + at * K + c, kWide);
    store_tile(tiles.dk, kRow, rows, columns, dk + at * K + c, kWide);
    store_tile(tiles.dG, kRow, rows, columns, dGk + at * K + c, kWide);
  }
  for (int r = 0; r < rows; ++r)
    store_part(dbeta + at + r * HV,
               splat((dbeta_inter[at + r * HV] + sum(load(row_sums + r * kLanes))) *
                     beta_slope<BETA_SIGMOID, NEG_EIGVAL>(rate[r])),
               1);
}
