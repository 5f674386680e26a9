// The gradients through states and the WY representation, one block a chunk and value head: dO, V'
// and X = Tinv^T dU stay in shared memory while tiles of K stream past them.
#include "common/cuda/kda_backward.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kStrips = BT / 16;             // one a warp
constexpr int kGroups = num_warps / kStrips;  // warps side by side
constexpr int kCols = BK / kGroups;
constexpr int kTilesK = ceil_div(K, BK);
constexpr int kPaddedV = round_up(V, 16);

using Values = Tile<DTYPE, BT, kPaddedV>;
using Square = Tile<DTYPE, BT, BT>;
using Inter = InterBackward<DTYPE, precision, BT, BK, kPaddedV, QK_L2NORM>;

/// One of the buffers that K tiles pass through.
struct Stage {
  using States = Tile<DTYPE, BK, kPaddedV>;
  using Keys = Tile<DTYPE, BT, BK>;
  static constexpr int kBytes = 2 * States::kBytes + 2 * Keys::kBytes + Tile<float, BT, BK>::kBytes;

  StateTile<DTYPE, BK, kPaddedV> states;
  KeyTile<DTYPE, BT, BK> tile;

  WYVERN_DEVICE explicit Stage(int index) {
    SharedAllocator shared(index % num_stages * kBytes);
    states.h = shared.tile<States>();
    states.dh = shared.tile<States>();
    tile.q = shared.tile<Keys>();
    tile.k = shared.tile<Keys>();
    tile.G = shared.tile<Tile<float, BT, BK>>();
  }
};

// Tinv is done with before the first K tile arrives, and lies in its place.
constexpr int kStagesBytes = larger(num_stages * Stage::kBytes, Square::kBytes);

WYVERN_KERNEL(kThreads, 0)
(const DTYPE* q, const DTYPE* k, const DTYPE* v, const DTYPE* v_new, const BETA_DTYPE* beta,
 const DTYPE* Tinv, const float* Gk, const float* q_rstd, const float* k_rstd, const DTYPE* h,
 const DTYPE* dh, const DTYPE* d_o, const DTYPE* du, const int32* seq_offsets,
 const int32* chunk_index, float* dq_inter, float* dk_inter, float* dGk_inter, DTYPE* dv,
 float* dbeta_inter, float* dAqk, float* dA, Extents e) {
  const int head = block_index() % HV;
  const int slot = block_index() / HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * HV + head;
  const int64 row_k = chunk.token * H + head / (HV / H);
  const int64 state = (int64{slot} * HV + head) * K * V;

  SharedAllocator shared(kStagesBytes);
  Inter inter;
  inter.dO = shared.tile<Values>();
  inter.values = shared.tile<Values>();
  inter.X = shared.tile<Values>();
  inter.rows.beta = shared.take<float>(BT);
  if constexpr (QK_L2NORM) {
    inter.rows.q_rstd = shared.take<float>(BT);
    inter.rows.k_rstd = shared.take<float>(BT);
  }
  float* const row_sums = shared.take<float>(num_warps * BT);
  float* const end = shared.take<float>(BK);
  float* const column_sums = shared.take<float>(kStrips * BK);

  const auto inverse = SharedAllocator().tile<Square>();
  load_tile<kThreads, BT>(inverse, Tinv + row * BT, int64{HV} * BT, chunk.rows, BT);
  load_tile<kThreads, V>(inter.X, du + row * V, int64{HV} * V, chunk.rows, V);
  copy_async_commit();
  load_tile<kThreads, V>(inter.dO, d_o + row * V, int64{HV} * V, chunk.rows, V);
  load_tile<kThreads, V>(inter.values, v_new + row * V, int64{HV} * V, chunk.rows, V);
  copy_async_commit();
  fill_factors<kThreads, BT, QK_L2NORM, BETA_SIGMOID, NEG_EIGVAL>(
      inter.rows, beta + row, HV, q_rstd + row_k, k_rstd + row_k, H, chunk.rows);
  copy_async_wait<1>();
  sync_block();

  // X, with what it gives to v and beta.
  float x_dot_v[kStrips][2] = {};
  solve_transposed<precision, num_warps>(
      inverse, inter.X, [&](int strip, int col, Piece& left, Piece& right) {
        const int rows = chunk.rows - strip * 16;
        const int64 at = (row + int64{strip} * 16 * HV) * V + col;
        Piece v_left, v_right;
        load_pair<V>(v + at, int64{HV} * V, v_left, v_right, rows, V - col);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x_dot_v[strip][i / 2] += left.x[i] * v_left.x[i] + right.x[i] * v_right.x[i];
          const float rate = inter.rows.beta[strip * 16 + piece_row(i)];
          left.x[i] *= rate;
          right.x[i] *= rate;
        }
        store_pair<V>(dv + at, int64{HV} * V, left, right, rows, V - col);
      });
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
    store_row_sums(x_dot_v[strip], row_sums + warp_index() * BT + strip * 16);
  copy_async_wait<0>();
  sync_block();

  const auto load = [&](int tile) {
    if (tile < kTilesK) {
      const Stage stage(tile);
      const int first = tile * BK;
      const int64 at = state + int64{first} * V;
      load_tile<kThreads, V>(stage.states.h, h + at, V, K - first, V);
      load_tile<kThreads, V>(stage.states.dh, dh + at, V, K - first, V);
      load_key_tile<kThreads, K, H, HV>(stage.tile, q + row_k * K + first, k + row_k * K + first,
                                        Gk + row * K + first, chunk.rows, K - first);
    }
    copy_async_commit();
  };
  for (int i = 0; i < num_stages; ++i) load(i);
  // X . v of a thread's row, from the warps that had a part of it.
  float dbeta_sum = 0.0f;
  if (thread_index() < BT)
    for (int i = 0; i < num_warps; ++i) dbeta_sum += row_sums[i * BT + thread_index()];
  gradients_of_products<precision, num_warps>(
      inter.dO, inter.X, inter.values, e.scale,
      [&](int i, int j, bool is_dA, const Piece& left, const Piece& right) {
        store_pair<BT>((is_dA ? dA : dAqk) + (row + int64{i} * 16 * HV) * BT + j * 16,
                       int64{HV} * BT, left, right, chunk.rows - i * 16, 16);
      });

  const int strip = warp_index() % kStrips;
  const int first_row = strip * 16;
  const int first_col = warp_index() / kStrips * kCols;
  const int rows = chunk.rows - first_row;
  float dbeta_r[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int tile = 0; tile < kTilesK; ++tile) {
    const Stage stage(tile);
    inter.tile = stage.tile;
    inter.states = stage.states;
    copy_async_wait<num_stages - 1>();
    sync_block();
    KeyGradients d[kCols / 16];
    inter.set(d, dbeta_r, column_sums + strip * BK, strip, first_col, chunk.rows - 1, e.scale);
    chunk_end_products<kThreads>(inter.states, inter.tile.G, end);
    sync_block();
    load(tile + num_stages);
#pragma unroll
    for (int pair = 0; pair < kCols / 16; ++pair) {
      const int col = first_col + pair * 16;
      const int cols = K - tile * BK - col;
      if (cols <= 0) break;
      if (rows > 0 && rows <= 16)
        add_chunk_end<kStrips, BK>(d[pair], end + col, column_sums + col, rows - 1);
      const int64 at = (row + int64{first_row} * HV) * K + tile * BK + col;
      constexpr int64 kStride = int64{HV} * K;
      store_pair<K>(dq_inter + at, kStride, d[pair].dq[0], d[pair].dq[1], rows, cols);
      store_pair<K>(dk_inter + at, kStride, d[pair].dk[0], d[pair].dk[1], rows, cols);
      store_pair<K>(dGk_inter + at, kStride, d[pair].dG[0], d[pair].dG[1], rows, cols);
    }
  }
  store_row_sums(dbeta_r, row_sums + warp_index() / kStrips * BT + first_row);
  sync_block();
  if (thread_index() < chunk.rows) {
    for (int i = 0; i < kGroups; ++i) dbeta_sum += row_sums[i * BT + thread_index()];
    dbeta_inter[row + int64{thread_index()} * HV] = dbeta_sum;
  }
}
