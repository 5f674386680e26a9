// O, one block BV value columns of one chunk and value head. A warp owns 16-row strips of the chunk
// (and with more warps than strips a part of the columns); its rows of Aqk are loading to its
// registers while it multiplies qg with the state.
#include "device/cuda/chunk.cuh"
#include "device/cuda/score_strips.cuh"
#include "device/state_slots.hpp"
#include "output/kda_fwd_o/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesK = ceil_div(K, BK);
constexpr int kTilesV = ceil_div(V, BV);

using Warp = ScoreStrips<Spec>;
constexpr int kStrips = Warp::kStrips;

constexpr kda_fwd_o::SharedLayout kLayout{Spec{}};
constexpr kda_fwd_o::BufferLayout kBuffer{Spec{}};

/// One of the buffers of the pipeline.
struct Buffer {
  unsigned char* const start;
  TileAt<kBuffer.q> q = tile_at<kBuffer.q>(start);
  TileAt<kBuffer.h> h = tile_at<kBuffer.h>(start);

  WYVERN_DEVICE explicit Buffer(int tile)
      : start(shared_memory() + tile % num_stages * kBuffer.bytes) {}
};

/// Rows of Aqk of one strip, on and below its diagonal block; `from` points at the chunk's first.
WYVERN_DEVICE void load_scores(Accumulator (&scores)[BT / 8], const float* from, const Extents& e,
                               int strip, int rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = strip * 16 + accumulator_row(2 * half);
#pragma unroll
    for (int n = 0; n < BT / 8; ++n) {
      if (n / 2 > strip || r >= rows) break;
      const auto x = load<2>(from + r * (e.HV * int64{BT}) + n * 8 + accumulator_col(0));
      scores[n].x[2 * half] = x.at[0];
      scores[n].x[2 * half + 1] = x.at[1];
    }
  }
}

/// out += q h over one tile of K.
WYVERN_DEVICE void accumulate(Warp::Columns& out, const Buffer& buffer, const Warp& warp) {
#pragma unroll
  for (int depth = 0; depth < BK; depth += kDepth<DTYPE>) {
    FragmentA<DTYPE> q[kStrips];
#pragma unroll
    for (int i = 0; i < kStrips; ++i) q[i] = load_a(buffer.q, warp.row(i), depth);
#pragma unroll
    for (int n = 0; n < Warp::kPairs; n += 2) {
      const auto b = load_b(buffer.h, depth, warp.first_col + n * 8);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) multiply<precision>(out[i][n], out[i][n + 1], q[i], b);
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
  const DTYPE* const h_chunk = h + (int64{slot} * e.HV + head) * K * V + first_v;

  const auto values = tile_at<kLayout.values>(shared_memory());

  const auto load = [&](int tile) {
    if (tile < kTilesK) {
      const Buffer buffer(tile);
      const int cols = rest_from<K, BK>(tile * BK);
      load_tile<kThreads, K>(buffer.q, qg + row * K + tile * BK, e.HV * K, chunk.rows, cols);
      load_tile<kThreads, V>(buffer.h, h_chunk + int64{tile} * BK * V, V, cols,
                             rest_from<V, BV>(first_v));
    }
    copy_async_commit();
  };
  for (int i = 0; i < num_stages; ++i) load(i);
  load_tile<kThreads, V>(values, v_new + row * V + first_v, e.HV * V, chunk.rows,
                         rest_from<V, BV>(first_v));
  copy_async_commit();

  const Warp warp;
  Warp::Scores scores;
  Warp::Columns out;
#pragma unroll
  for (int i = 0; i < kStrips; ++i)
    load_scores(scores[i], Aqk + row * BT, e, warp.row(i) / 16, chunk.rows);
#pragma unroll
  for (int tile = 0; tile < kTilesK; ++tile) {
    // V' was committed after the first num_stages tiles and before the others.
    if (tile < num_stages)
      copy_async_wait<num_stages>();
    else
      copy_async_wait<num_stages - 1>();
    sync_block();
    accumulate(out, Buffer(tile), warp);
    if (tile + num_stages < kTilesK) sync_block();
    load(tile + num_stages);
  }
  copy_async_wait<0>();
  sync_block();
  warp.multiply<Triangle::lower>(out, scores, values);

  const float scale = STATE_UNIT ? e.scale * state_unit[int64{slot} * e.HV + head] : e.scale;
  warp.store(out, scale, o, row, e.HV, chunk.rows, first_v);
}
