// O, one block BV value columns of one chunk and value head. A warp owns 16-row strips of the chunk
// (and with more warps than strips a share of the columns); q k^T stays in its registers and is the
// A fragment of the product with V'.
#include "device/cuda/chunk.cuh"
#include "device/cuda/score_strips.cuh"
#include "device/state_slots.hpp"
#include "output/fwd_o/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesK = ceil_div(K, BK);
constexpr int kTilesV = ceil_div(V, BV);

using Warp = ScoreStrips<Spec>;
constexpr int kStrips = Warp::kStrips;

constexpr fwd_o::SharedLayout kLayout{Spec{}};
constexpr fwd_o::BufferLayout kBuffer{Spec{}};

/// One of the buffers of the pipeline.
struct Buffer {
  unsigned char* const start;
  TileAt<kBuffer.q> q = tile_at<kBuffer.q>(start);
  TileAt<kBuffer.k> k = tile_at<kBuffer.k>(start);
  TileAt<kBuffer.h> h = tile_at<kBuffer.h>(start);

  WYVERN_DEVICE explicit Buffer(int tile)
      : start(shared_memory() + tile % num_stages * kBuffer.bytes) {}
};

/// Sums over one tile of K: scores += q k^T on and below the diagonal, out += q h.
WYVERN_DEVICE void accumulate(Warp::Scores& scores, Warp::Columns& out, const Buffer& buffer,
                              const Warp& warp) {
#pragma unroll
  for (int depth = 0; depth < BK; depth += kDepth<DTYPE>) {
    FragmentA<DTYPE> q[kStrips];
#pragma unroll
    for (int i = 0; i < kStrips; ++i) q[i] = load_a(buffer.q, warp.row(i), depth);
#pragma unroll
    for (int n = 0; n < BT / 8; n += 2) {
      if (n / 2 > warp.row(kStrips - 1) / 16) break;
      const auto b = load_b_transposed(buffer.k, depth, n * 8);
#pragma unroll
      for (int i = 0; i < kStrips; ++i)
        multiply<precision>(scores[i][n], scores[i][n + 1], q[i], b);
    }
#pragma unroll
    for (int n = 0; n < Warp::kPairs; n += 2) {
      const auto b = load_b(buffer.h, depth, warp.first_col + n * 8);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) multiply<precision>(out[i][n], out[i][n + 1], q[i], b);
    }
  }
}

/// Per-row factors of the chunk in shared memory.
struct Rows {
  float* G;
  float* q_rstd;
  float* k_rstd;
};

/// out <- exp(G) out, scores <- exp(G_r - G_s) scores on and below the diagonal, else 0; both with
/// the scales of queries and keys.
WYVERN_DEVICE void apply_decay(Warp::Scores& scores, Warp::Columns& out, const Rows& rows,
                               const Warp& warp) {
#pragma unroll
  for (int i = 0; i < kStrips; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = warp.row(i) + accumulator_row(j);
      const float G_r = rows.G[r];
      float q_scale = 1.0f;
      if constexpr (QK_L2NORM) q_scale = rows.q_rstd[r];
      const float factor = decay(G_r) * q_scale;
#pragma unroll
      for (int n = 0; n < Warp::kPairs; ++n) out[i][n].x[j] *= factor;
#pragma unroll
      for (int n = 0; n < BT / 8; ++n) {
        const int s = n * 8 + accumulator_col(j);
        float scale = q_scale;
        if constexpr (QK_L2NORM) scale *= rows.k_rstd[s];
        scores[i][n].x[j] = r >= s ? scores[i][n].x[j] * (decay(G_r - rows.G[s]) * scale) : 0.0f;
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
  if (is_null_sequence<Spec>(chunk.sequence, e, state_index, output_state_index)) {
    clear_output<kThreads>(TokenRows<DTYPE>{o + row * V + first_v, e.HV * V}, chunk.rows,
                           smaller(V - first_v, BV));
    return;
  }
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto q_chunk = rows_in(chunk, q, q_stride, key * K);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const DTYPE* const h_chunk = h + (int64{slot} * e.HV + head) * K * V + first_v;

  unsigned char* const shared = shared_memory();
  const auto values = tile_at<kLayout.values>(shared);
  const Rows rows{array_at<kLayout.G>(shared), array_at<kLayout.q_rstd>(shared),
                  array_at<kLayout.k_rstd>(shared)};

  const auto load = [&](int tile) {
    if (tile < kTilesK) {
      const Buffer buffer(tile);
      const int cols = rest_from<K, BK>(tile * BK);
      load_tile<kThreads, K>(buffer.q, q_chunk.at(0, tile * BK), chunk.rows, cols);
      load_tile<kThreads, K>(buffer.k, k_chunk.at(0, tile * BK), chunk.rows, cols);
      load_tile<kThreads, V>(buffer.h, h_chunk + int64{tile} * BK * V, V, cols,
                             rest_from<V, BV>(first_v));
    }
    copy_async_commit();
  };
  load_gates<SCALAR_GATE, kThreads, BT>(rows.G, G + row, e.HV, chunk.rows);
  if constexpr (QK_L2NORM) {
    load_column<kThreads, BT>(rows.q_rstd, q_rstd + row_k, e.H, chunk.rows);
    load_column<kThreads, BT>(rows.k_rstd, k_rstd + row_k, e.H, chunk.rows);
  }
  for (int i = 0; i < num_stages; ++i) load(i);
  load_tile<kThreads, V>(values, v_new + row * V + first_v, e.HV * V, chunk.rows,
                         rest_from<V, BV>(first_v));
  copy_async_commit();

  const Warp warp;
  Warp::Scores scores;
  Warp::Columns out;
#pragma unroll
  for (int tile = 0; tile < kTilesK; ++tile) {
    // V' was committed after the first num_stages tiles and before the others.
    if (tile < num_stages)
      copy_async_wait<num_stages>();
    else
      copy_async_wait<num_stages - 1>();
    sync_block();
    accumulate(scores, out, Buffer(tile), warp);
    if (tile + num_stages < kTilesK) sync_block();
    load(tile + num_stages);
  }
  apply_decay(scores, out, rows, warp);
  copy_async_wait<0>();
  sync_block();
  warp.multiply<Triangle::lower>(out, scores, values);

  const float scale = STATE_UNIT ? e.scale * state_unit[int64{slot} * e.HV + head] : e.scale;
  warp.store(out, scale, o, row, e.HV, chunk.rows, first_v);
}
