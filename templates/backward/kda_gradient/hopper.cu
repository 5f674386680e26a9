// All gradients of a chunk of Kimi Delta Attention but v's, from the states on both sides of it:
// one head's chunk at a time, the channels of K in slices of 64. The names are those of
// backward/stages.hpp.
//
// The first warpgroup loads tiles and decays rows (operands.cuh), the second computes F and dQ, the
// third M and dK, the fourth the gradients of gates and of beta (gates.cuh). dG is computed from
// the same rounded operands as both sweeps: terms that cancel in exact arithmetic cancel here too.
#include "backward/kda_gradient/gates.cuh"
#include "backward/kda_gradient/operands.cuh"
#include "backward/kda_gradient/sweep.cuh"

using sm90::columns_of;
using sm90::rows_of;
using SliceStore = sm90::SliceStore<DTYPE, K>;

/// Register budget of a thread of each warpgroup (setmaxnreg).
constexpr int kOperandRegisters = kMayBeSteep || ERASE_WRITE || kSlices == 1 ? 96 : 88;
constexpr int kQueryRegisters = kMayBeSteep || ERASE_WRITE ? 144 : 152;
constexpr int kGateRegisters = 80;
constexpr int kKeyRegisters = 4 * 128 - kOperandRegisters - kQueryRegisters - kGateRegisters;

// ---- what both warpgroups of products do --------------------------------------------------------

/// This thread's rows' scales by their norms.
template <ArrayPlace Place>
WYVERN_DEVICE RowPair scales_of(const Block& b, const Turn& turn) {
  if constexpr (kNorms) return RowPair::load(b.factors<Place>(turn.factors().buffer));
  return {{1.0f, 1.0f}};
}

/// Below the diagonal x times factors of columns, elsewhere 0, by selection: elements there may be
/// infinite.
WYVERN_DEVICE void keep_strictly_lower(Square& x, float factor, const float* columns, int warp) {
  const int first = sm90::opaque(16 * warp) + lane_index() / 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const Float2 of_column = load<2>(columns + Square::col(4 * j));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_lower = Square::col(4 * j + i) < first + i / 2 * 8;
      float& value = x.x[4 * j + i];
      value = is_lower ? value * (factor * of_column.at[i % 2]) : 0.0f;
    }
  }
}

/// Four registers of a tile as an accumulator has them, of sixteen columns.
WYVERN_DEVICE void load_words(uint32 (&words)[4], const SquareTile& tile, int j) {
  load_matrix_x4(words, sm90::fragment_at(tile, 16 * j));
}

/// Calls visit(place, row_half, pair) for pairs of elements of sixteen columns: the first one's
/// index in an accumulator, which of the thread's rows it is in, and its column.
template <class Visit>
WYVERN_DEVICE void for_pairs(int j, Visit&& visit) {
#pragma unroll
  for (int i = 0; i < 4; ++i) visit(i, 8 * j + 2 * i, i % 2, Square::col(8 * j + 2 * i));
}

/// An item's gradients, rounded, slice by slice, the latest last. Where rows have norms, with the
/// rows of the slice before the last, which leave shared memory.
struct ItemGradients {
  Fragment slices[kSlices];
  Fragment rows{Square{}};

  WYVERN_DEVICE ItemGradients() {
#pragma unroll
    for (Fragment& slice : slices) slice = Fragment(Square{});
  }
  WYVERN_DEVICE Fragment& next() {
    if constexpr (kSlices > 1) slices[0] = slices[1];
    return slices[kSlices - 1];
  }
  /// Ends the use of a slice's tiles of q and k; `tile` is the one that the gradients are of.
  WYVERN_DEVICE void leave(const Block& b, const Turn& turn, const SquareTile& tile, bool last) {
    if constexpr (kNorms) {
      if (last) return;  // store() does
#pragma unroll
      for (int j = 0; j < kRows / 16; ++j) load_words(rows.x[j], tile, j);
    }
    sm90::hand_over(b.slices().empty(turn.keys()));
  }
  /// Where rows have norms, these are gradients of normalized rows, and their components along a
  /// row are removed: `dots` is this thread's part of gradients times rows as given, the last
  /// slice's in `tile`.
  WYVERN_DEVICE void store(const SquareTile& tile, const RowPair& dots, const RowPair& scale,
                           const SliceStore& out, const Item& item) {
    const RowPair along = dots.over_quads() * scale * scale * scale * -1.0f;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if constexpr (kNorms) {
#pragma unroll
        for (int j = 0; j < kRows / 16; ++j) {
          uint32 words[4];
          if (slice + 1 == kSlices) load_words(words, tile, j);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Float2 row = sm90::unpack<DTYPE>(slice + 1 == kSlices ? words[i] : rows.x[j][i]);
            uint32& pair = slices[slice].x[j][i];
            const Float2 x = sm90::unpack<DTYPE>(pair);
            float y[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
              y[n] = fused_multiply_add(along.at[i % 2], row.at[n], x.at[n] * scale.at[i % 2]);
            pair = pack<DTYPE>(y[0], y[1]);
          }
        }
      }
      out.wait();
      sm90::store_fragment(out.tile(), slices[slice]);
      out.store(item, slice);
    }
  }
};

// ---- queries ------------------------------------------------------------------------------------

/// From x at its rows' anchors to dQ, and its part of dG.
WYVERN_DEVICE void end_queries(const Block& b, const Turn& turn, Square& x, const RowPair& own,
                               RowPair& dots, Fragment& to) {
  const SquareTile q = b.q(turn.keys().buffer);
  const SquareTile k = b.k(turn.keys().buffer);
  b.slices().wait_full(turn.keys());
  b.dots().wait_empty(turn.slice());
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) {
    uint32 of_k[4], from[4], rows[4];
    load_words(of_k, k, j);
    load_words(from, b.q_from(), j);
    if constexpr (kNorms) load_words(rows, q, j);
    for_pairs(j, [&](int word, int i, int half, int column) {
      const int row = Square::row(2 * half);
      const Float2 decay = load<2>(b.pair<kLayout.decay>(row, column));
      const Float2 key = sm90::unpack<DTYPE>(of_k[word]);
      const Float2 query = sm90::unpack<DTYPE>(from[word]);
      Float2 dG;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float& value = x.x[i + n];
        dG.at[n] = value * query.at[n];
        value = fused_multiply_add(own.at[half], key.at[n], value * exp2_fast(decay.at[n]));
      }
      *reinterpret_cast<Float2*>(b.pair<kLayout.dG>(row, column)) = dG;
      if constexpr (kNorms) {
        const Float2 given = sm90::unpack<DTYPE>(rows[word]);
#pragma unroll
        for (int n = 0; n < 2; ++n)
          dots.at[half] = fused_multiply_add(x.x[i + n], given.at[n], dots.at[half]);
      }
      to.x[j][word] = pack<DTYPE>(x.x[i], x.x[i + 1]);
    });
  }
  sm90::barrier_arrive(b.dots().full(turn.slice()));
  sm90::barrier_arrive(b.operands().empty(turn.slice()));
}

WYVERN_DEVICE void make_query_gradients(const Block& b, Items items, float scale,
                                        const SliceStore& out) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Turn turn;
  Item item;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items) {
    Square x;
    b.rows().wait_full(turn.item());
    sm90::start_product<V>(x, rows_of(b.dO()), rows_of(b.z()));
    b.scales().wait_full(turn.factors());
    const float* const beta = b.factors<kLayout.beta>(turn.factors().buffer);
    b.scores().wait_empty(turn.item());
    sm90::end_products<0>(x);
    RowPair own = sm90::diagonal_of(x, warp) * RowPair::load(beta) * scale;
    own.store(b.array<kLayout.own>());
    keep_strictly_lower(x, scale, beta, warp);
    Fragment F(x);
    if constexpr (ERASE_WRITE) out.wait();  // dq was there
    sm90::store_fragment(b.F(), F);
    sm90::hand_over(b.scores().full(turn.item()));

    own = own * scales_of<kLayout.key_scale>(b, turn);
    ItemGradients dQ;
    RowPair dots;
#pragma unroll 1
    for (int slice = 0; slice < slice_count(); ++slice, ++turn.slices) {
      b.states().wait_full(turn.slice());
      sm90::start_product<V>(x, rows_of(b.dO()), columns_of(b.state()));
      sm90::end_products<0>(x);
      sm90::barrier_arrive(b.states().empty(turn.slice()));
      if (slice + 1 == kSlices) sm90::barrier_arrive(b.rows().empty(turn.item()));
      b.operands().wait_full(turn.slice());
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const Float2 anchor = b.anchor(0, Square::col(4 * j));
#pragma unroll
        for (int i = 0; i < 4; ++i) x.x[4 * j + i] *= scale * exp2_fast(anchor.at[i % 2]);
      }
      sweep(b, b.is_steep(), x, F);
      end_queries(b, turn, x, own, dots, dQ.next());
      dQ.leave(b, turn, b.q(turn.keys().buffer), slice + 1 == kSlices);
    }
    const RowPair query_scale = scales_of<kLayout.query_scale>(b, turn);
    sm90::barrier_arrive(b.scales().empty(turn.factors()));
    const auto last = Turn{turn.items, turn.slices - 1}.keys();
    if constexpr (ERASE_WRITE) b.scores().wait_empty(Turn{turn.items + 1}.item());
    dQ.store(b.q(last.buffer), dots, query_scale, out, item);
    if constexpr (kNorms) sm90::hand_over(b.slices().empty(last));
  }
  out.wait();
}

// ---- keys ---------------------------------------------------------------------------------------

/// y times beta, decayed from the chunk's end to the last anchor, and the sums over this warp's
/// rows of what it adds to the end's dG.
WYVERN_DEVICE void start_columns(const Block& b, const Turn& turn, Square& y, const RowPair& beta) {
  float sums[16];
  const int warp = sm90::opaque(warp_index() % 4);
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) {
    uint32 words[4];
    load_words(words, b.k_to(), j);
    for_pairs(j, [&](int word, int i, int half, int column) {
      const Float2 whole = load<2>(b.array<kLayout.whole>() + column);
      const Float2 last = b.anchor(kAnchors - 1, column);
      const Float2 own = b.anchor(4 * warp + lane_index() / 16 + 2 * half, column);
      const Float2 key = sm90::unpack<DTYPE>(words[word]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float value = y.x[i + n] * beta.at[half];
        const float part = value * exp2_fast(whole.at[n] - own.at[n]) * key.at[n];
        float& sum = sums[4 * j + word / 2 * 2 + n];
        sum = half == 0 ? part : sum + part;
        y.x[i + n] = value * exp2_fast(whole.at[n] - last.at[n]);
      }
    });
  }
  const int first = sum_lanes<16, 4>(sums);
  float* const to = b.array<kLayout.ends>() + (turn.slices % 2 * 4 + warp_index() % 4) * kChannels;
  *reinterpret_cast<Float2*>(to + first / 2 * 8 + lane_index() % 4 * 2) = {{sums[0], sums[1]}};
}

/// From x and y at their rows' anchors to dK and the rest of dG; derase in the place of erase.
WYVERN_DEVICE void end_keys(const Block& b, const Turn& turn, Square& x, const Square& y,
                            const RowPair& own, RowPair& dots, Fragment& to) {
  const SquareTile q = b.q(turn.keys().buffer);
  const SquareTile k = b.k(turn.keys().buffer);
  const RowPair key_scale = scales_of<kLayout.key_scale>(b, turn);
  b.slices().wait_full(turn.keys());
  b.dots().wait_full(turn.slice());
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) {
    uint32 of_q[4], key_from[4], key_to[4], rows[4] = {}, gates[4] = {};
    load_words(of_q, q, j);
    load_words(key_from, b.k_from(), j);
    load_words(key_to, b.k_to(), j);
    if constexpr (kNorms || ERASE_WRITE) load_words(rows, k, j);
    if constexpr (ERASE_WRITE) load_words(gates, b.erase(), j);
    for_pairs(j, [&](int word, int i, int half, int column) {
      const int row = Square::row(2 * half);
      const Float2 decay = load<2>(b.pair<kLayout.decay>(row, column));
      const Float2 query = sm90::unpack<DTYPE>(of_q[word]);
      const Float2 from = sm90::unpack<DTYPE>(key_from[word]);
      const Float2 decayed = sm90::unpack<DTYPE>(key_to[word]);
      auto* const dG = reinterpret_cast<Float2*>(b.pair<kLayout.dG>(row, column));
      Float2 sum = *dG;
      const Float2 gate = sm90::unpack<DTYPE>(gates[word]);
      Float2 derase;
      const Float2 key = sm90::unpack<DTYPE>(rows[word]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float& by_rows = x.x[i + n];
        const float by_columns = y.x[i + n];
        sum.at[n] = fused_multiply_add(by_rows, from.at[n], sum.at[n]);
        sum.at[n] = fused_multiply_add(-by_columns, decayed.at[n], sum.at[n]);
        if constexpr (ERASE_WRITE) {
          const float of_erased = by_rows * exp2_fast(decay.at[n]);
          derase.at[n] = of_erased * key.at[n] * key_scale.at[half];
          by_rows = fused_multiply_add(of_erased, gate.at[n], own.at[half] * query.at[n]);
        } else {
          by_rows = fused_multiply_add(by_rows, exp2_fast(decay.at[n]), own.at[half] * query.at[n]);
        }
        by_rows = fused_multiply_add(by_columns, exp2_fast(-decay.at[n]), by_rows);
      }
      *dG = sum;
      if constexpr (ERASE_WRITE) gates[word] = pack<DTYPE>(derase.at[0], derase.at[1]);
      if constexpr (kNorms) {
        const Float2 given = sm90::unpack<DTYPE>(rows[word]);
#pragma unroll
        for (int n = 0; n < 2; ++n)
          dots.at[half] = fused_multiply_add(x.x[i + n], given.at[n], dots.at[half]);
      }
      to.x[j][word] = pack<DTYPE>(x.x[i], x.x[i + 1]);
    });
    if constexpr (ERASE_WRITE) sm90::store_matrix_x4(sm90::fragment_at(b.erase(), 16 * j), gates);
  }
  sm90::barrier_arrive(b.summed());
  sm90::barrier_arrive(b.operands().empty(turn.slice()));
}

WYVERN_DEVICE void make_key_gradients(const Block& b, Items items, const SliceStore& out) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Turn turn;
  Item item;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items) {
    Square x, y;
    b.rows().wait_full(turn.item());
    sm90::start_product<V>(x, rows_of(b.dv()), rows_of(b.z()));
    b.scales().wait_full(turn.factors());
    const float* const beta = b.factors<kLayout.beta>(turn.factors().buffer);
    sm90::end_products<0>(x);
    sm90::diagonal_of(x, warp).store(b.array<kLayout.values>() + turn.items % 2 * kRows);
    keep_strictly_lower(x, -1.0f, beta, warp);
    Fragment M(x);
    out.wait();  // dk was there
    sm90::store_fragment(b.M(), M);
    sm90::fence_proxy_async();
    sync_named(out.name, 128);

    b.scores().wait_full(turn.item());
    const RowPair own =
        RowPair::load(b.array<kLayout.own>()) * scales_of<kLayout.query_scale>(b, turn);
    ItemGradients dK;
    RowPair dots;
#pragma unroll 1
    for (int slice = 0; slice < slice_count(); ++slice, ++turn.slices) {
      b.states().wait_full(turn.slice());
      sm90::start_product<V>(x, rows_of(b.dv()), columns_of(b.state()));
      sm90::start_product<V>(y, rows_of(b.z()), columns_of(b.dstate()));
      sm90::end_products<1>(x);
      sm90::end_products<0>(y);
      sm90::barrier_arrive(b.states().empty(turn.slice()));
      if (slice + 1 == kSlices) sm90::barrier_arrive(b.rows().empty(turn.item()));
      b.operands().wait_full(turn.slice());
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const Float2 anchor = b.anchor(0, Square::col(4 * j));
#pragma unroll
        for (int i = 0; i < 4; ++i) x.x[4 * j + i] *= -exp2_fast(anchor.at[i % 2]);
      }
      start_columns(b, turn, y, RowPair::load(beta));
      sweep(b, b.is_steep(), x, y, M);
      if (slice + 1 == kSlices) sm90::barrier_arrive(b.scores().empty(turn.item()));
      end_keys(b, turn, x, y, own, dots, dK.next());
      dK.leave(b, turn, b.k(turn.keys().buffer), slice + 1 == kSlices);
    }
    const RowPair key_scale = scales_of<kLayout.key_scale>(b, turn);
    sm90::barrier_arrive(b.scales().empty(turn.factors()));
    const auto last = Turn{turn.items, turn.slices - 1}.keys();
    dK.store(b.k(last.buffer), dots, key_scale, out, item);
    if constexpr (kNorms) sm90::hand_over(b.slices().empty(last));
  }
  out.wait();
}

// ---- the block ----------------------------------------------------------------------------------

WYVERN_KERNEL(kThreads, 1) {
  const Block b{sm90::swizzled_memory()};
  if (thread_index() == 0) b.init_barriers();
  sync_block();
  const Items items(e, seq_offsets, chunk_index);
  const int warpgroup = sm90::uniform(warp_index()) / 4;
  if (warpgroup == 0) {
    sm90::lower_registers<kOperandRegisters>();
    make_all_operands(b, items, e,
                      {{beta, beta_stride}, {erase, erase_stride}, row_scales, A_log, dt_bias},
                      {q_map, k_map, g_map, do_map, z_map, dv_map, states_map, dstates_map});
  } else if (warpgroup == 1) {
    sm90::raise_registers<kQueryRegisters>();
    make_query_gradients(b, items, e.scale,
                         {dq_map, dq_given, b.tile<kLayout.staging>().data, 1, e.H});
  } else if (warpgroup == 2) {
    sm90::raise_registers<kKeyRegisters>();
    make_key_gradients(b, items, {dk_map, dk_given, b.M().data, 2, e.H});
  } else {
    sm90::lower_registers<kGateRegisters>();
    end_gates(b, items, e,
              {{beta, beta_stride}, A_log, dt_bias, dbeta, dg_given, dA_chunk, dbias_chunk},
              {{v, v_stride}, {write, write_stride}, dv, dwrite, derase});
  }
}
