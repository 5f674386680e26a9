// dv_local, one block BV value columns of one chunk and value head. A warp owns 16-row strips of
// the chunk (and with more warps than strips a share of the columns); k q^T stays in its registers
// and is the A fragment of the product with dO.
#include "device/cuda/chunk.cuh"
#include "device/cuda/score_strips.cuh"
#include "device/state_unit.hpp"
#include "gradient/bwd_dv_local/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesK = ceil_div(K, BK);
constexpr int kTilesV = ceil_div(V, BV);

using Warp = ScoreStrips<Spec>;
constexpr int kStrips = Warp::kStrips;

constexpr bwd_dv_local::SharedLayout kLayout{Spec{}};
constexpr bwd_dv_local::BufferLayout kBuffer{Spec{}};

/// One of the buffers of the pipeline.
struct Buffer {
  unsigned char* const start;
  TileAt<kBuffer.q> q = tile_at<kBuffer.q>(start);
  TileAt<kBuffer.k> k = tile_at<kBuffer.k>(start);

  WYVERN_DEVICE explicit Buffer(int tile)
      : start(shared_memory() + tile % num_stages * kBuffer.bytes) {}
};

/// scores += k q^T over one tile of K, on and above the diagonal: rows s, columns r.
WYVERN_DEVICE void accumulate(Warp::Scores& scores, const Buffer& buffer, const Warp& warp) {
#pragma unroll
  for (int depth = 0; depth < BK; depth += kDepth<DTYPE>) {
    FragmentA<DTYPE> k[kStrips];
#pragma unroll
    for (int i = 0; i < kStrips; ++i) k[i] = load_a(buffer.k, warp.row(i), depth);
#pragma unroll
    for (int n = 0; n < BT / 8; n += 2) {
      if (n / 2 < warp.first_strip) continue;
      const auto b = load_b_transposed(buffer.q, depth, n * 8);
#pragma unroll
      for (int i = 0; i < kStrips; ++i)
        multiply<precision>(scores[i][n], scores[i][n + 1], k[i], b);
    }
  }
}

/// Per-row factors of the chunk in shared memory.
struct Rows {
  float* G;
  float* q_rstd;
  float* k_rstd;
};

/// scores <- exp(G_r - G_s) scores, with the scales of queries and keys, where s <= r < rows, else
/// 0: past the chunk's end the exponent may overflow.
WYVERN_DEVICE void apply_decay(Warp::Scores& scores, const Rows& factors, const Warp& warp,
                               int rows) {
#pragma unroll
  for (int i = 0; i < kStrips; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int s = warp.row(i) + accumulator_row(j);
      const float G_s = factors.G[s];
      float k_scale = 1.0f;
      if constexpr (QK_L2NORM) k_scale = factors.k_rstd[s];
#pragma unroll
      for (int n = 0; n < BT / 8; ++n) {
        const int r = n * 8 + accumulator_col(j);
        float scale = k_scale;
        if constexpr (QK_L2NORM) scale *= factors.q_rstd[r];
        if constexpr (SCALAR_GATE) scale *= decay(factors.G[r] - G_s);
        scores[i][n].x[j] = s <= r && r < rows ? scores[i][n].x[j] * scale : 0.0f;
      }
    }
}

WYVERN_KERNEL(kThreads, 0) {
  const int first_v = block_index() % kTilesV * BV;
  const int head = block_index() / kTilesV % e.HV;
  const int slot = block_index() / kTilesV / e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto q_chunk = rows_in(chunk, q, q_stride, key * K);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto dO_chunk = rows_in(chunk, dO, dO_stride, head * V);

  unsigned char* const shared = shared_memory();
  const auto gradients = tile_at<kLayout.gradients>(shared);
  const Rows rows{array_at<kLayout.G>(shared), array_at<kLayout.q_rstd>(shared),
                  array_at<kLayout.k_rstd>(shared)};

  const auto load = [&](int tile) {
    if (tile < kTilesK) {
      const Buffer buffer(tile);
      const int cols = rest_from<K, BK>(tile * BK);
      load_tile<kThreads, K>(buffer.k, k_chunk.at(0, tile * BK), chunk.rows, cols);
      load_tile<kThreads, K>(buffer.q, q_chunk.at(0, tile * BK), chunk.rows, cols);
    }
    copy_async_commit();
  };
  load_gates<SCALAR_GATE, kThreads, BT>(rows.G, G + row, e.HV, chunk.rows);
  if constexpr (QK_L2NORM) {
    load_column<kThreads, BT>(rows.q_rstd, q_rstd + row_k, e.H, chunk.rows);
    load_column<kThreads, BT>(rows.k_rstd, k_rstd + row_k, e.H, chunk.rows);
  }
  for (int i = 0; i < num_stages; ++i) load(i);
  load_tile<kThreads, V>(gradients, dO_chunk.at(0, first_v), chunk.rows, rest_from<V, BV>(first_v));
  copy_async_commit();

  const Warp warp;
  Warp::Scores scores;
#pragma unroll
  for (int tile = 0; tile < kTilesK; ++tile) {
    // dO was committed after the first num_stages tiles and before the others.
    if (tile < num_stages)
      copy_async_wait<num_stages>();
    else
      copy_async_wait<num_stages - 1>();
    sync_block();
    accumulate(scores, Buffer(tile), warp);
    if (tile + num_stages < kTilesK) sync_block();
    load(tile + num_stages);
  }
  apply_decay(scores, rows, warp, chunk.rows);
  copy_async_wait<0>();
  sync_block();

  Warp::Columns out;
  warp.multiply<Triangle::upper>(out, scores, gradients);

  const float scale = e.scale / unit_of_gradients<Spec>(e);
  warp.store(out, scale, dv_local, row, e.HV, chunk.rows, first_v);
}
