// The state scan and the output, one block BV value columns of one sequence and value head. The
// block's warps share a chunk's scores, each a part of their 16x16 tiles; everything else of a
// chunk they compute for their own columns, or for half of the rows of those that two of them
// share, the output transposed like V'.
#include "device/cuda/scan.cuh"
#include "device/cuda/token_rows.cuh"
#include "device/state_slots.hpp"
#include "forward/fwd_h_o/layout.hpp"

using Scan = ForwardScan<Spec>;

constexpr fwd_h_o::SharedLayout kLayout{Spec{}};

/// A chunk's queries.
struct Queries {
  unsigned char* const start;
  TileAt<kLayout.q> q = tile_at<kLayout.q>(start);
  float* q_rstd = array_at<kLayout.q_rstd>(start);

  WYVERN_DEVICE explicit Queries(int chunk)
      : start(shared_memory() + kLayout.first + chunk % num_stages * kLayout.buffer_bytes) {}

  /// exp(G_r) with the scale of query r.
  WYVERN_DEVICE float factor(const Scan::Buffer& buffer, int r) const {
    float factor = 1.0f;
    if constexpr (SCALAR_GATE) factor = decay(buffer.G[r]);
    if constexpr (QK_L2NORM) factor *= q_rstd[r];
    return factor;
  }
};

/// The scores exp(G_r - G_s) q_r k_s of a chunk, on and below the diagonal, into shared memory.
/// Tiles above the diagonal keep what they had.
WYVERN_DEVICE void compute_scores(const Queries& queries, const Scan::Buffer& buffer) {
  constexpr int kTiles = BT / 16;
  const auto scores = tile_at<kLayout.scores>(shared_memory());
  for (int tile = warp_index(); tile < kTiles * (kTiles + 1) / 2; tile += num_warps) {
    int down = 0, across = tile;
    while (across > down) across -= ++down;
    // Two sums in turn, so that half as many products wait for each other.
    Accumulator product[2], other[2];
#pragma unroll
    for (int depth = 0; depth < Scan::kPaddedK; depth += kDepth<DTYPE>) {
      auto& sum = depth / kDepth<DTYPE> % 2 == 0 ? product : other;
      multiply<precision>(sum[0], sum[1], load_a(queries.q, down * 16, depth),
                          load_b_transposed(buffer.k, depth, across * 16));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = down * 16 + accumulator_row(i);
        const int s = across * 16 + half * 8 + accumulator_col(i);
        float scale = 1.0f;
        if constexpr (SCALAR_GATE) scale = decay(buffer.G[r] - buffer.G[s]);
        if constexpr (QK_L2NORM) scale *= queries.q_rstd[r] * buffer.k_rstd[s];
        const float sum = product[half].x[i] + other[half].x[i];
        *scores.at(r, s) = from_float<DTYPE>(r >= s ? sum * scale : 0.0f);
      }
  }
}

/// Factors of the columns of the output: of the warp's rows of the chunk.
struct RowFactors {
  float at[Scan::kRows / 8][2];

  WYVERN_DEVICE void find(const Queries& queries, const Scan::Buffer& buffer) {
    if constexpr (SCALAR_GATE || QK_L2NORM)
#pragma unroll
      for (int n = 0; n < Scan::kRows / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          at[n][j] = queries.factor(buffer, Scan::warp_row() + n * 8 + accumulator_col(j));
  }
};

/// out <- exp(G) out: a column for each row of the chunk.
WYVERN_DEVICE void decay_from_start(Scan::Values& out, const RowFactors& factors) {
  if constexpr (SCALAR_GATE || QK_L2NORM) {
#pragma unroll
    for (int n = 0; n < Scan::kRows / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float factor = factors.at[n][j];
#pragma unroll
        for (int i = 0; i < Scan::kStrips; ++i) {
          out[i][n].x[j] *= factor;
          out[i][n].x[j + 2] *= factor;
        }
      }
  }
}

/// out += V'^T P^T, of scores P.
WYVERN_DEVICE void add_values(Scan::Values& out, const Scan::Values& values) {
  const auto scores = tile_at<kLayout.scores>(shared_memory());
#pragma unroll
  for (int step = 0; step < BT / kDepth<DTYPE>; ++step) {
    FragmentA<DTYPE> a[Scan::kStrips];
#pragma unroll
    for (int i = 0; i < Scan::kStrips; ++i) a[i] = fragment_a<DTYPE>(values[i], step);
    // Rows of scores from the diagonal's tile on.
#pragma unroll
    for (int n = step * kDepth<DTYPE> / 16 * 2; n < BT / 8; n += 2) {
      const auto b = load_b_transposed(scores, step * kDepth<DTYPE>, n * 8);
#pragma unroll
      for (int i = 0; i < Scan::kStrips; ++i)
        multiply<precision>(out[i][n], out[i][n + 1], a[i], b);
    }
  }
}

/// Makes V' of the warp's rows known to its neighbour, before all warps have met.
WYVERN_DEVICE void hand_values(const Scan::Values& values) {
  if constexpr (Scan::kParts > 1) {
    const auto all = tile_at<kLayout.values>(shared_memory());
#pragma unroll
    for (int i = 0; i < Scan::kStrips; ++i)
#pragma unroll
      for (int step = 0; step < Scan::kRows / 16; ++step)
        Scan::hand_fragment(all, Scan::warp_row() + step * 16, Scan::warp_column() + i * 16,
                            fragment_a<DTYPE>(values[i], step));
  }
}

/// The same as add_values(), of V' of both warps.
WYVERN_DEVICE void add_handed_values(Scan::Values& out) {
  const auto scores = tile_at<kLayout.scores>(shared_memory());
  const auto all = tile_at<kLayout.values>(shared_memory());
#pragma unroll
  for (int step = 0; step < BT / 16; ++step) {
    if (step * 16 >= Scan::warp_row() + Scan::kRows) break;
    FragmentA<DTYPE> a[Scan::kStrips];
#pragma unroll
    for (int i = 0; i < Scan::kStrips; ++i)
      a[i] = Scan::handed_fragment(all, step * 16, Scan::warp_column() + i * 16);
#pragma unroll
    for (int n = 0; n < Scan::kRows / 8; n += 2) {
      const int row = Scan::warp_row() + n * 8;
      if (row < step * 16) continue;
      const auto b = load_b_transposed(scores, step * 16, row);
#pragma unroll
      for (int i = 0; i < Scan::kStrips; ++i)
        multiply<precision>(out[i][n], out[i][n + 1], a[i], b);
    }
  }
}

WYVERN_KERNEL(Scan::kThreads, 0) {
  const int head = block_index() / Scan::kTilesV % e.HV;
  const int sequence = block_index() / Scan::kTilesV / e.HV;
  const int tile_v = block_index() % Scan::kTilesV * BV;
  const Sequence place = locate_sequence<VARLEN, BT>(sequence, e, seq_offsets, chunk_offsets);
  const ScanRange range{place.token, place.tokens, head};
  const StateSlots slots =
      find_states<Spec>(sequence, head, e, state_stride, state_index, output_state_index);
  const TokenRows<DTYPE> outputs{o + head * V, o_stride};
  if (slots.null) {
    clear_output<Scan::kThreads>(outputs.at(range.token, tile_v), range.tokens,
                                 smaller(V - tile_v, BV));
    return;
  }
  const int first_v = tile_v + Scan::warp_column();
  const int key = Scan::key_head(head, e);
  Scan::Inputs in{scanned_rows<Spec>(k, k_stride, kg, e), w, u, G, Gk, k_rstd, e, {k, k_stride}};
  Scan::State scanned;
  float unit = 1.0f;
  const auto begin = [&] {
    const bool starts =
        (INPLACE_STATE || INITIAL_STATE) && starts_from_slot<Spec>(sequence, has_initial_state);
    const auto* const from = (INPLACE_STATE ? state : initial_state) + slots.from;
    unit = Scan::enter_sequence(shared_memory(), scanned, tile_v, starts ? from : nullptr,
                                scale_at<Spec>(state_scale, slots.from_scale), range, e, nullptr);
    in.u_factor = kValueUnit<Spec> / unit;
  };
  Scan::Values out;
  RowFactors factors;
  float* const sums = array_at<kLayout.sums>(shared_memory());
  const auto before = [&](int chunk, const Scan::State& entering) {
    const Queries queries(chunk);
    const Scan::Buffer buffer(shared_memory(), chunk);
    compute_scores(queries, buffer);
#pragma unroll
    for (int i = 0; i < Scan::kStrips; ++i)
#pragma unroll
      for (int n = 0; n < Scan::kRows / 8; ++n) out[i][n] = {};
    Scan::start_rows<1>(out, entering, queries.q, sums);
    factors.find(queries, buffer);
    if constexpr (Scan::kParts == 1) decay_from_start(out, factors);
  };
  const auto found = [&](int chunk, int rows, const Scan::Values& values) {
    if constexpr (Scan::kParts > 1) {
      Scan::finish_rows(out, sums);
      decay_from_start(out, factors);
      hand_values(values);
    }
    sync_block();  // the scores are complete
    if constexpr (Scan::kParts == 1)
      add_values(out, values);
    else
      add_handed_values(out);
    const float scale = e.scale * unit;
#pragma unroll
    for (int i = 0; i < Scan::kStrips; ++i)
#pragma unroll
      for (int n = 0; n < Scan::kRows / 8; ++n) out[i][n] = scaled(out[i][n], scale);
    const int first_row = Scan::warp_row();
    store_rows<V>(outputs.row(range.token + int64{chunk} * BT + first_row) + first_v, o_stride, out,
                  rows - first_row, Scan::columns_from(first_v));
  };
  const auto load_queries = [&](int chunk, int64 token, int rows) {
    const Queries queries(chunk);
    const TokenRows<const DTYPE> given{q, q_stride};
    load_tile<Scan::kThreads, K>(queries.q, given.at(token, key * K), rows, K);
    if constexpr (QK_L2NORM)
      load_column<Scan::kThreads, BT>(queries.q_rstd, q_rstd + token * e.H + key, e.H, rows);
  };
  if constexpr (CHECKPOINTS) {
    auto kept = find_checkpoints<Spec>(0, sequence, e, seq_offsets, checkpoint_offsets);
    Scan::scan_chunks_beside(
        shared_memory(), scanned, in, range, StateColumns{tile_v}, load_queries, begin, before,
        found, Scan::by_checkpoints(scanned, in, range, 0, kept, first_v, checkpoints, unit));
  } else {
    Scan::scan_chunks_beside(shared_memory(), scanned, in, range, StateColumns{tile_v},
                             load_queries, begin, before, found);
  }
  Scan::leave_sequence(scanned, tile_v, slots, unit, state, state_scale, final_state);
}
