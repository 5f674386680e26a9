// The kernel of delta_gradient by role.
//
// load: a producer warp loads tiles; three warps compute what is one number a row (rows.cuh). mma:
// of each band of a value head's columns the first warpgroup computes F and dQ, the second M and
// dK, the channels of K in slices of 64. backward/stages.hpp has the mathematics and these names.
// Rows of q and k enter products as they are given: factors of rows and columns include the scales
// of their norms, and both warpgroups have gradients times those.
#pragma once

#include "backward/delta_gradient/load.cuh"
#include "backward/delta_gradient/rows.cuh"
#include "device/cuda/sm90/kernel.cuh"

using sm90::columns_of;
using sm90::rows_of;
using Fragment = sm90::FragmentA<DTYPE, kRows>;

/// Whether sums over channels are needed, of a row's gradient with the row.
constexpr bool kDots = SCALAR_GATE || kNorms;

/// A part of a slice of states as a right operand: its channels are rows of S^T's gradients.
WYVERN_DEVICE auto channels_of(const StateTile& state) {
  if constexpr (kKept)
    return rows_of(state);
  else
    return columns_of(state);
}

/// This thread's rows' scales by their norms.
template <ArrayPlace Place>
WYVERN_DEVICE RowPair scales_of(const Block& b, const Turn& turn) {
  if constexpr (kNorms) return RowPair::load(b.factors<Place>(turn.factors().buffer));
  return {{1.0f, 1.0f}};
}

/// Two parts stay a loop: unrolled, the descriptors of both would spill.
WYVERN_DEVICE int parts_of_slice() { return kParts == 2 ? sm90::opaque(kParts) : kParts; }

/// One band stays a loop: merged with the loop over items it would spill.
WYVERN_DEVICE int bands_of_item() { return sm90::opaque(kTurns); }

// ---- the epilogue: gradients of rows ---------------------------------------------------------

using SliceStore = sm90::SliceStore<DTYPE, K>;

/// The sum over bands of a slice of gradients. With more than two slices it is rounded after each
/// band: registers have no room for fp32.
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

/// Stores an item's gradients. Where rows x have norms, these are gradients of normalized rows
/// times the scales, and their components along x are removed: `along` is this thread's part of
/// gradients times x, but for the terms o times rows `other`, which the gradients include.
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

/// F of a band, rounded, also to shared memory for dK; `own` is o, the diagonal before it is
/// cleared, and `factor` that of the rows.
WYVERN_DEVICE Fragment make_F(const Block& b, const Turn& turn, float scale, int warp,
                              RowPair& factor, RowPair& own) {
  const int row_stage = turn.rows().buffer;
  const int stage = turn.factors().buffer;
  Square x;
  b.rows().wait_full(turn.rows());
  sm90::start_product<kBand>(x, rows_of(b.dO(row_stage)), rows_of(b.z(row_stage)));
  b.scales().wait_full(turn.factors());
  factor = scales_of<kLayout.query_scale>(b, turn) * scale;
  const sm90::Decays<> decays(b.factors<kLayout.G>(stage), b.factors<kLayout.column>(stage),
                              b.factors<kLayout.anchored>(stage), warp);
  b.scores().wait_empty(turn.only());
  sm90::end_products<0>(x);
  own = sm90::diagonal_of(x, warp) * factor * RowPair::load(b.factors<kLayout.column>(stage));
  own.store(b.array<kLayout.own>());
  sm90::decay_strictly_lower(x, decays, factor, warp);
  Fragment F(x);
  sm90::store_fragment(b.F(), F);
  sm90::hand_over(b.scores().full(turn.only()));
  return F;
}

/// x = factor exp(G) dO S^T + F K, a slice of a band's dQ but for the terms of o.
WYVERN_DEVICE void multiply_queries(const Block& b, const Turn& turn, int slice, Fragment& F,
                                    const RowPair& factor, Square& x) {
#pragma unroll 1
  for (int part = 0; part < parts_of_slice(); ++part) {
    const auto at = turn.part(slice, part);
    b.states().wait_full(at);
    sm90::start_product<kPartRows>(x, rows_of(b.dO(turn.rows().buffer), 0, part * kPartRows),
                                   channels_of(b.state(at.buffer)), part > 0);
    sm90::end_products<0>(x);
    sm90::barrier_arrive(b.states().empty(at));
  }
  sm90::scale_rows(x, factor * RowPair::load(b.factors<kLayout.entering>(turn.factors().buffer)));
  sm90::start_product(x, F, columns_of(b.k(slice)), true);
  sm90::end_products<0>(x, F);
}

WYVERN_DEVICE void make_query_gradients(const Block& b, Items items, float scale,
                                        const SliceStore& out) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Turn turn;
  Item item;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items) {
    SliceSum dQ[kSlices];
    RowPair o, along, item_scale;
#pragma unroll 1
    for (int n = 0; n < kTurns; ++n, ++turn.bands) {
      RowPair factor, own, dots;
      Fragment F = make_F(b, turn, scale, warp, factor, own);
      if constexpr (kNorms) o = o + own;
      if (n == 0) b.keys().wait_full(turn.item());
      Square x;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        multiply_queries(b, turn, slice, F, factor, x);
        if constexpr (kDots) sm90::add_row_dots(dots, x, b.q(slice));
        sm90::add_rows(x, own, b.k(slice));
        dQ[slice].add(x);
      }
      sm90::barrier_arrive(b.rows().empty(turn.rows()));
      if constexpr (kNorms) along = along + dots;
      b.sums().wait_empty(turn.only());
      if constexpr (SCALAR_GATE) dots.over_quads().store(b.array<kLayout.query_dots>());
      item_scale = scales_of<kLayout.query_scale>(b, turn);  // until the sums are taken
      sm90::barrier_arrive(b.sums().full(turn.only()));
    }
    store_gradients(
        dQ, [&](int slice) { return b.q(slice); }, [&](int slice) { return b.k(slice); }, o, along,
        item_scale, out, b.item());
    sm90::hand_over(b.keys().empty(turn.item()));
  }
  out.wait();
}

// ---- keys ---------------------------------------------------------------------------------------

/// M of a band, rounded, also to shared memory for the product of columns. dbeta comes from
/// the diagonal, which is cleared.
WYVERN_DEVICE Fragment make_M(const Block& b, const Turn& turn, int warp, const SliceStore& out) {
  const int row_stage = turn.rows().buffer;
  const int stage = turn.factors().buffer;
  Square x;
  b.rows().wait_full(turn.rows());
  sm90::start_product<kBand>(x, rows_of(b.dv(row_stage)), rows_of(b.z(row_stage)));
  b.scales().wait_full(turn.factors());
  const sm90::Decays<> decays(b.factors<kLayout.G>(stage), b.factors<kLayout.column>(stage),
                              b.factors<kLayout.anchored>(stage), warp);
  sm90::end_products<0>(x);
  b.sums().wait_empty(turn.only());
  sm90::diagonal_of(x, warp).store(b.array<kLayout.values>());
  sm90::decay_strictly_lower(x, decays, scales_of<kLayout.key_scale>(b, turn) * -1.0f, warp);
  Fragment M(x);
  out.wait();  // until dk and the previous band's M have been read
  sm90::store_fragment(b.M(), M);
  sm90::fence_proxy_async();
  sync_named(out.name, 128);
  return M;
}

/// Sums over channels of a band's keys: with gradients as rows and as columns of the chunk's
/// products, and with those by the state that leaves.
struct KeyDots {
  RowPair rows, columns, end;
};

/// x = -exp(G) dV S^T + M K, y = exp(G_C - G) beta Z dS'^T + F^T Q + M^T K, then y + x + o Q: a
/// slice of a band's dK. Factors of rows are read again for each slice: registers are few.
WYVERN_DEVICE void multiply_keys(const Block& b, const Turn& turn, int slice, Fragment& M,
                                 KeyDots& dots, Square& x, Square& y) {
  const int row_stage = turn.rows().buffer;
  const int stage = turn.factors().buffer;
  // Descriptors are computed anew for each slice, as registers cannot keep them.
  const auto start = [&](int part) {
    const auto at = turn.part(slice, part);
    b.states().wait_full(at);
    const int first = part * kPartRows;
    sm90::start_product<kPartRows>(x, rows_of(b.dv(sm90::opaque(row_stage)), 0, first),
                                   channels_of(b.state(at.buffer)), part > 0);
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
  sm90::scale_rows(x, scales_of<kLayout.key_scale>(b, turn) *
                          RowPair::load(b.factors<kLayout.entering>(stage)) * -1.0f);
  sm90::start_product(x, M, columns_of(b.k(slice)), true);
  sm90::end_products<1>(y);
  sm90::barrier_arrive(b.states().empty(turn.part(slice, kParts - 1)));
  sm90::scale_rows(y, RowPair::load(b.factors<kLayout.leaving>(stage)));
  if constexpr (SCALAR_GATE) sm90::add_row_dots(dots.end, y, b.k(slice));
  sm90::begin_products(y);
  sm90::multiply<kRows>(y, columns_of(b.F()), columns_of(b.q(slice)), true);
  sm90::multiply<kRows>(y, columns_of(b.M()), columns_of(b.k(slice)), true);
  sm90::wgmma_commit();
  sm90::end_products<1>(x, M);
  if constexpr (kDots) sm90::add_row_dots(dots.rows, x, b.k(slice));
  sm90::end_products<0>(y);
  if constexpr (kDots) sm90::add_row_dots(dots.columns, y, b.k(slice));
  sm90::add(y, x);
  sm90::add_rows(y, RowPair::load(b.array<kLayout.own>()), b.q(slice));
}

/// Stores the sums of keys for the gate's gradient. The last row's term of the state that leaves
/// does not decay. It cancels, and is left out of both sums: where gates let little through it
/// would hide their gradient.
WYVERN_DEVICE void store_key_dots(const Block& b, KeyDots dots, int warp) {
  const int last = b.item().rows - 1;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (Square::row(2 * i) == last) dots.columns.at[i] = dots.end.at[i] = 0.0f;
  (dots.rows - dots.columns).over_quads().store(b.array<kLayout.key_dots>());
  const float sum = sum_warp(dots.end.at[0] + dots.end.at[1]);
  if (lane_index() == 0) b.array<kLayout.end_dots>()[warp] = sum;
}

WYVERN_DEVICE void make_key_gradients(const Block& b, Items items, const SliceStore& out) {
  const int warp = sm90::uniform(warp_index()) % 4;
  Turn turn;
  Item item;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items) {
    SliceSum dK[kSlices];
    RowPair o, along, item_scale;
#pragma unroll 1
    for (int n = 0; n < bands_of_item(); ++n, ++turn.bands) {
      Fragment M = make_M(b, turn, warp, out);
      b.scores().wait_full(turn.only());
      if constexpr (kNorms) o = o + RowPair::load(b.array<kLayout.own>());
      if (n == 0) b.keys().wait_full(turn.item());
      KeyDots dots;
      Square x, y;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        multiply_keys(b, turn, slice, M, dots, x, y);
        dK[slice].add(y);
      }
      sm90::barrier_arrive(b.scores().empty(turn.only()));
      sm90::barrier_arrive(b.rows().empty(turn.rows()));
      if constexpr (kNorms) along = along + dots.rows + dots.columns;
      if constexpr (SCALAR_GATE) store_key_dots(b, dots, warp);
      item_scale = scales_of<kLayout.key_scale>(b, turn);  // until the sums are taken
      sm90::barrier_arrive(b.sums().full(turn.only()));
    }
    store_gradients(
        dK, [&](int slice) { return b.k(slice); }, [&](int slice) { return b.q(slice); }, o, along,
        item_scale, out, b.item());
    sm90::hand_over(b.keys().empty(turn.item()));
  }
  out.wait();
}

// ---- the block ----------------------------------------------------------------------------------

template <class P>
struct DeltaGradient {
  using Params = P;
  static constexpr bool kWide = K > 128 || kBand > 128;
  static constexpr sm90::Roles kRoles{
      .mma = 2, .load_registers = kWide ? 56 : 88, .mma_registers = kWide ? 224 : 208};
  static_assert(kRoles.threads() == kThreads);

  const P& p;
  const Block block{sm90::swizzled_memory()};
  const Items items;

  WYVERN_DEVICE explicit DeltaGradient(const P& params)
      : p(params), items(params.e, params.seq_offsets, params.chunk_index) {}

  WYVERN_DEVICE static bool find() { return true; }
  WYVERN_DEVICE void init_barriers() const { block.init_barriers(); }
  WYVERN_DEVICE static void clear_shared() {}

  WYVERN_DEVICE void load(int warp) const {
    if (warp == 0)
      load_items(block, items,
                 {p.q_map, p.k_map, p.do_map, p.z_map, p.dv_map, p.states_map, p.dstates_map});
    else
      work_on_rows(block, items,
                   {{p.g, p.g_stride},
                    {p.beta, p.beta_stride},
                    p.row_scales,
                    p.A_log,
                    p.dt_bias,
                    p.e.gate_floor},
                   {p.dbeta, p.dg_given, p.dA_chunk, p.dbias_chunk, p.e.HV});
  }

  WYVERN_DEVICE static bool idle(int) { return false; }

  WYVERN_DEVICE void mma(int warpgroup) const {
    if (warpgroup == 0)
      make_query_gradients(block, items, p.e.scale,
                           {p.dq_map, p.dq_given, block.tile<kLayout.staging>().data, 1, p.e.H});
    else
      make_key_gradients(block, items, {p.dk_map, p.dk_given, block.M().data, 2, p.e.H});
  }
};
