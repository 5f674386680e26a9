// All gradients of a chunk of the delta rule with one gate a head or none, from the states on both
// sides of it: one key head's chunk at a time, its value heads in turn, the channels of K in slices
// of 64. The names are those of backward/stages.hpp.
//
// The first warpgroup loads tiles and has to do with numbers of rows (rows.cuh). The second makes F
// and dQ, the third M and dK. Rows of q and k go into products as they are; what their norms make
// of them rides on factors of rows and columns, and both warpgroups have gradients times those.
#include "backward/delta_gradient/rows.cuh"

using sm90::columns_of;
using sm90::rows_of;
using Fragment = sm90::FragmentA<DTYPE, kRows>;

/// Registers of a thread of the first warpgroup and of the others. At launch all have as many.
constexpr bool kWide = K > 128 || V > 128;
constexpr int kRowRegisters = kWide ? 56 : 88;
constexpr int kProductRegisters = kWide ? 224 : 208;
static_assert(kRowRegisters + 2 * kProductRegisters <= 3 * (65536 / kThreads / 8 * 8));

/// Whether sums over channels are needed, of a row's gradient with the row.
constexpr bool kDots = SCALAR_GATE || kNorms;

/// This thread's rows' scales by their norms.
template <ArrayPlace Place>
WYVERN_DEVICE RowPair scales_of(const Block& b) {
  if constexpr (kNorms) return RowPair::load(b.array<Place>());
  return {{1.0f, 1.0f}};
}

/// Of two the compiler is to make a loop too: registers have no room for the descriptors of both.
WYVERN_DEVICE int parts_of_slice() { return kParts == 2 ? sm90::opaque(kParts) : kParts; }

/// A loop over one head stays a loop: joined with that over items it would spill.
WYVERN_DEVICE int group_size() { return sm90::opaque(GROUP); }

// ---- gradients of rows on their way out ---------------------------------------------------------

using SliceStore = sm90::SliceStore<DTYPE, K>;

/// The sum over value heads of a slice of gradients. Where registers have not the room for so many
/// slices it is rounded after each head.
template <bool Rounded>
struct HeadSum {
  Square x;

  WYVERN_DEVICE void add(const Square& y) { sm90::add(x, y); }
  WYVERN_DEVICE Square value() const { return x; }
};
template <>
struct HeadSum<true> {
  Fragment x{Square{}};

  WYVERN_DEVICE void add(const Square& y) {
    Square sum = value();
    sm90::add(sum, y);
    x = Fragment(sum);
  }
  WYVERN_DEVICE Square value() const { return sm90::unpack(x); }
};
using SliceSum = HeadSum<(kSlices > 2)>;

/// Stores an item's gradients. Where rows x have norms, these are gradients of scaled rows times
/// the scales, and what is along x is taken out: `along` is this thread's part of gradients times
/// x, without the terms of o times rows `other`, which the gradients have.
template <class Rows, class OtherRows>
WYVERN_DEVICE void store_gradients(const SliceSum (&sums)[kSlices], const Rows& x,
                                   const OtherRows& other, const RowPair& o, RowPair along,
                                   const RowPair& scale, const SliceStore& out, const Item& item) {
  if constexpr (kNorms) {
    RowPair both;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) sm90::add_row_dots(both, x(slice), other(slice));
    along = ((along + both * o).over_quads() * scale) * scale * -1.0f;
  }
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    Square gradient = sums[slice].value();
    if constexpr (kNorms) sm90::add_rows(gradient, along, x(slice));
    out.wait();
    sm90::store_fragment(out.tile(), Fragment(gradient));
    out.store(item, slice);
  }
}

// ---- queries ------------------------------------------------------------------------------------

WYVERN_DEVICE void make_query_gradients(const Block& b, Items items, float scale,
                                        const SliceStore& out) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Turn turn;
  Item item;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items) {
    SliceSum dQ[kSlices];
    RowPair o, along;
#pragma unroll 1
    for (int head = 0; head < GROUP; ++head, ++turn.heads) {
      const int row_stage = turn.rows().buffer;
      const int stage = turn.factors().buffer;
      Square x;
      b.rows().wait_full(turn.rows());
      sm90::start_product<V>(x, rows_of(b.dO(row_stage)), rows_of(b.z(row_stage)));
      b.scales().wait_full(turn.factors());
      const RowPair factor = scales_of<kLayout.query_scale>(b) * scale;
      const sm90::Decays<> decays(b.factors<kLayout.G>(stage), b.factors<kLayout.column>(stage),
                                  b.factors<kLayout.anchored>(stage), warp);
      b.scores().wait_empty(turn.only());
      sm90::end_products<0>(x);
      const RowPair own =
          sm90::diagonal_of(x, warp) * factor * RowPair::load(b.factors<kLayout.column>(stage));
      own.store(b.array<kLayout.own>());
      if constexpr (kNorms) o = o + own;
      sm90::decay_strictly_lower(x, decays, factor, warp);
      Fragment F(x);
      sm90::store_fragment(b.F(), F);
      sm90::hand_over(b.scores().full(turn.only()));

      if (head == 0) b.keys().wait_full(turn.item());
      RowPair dots;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll 1
        for (int part = 0; part < parts_of_slice(); ++part) {
          const auto at = turn.part(slice, part);
          b.states().wait_full(at);
          sm90::start_product<kPartRows>(x, rows_of(b.dO(row_stage), 0, part * kPartRows),
                                         columns_of(b.state(at.buffer)), part > 0);
          sm90::end_products<0>(x);
          sm90::barrier_arrive(b.states().empty(at));
        }
        sm90::scale_rows(x, factor * RowPair::load(b.factors<kLayout.entering>(stage)));
        sm90::start_product(x, F, columns_of(b.k(slice)), true);
        sm90::end_products<0>(x, F);
        if constexpr (kDots) sm90::add_row_dots(dots, x, b.q(slice));
        sm90::add_rows(x, own, b.k(slice));
        dQ[slice].add(x);
      }
      sm90::barrier_arrive(b.rows().empty(turn.rows()));
      if constexpr (kNorms) along = along + dots;
      b.sums().wait_empty(turn.only());
      if constexpr (SCALAR_GATE) dots.over_quads().store(b.array<kLayout.query_dots>());
      sm90::barrier_arrive(b.sums().full(turn.only()));
    }
    store_gradients(
        dQ, [&](int slice) { return b.q(slice); }, [&](int slice) { return b.k(slice); }, o, along,
        scales_of<kLayout.query_scale>(b), out, b.item());
    sm90::hand_over(b.keys().empty(turn.item()));
  }
  out.wait();
}

// ---- keys ---------------------------------------------------------------------------------------

WYVERN_DEVICE void make_key_gradients(const Block& b, Items items, const SliceStore& out) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Turn turn;
  Item item;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items) {
    SliceSum dK[kSlices];
    RowPair o, along;
#pragma unroll 1
    for (int head = 0; head < group_size(); ++head, ++turn.heads) {
      const int row_stage = turn.rows().buffer;
      const int stage = turn.factors().buffer;
      Square x, y;
      b.rows().wait_full(turn.rows());
      sm90::start_product<V>(x, rows_of(b.dv(row_stage)), rows_of(b.z(row_stage)));
      b.scales().wait_full(turn.factors());
      const sm90::Decays<> decays(b.factors<kLayout.G>(stage), b.factors<kLayout.column>(stage),
                                  b.factors<kLayout.anchored>(stage), warp);
      sm90::end_products<0>(x);
      b.sums().wait_empty(turn.only());
      sm90::diagonal_of(x, warp).store(b.array<kLayout.values>());
      sm90::decay_strictly_lower(x, decays, scales_of<kLayout.key_scale>(b) * -1.0f, warp);
      Fragment M(x);
      out.wait();  // dk was there, and M of the head before
      sm90::store_fragment(b.M(), M);
      sm90::fence_proxy_async();
      sm90::sync_named(out.name, 128);

      b.scores().wait_full(turn.only());
      if constexpr (kNorms) o = o + RowPair::load(b.array<kLayout.own>());
      if (head == 0) b.keys().wait_full(turn.item());
      // Numbers of rows are read again for each slice: registers are few.
      RowPair from_rows, from_columns, end;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        // Descriptors are made anew for each slice, as registers cannot keep them.
        const auto start = [&](int part) {
          const auto at = turn.part(slice, part);
          b.states().wait_full(at);
          const int first = part * kPartRows;
          sm90::start_product<kPartRows>(x, rows_of(b.dv(sm90::opaque(row_stage)), 0, first),
                                         columns_of(b.state(at.buffer)), part > 0);
          sm90::start_product<kPartRows>(y, rows_of(b.z(sm90::opaque(row_stage)), 0, first),
                                         columns_of(b.dstate(at.buffer)), part > 0);
        };
#pragma unroll 1
        for (int part = 0; part + 1 < parts_of_slice(); ++part) {
          start(part);
          sm90::end_products<0>(x);
          sm90::pin(y.x);
          sm90::barrier_arrive(b.states().empty(turn.part(slice, part)));
        }
        start(kParts - 1);
        sm90::end_products<1>(x);
        sm90::scale_rows(x, scales_of<kLayout.key_scale>(b) *
                                RowPair::load(b.factors<kLayout.entering>(stage)) * -1.0f);
        sm90::start_product(x, M, columns_of(b.k(slice)), true);
        sm90::end_products<1>(y);
        sm90::barrier_arrive(b.states().empty(turn.part(slice, kParts - 1)));
        sm90::scale_rows(y, RowPair::load(b.factors<kLayout.leaving>(stage)));
        if constexpr (SCALAR_GATE) sm90::add_row_dots(end, y, b.k(slice));
        sm90::begin_products(y);
        sm90::multiply<kRows>(y, columns_of(b.F()), columns_of(b.q(slice)), true);
        sm90::multiply<kRows>(y, columns_of(b.M()), columns_of(b.k(slice)), true);
        sm90::wgmma_commit();
        sm90::end_products<1>(x, M);
        if constexpr (kDots) sm90::add_row_dots(from_rows, x, b.k(slice));
        sm90::end_products<0>(y);
        if constexpr (kDots) sm90::add_row_dots(from_columns, y, b.k(slice));
        sm90::add(y, x);
        sm90::add_rows(y, RowPair::load(b.array<kLayout.own>()), b.q(slice));
        dK[slice].add(y);
      }
      sm90::barrier_arrive(b.scores().empty(turn.only()));
      sm90::barrier_arrive(b.rows().empty(turn.rows()));
      if constexpr (kNorms) along = along + from_rows + from_columns;
      if constexpr (SCALAR_GATE) {
        // What the last row tells the state that leaves does not decay. It cancels, and is left out
        // of both sums: where gates let little through it would hide what they do.
        const int last = b.item().rows - 1;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (Square::row(2 * i) == last) from_columns.at[i] = end.at[i] = 0.0f;
        (from_rows - from_columns).over_quads().store(b.array<kLayout.key_dots>());
        const float sum = sum_warp(end.at[0] + end.at[1]);
        if (lane_index() == 0) b.array<kLayout.end_dots>()[warp] = sum;
      }
      sm90::barrier_arrive(b.sums().full(turn.only()));
    }
    store_gradients(
        dK, [&](int slice) { return b.k(slice); }, [&](int slice) { return b.q(slice); }, o, along,
        scales_of<kLayout.key_scale>(b), out, b.item());
    sm90::hand_over(b.keys().empty(turn.item()));
  }
  out.wait();
}

// ---- the block ----------------------------------------------------------------------------------

WYVERN_KERNEL(kThreads, 1) {
  const Block b{sm90::swizzled_memory()};
  if (thread_index() == 0) b.init_barriers();
  sync_block();
  const Items items(e, seq_offsets, chunk_index);
  const int warp = sm90::uniform(warp_index());
  if (warp < 4) {
    sm90::lower_registers<kRowRegisters>();
    if (warp == 0)
      load_items(b, items, {q_map, k_map, do_map, z_map, dv_map, states_map, dstates_map});
    else
      work_on_rows(b, items, {{g, g_stride}, {beta, beta_stride}, A_log, dt_bias, e.gate_floor},
                   {dbeta, dg_given, dA_chunk, dbias_chunk, e.HV});
  } else if (warp < 8) {
    sm90::raise_registers<kProductRegisters>();
    make_query_gradients(b, items, e.scale,
                         {dq_map, dq_given, b.tile<kLayout.staging>().data, 1, e.H});
  } else {
    sm90::raise_registers<kProductRegisters>();
    make_key_gradients(b, items, {dk_map, dk_given, b.M().data, 2, e.H});
  }
}
