// Warpgroup 0 of kda_gradient.hopper: TMA loads, factors of rows, and from a slice's gates the
// operands of both sweeps: rows of q and k decayed from the anchor of their rows and to it.
#pragma once

#include "backward/kda_gradient/block.cuh"
#include "device/cuda/sm90/tma.cuh"

constexpr int kOperandsName = 3;  ///< of the warpgroup's named barrier

// ---- tiles, by the first warp -------------------------------------------------------------------

struct LoadMaps {
  const TensorMap &q, &k, &g, &dO, &z, &dv, &states, &dstates;
};

/// An item's rows. `tails` counts loads of chunks with fewer rows.
WYVERN_DEVICE void load_item(const Block& b, const Turn& turn, const Item& item, uint32& tails,
                             const LoadMaps& maps) {
  b.rows().wait_empty(turn.item());
  sm90::load_rows<kRows>(
      item.rows, b.rows().full(turn.item()), b.tail_full(), tails % 2, 3 * ValueTile::kBytes,
      [&](sm90::Barrier* barrier) {
        sm90::tensor_load(b.dO().data, maps.dO, {0, item.token, 0, item.head}, barrier);
        sm90::tensor_load(b.z().data, maps.z, {0, 0, 0, item.place}, barrier);
        sm90::tensor_load(b.dv().data, maps.dv, {0, item.token, 0, item.head}, barrier);
      },
      [&] {
        sm90::clear_rows(b.dO(), item.rows);
        sm90::clear_rows(b.dv(), item.rows);
      });
  if (item.rows < kRows) ++tails;
}

/// A slice of states, q, k and, last, gates, which in fp32 have room for one slice: they wait for
/// the end of the slice before.
WYVERN_DEVICE void load_slice(const Block& b, const Turn& turn, const Item& item, int slice,
                              const LoadMaps& maps) {
  constexpr int kGateBytes = kRows * kChannels * static_cast<int>(sizeof(G_DTYPE));
  constexpr int kGatePanels = kGateBytes / kRows / 128;
  const int stage = turn.keys().buffer;
  b.slices().wait_empty(turn.keys());
  if (lane_index() == 0) {
    sm90::Barrier* const full = b.slices().full(turn.keys());
    sm90::barrier_arrive_expect(full, 2 * SquareTile::kBytes);
    sm90::tensor_load(b.k(stage).data, maps.k, {0, item.token, slice, item.head}, full);
    sm90::tensor_load(b.q(stage).data, maps.q, {0, item.token, slice, item.head}, full);
  }
  b.states().wait_empty(turn.slice());
  if (lane_index() == 0) {
    sm90::Barrier* const full = b.states().full(turn.slice());
    sm90::barrier_arrive_expect(full, 2 * StateTile::kBytes);
    sm90::tensor_load(b.state().data, maps.states, {0, 0, slice, item.place}, full);
    sm90::tensor_load(b.dstate().data, maps.dstates, {0, 0, slice, item.place}, full);
  }
  b.given().wait_empty(turn.gates());
  if (lane_index() == 0) {
    sm90::Barrier* const full = b.given().full(turn.gates());
    sm90::barrier_arrive_expect(full, kGateBytes);
    sm90::tensor_load(b.gates(turn.gates().buffer).data, maps.g,
                      {0, item.token, slice * kGatePanels, item.head}, full);
  }
}

// ---- factors of rows ----------------------------------------------------------------------------

struct GivenRows {
  TokenRows<const BETA_DTYPE> beta, erase;
  const float* row_scales;
  const float *A_log, *dt_bias;
};

/// What beta's gradient is divided by; 1 where erase and write gates, one number an element,
/// replace it.
WYVERN_DEVICE float divisor(const TokenRows<const BETA_DTYPE>& beta, int64 token, int head) {
  if constexpr (ERASE_WRITE)
    return 1.0f;
  else
    return beta_divisor(activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta.row(token)[head]));
}

WYVERN_DEVICE void make_factors(const Block& b, const Turn& turn, const Item& item,
                                const GivenRows& given) {
  const int row = thread_index() % 128;
  const int stage = turn.factors().buffer;
  b.scales().wait_empty(turn.factors());
  if (row < kRows) {
    b.factors<kLayout.beta>(stage)[row] =
        row < item.rows ? divisor(given.beta, item.token + row, item.head) : 0.0f;
    if constexpr (kNorms) {
      const float* const from = given.row_scales + int64{item.place} * 2 * kRows;
      b.factors<kLayout.query_scale>(stage)[row] = from[row];
      b.factors<kLayout.key_scale>(stage)[row] = from[kRows + row];
    }
  }
  sm90::barrier_arrive(b.scales().full(turn.factors()));
}

// ---- operands -----------------------------------------------------------------------------------

/// The erase gate of a slice's 16 rows of a warp, a lane two channels; 0 behind a sequence's end.
WYVERN_DEVICE void load_erase(uint32 (&to)[16], const TokenRows<const BETA_DTYPE>& erase,
                              int rows) {
  if constexpr (!ERASE_WRITE) return;
  const int first = 16 * warp_index();
  const BETA_DTYPE* from = erase.row(first) + 2 * lane_index();
#pragma unroll
  for (int i = 0; i < 16; ++i, from += erase.stride)
    to[i] = first + i < rows ? *reinterpret_cast<const uint32*>(from) : 0;
}

/// Running sums of the gates of a warp's 16 rows and a lane's two channels, in base 2.
using GateSums = float[2][16];

WYVERN_DEVICE void sum_gates(const Block& b, const Turn& turn, const Item& item, GateForm form,
                             const Float2& dt_bias, GateSums& sum) {
  const int first = 16 * warp_index();
  const GateTile given = b.gates(turn.gates().buffer);
  form.floor = maximum(form.floor, kLeastGate * kLog2E);
  const Float2 bias{{form.bias(dt_bias.at[0]), form.bias(dt_bias.at[1])}};
  b.given().wait_full(turn.gates());
  float running[2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const auto raw = load<2>(given.at(first + i, 2 * lane_index()));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (first + i < item.rows) running[n] += form(to_float(raw.at[n]), bias.at[n]);
      sum[n][i] = running[n];
    }
  }
  sm90::hand_over(b.given().empty(turn.gates()));
}

/// Exchanges the four warps' sums of all their rows: returns that of the warps before this one. The
/// whole chunk's goes to shared memory, and whether any warp is steep.
WYVERN_DEVICE Float2 exchange_sums(const Block& b, const GateSums& sum) {
  const int warp = warp_index();
  const int channel = 2 * lane_index();
  *reinterpret_cast<Float2*>(b.array<kLayout.blocks>() + warp * kChannels +
                             channel) = {{sum[0][15], sum[1][15]}};
  if constexpr (kMayBeSteep) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n) most = maximum(most, maximum(-sum[n][7], sum[n][7] - sum[n][15]));
    most = max_warp(most);
    if (lane_index() == 0) b.array<kLayout.steepness>()[warp] = most;
  }
  sync_named(kOperandsName, 128);
  Float2 before{}, whole{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Float2 block = load<2>(b.array<kLayout.blocks>() + i * kChannels + channel);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (i == warp) before.at[n] = whole.at[n];
      whole.at[n] += block.at[n];
    }
  }
  if (warp == 0) *reinterpret_cast<Float2*>(b.array<kLayout.whole>() + channel) = whole;
  return before;
}

/// Where the rows of a slice are, and the scales of their norms.
struct SliceRows {
  SquareTile q, k;
  const float *query_scale, *key_scale;
};

/// Writes one row's operands, decayed by exp2(`decay`) from its anchor.
WYVERN_DEVICE void store_operands(const Block& b, const Item& item, const SliceRows& rows, int row,
                                  const Float2& decay, uint32 erase) {
  const int channel = 2 * lane_index();
  *reinterpret_cast<Float2*>(b.pair<kLayout.decay>(row, channel)) = decay;
  auto* const q_pair = reinterpret_cast<uint32*>(rows.q.at(row, channel));
  auto* const k_pair = reinterpret_cast<uint32*>(rows.k.at(row, channel));
  // Rows past the sequence's end are the next one's.
  if (row >= item.rows) *q_pair = *k_pair = 0;
  const Float2 of_q = sm90::unpack<DTYPE>(*q_pair);
  const Float2 of_k = sm90::unpack<DTYPE>(*k_pair);
  float to[2], from[2], of_query[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float grown = exp2_fast(decay.at[n]);
    const float key = of_k.at[n] * (kNorms ? rows.key_scale[row] : 1.0f);
    to[n] = key * exp2_fast(-decay.at[n]);
    from[n] = key * grown;
    if constexpr (ERASE_WRITE) from[n] *= sm90::unpack<DTYPE>(erase).at[n];
    of_query[n] = of_q.at[n] * (kNorms ? rows.query_scale[row] : 1.0f) * grown;
  }
  if constexpr (ERASE_WRITE) *reinterpret_cast<uint32*>(b.erase().at(row, channel)) = erase;
  *reinterpret_cast<uint32*>(b.k_to().at(row, channel)) = pack<DTYPE>(to[0], to[1]);
  *reinterpret_cast<uint32*>(b.k_from().at(row, channel)) = pack<DTYPE>(from[0], from[1]);
  *reinterpret_cast<uint32*>(b.q_from().at(row, channel)) = pack<DTYPE>(of_query[0], of_query[1]);
}

/// A slice's operands: a warp has 16 rows of them and a lane two channels; `erase` is the slice's.
WYVERN_DEVICE void make_operands(const Block& b, const Turn& turn, const Item& item, GateForm form,
                                 const Float2& dt_bias, const TokenRows<const BETA_DTYPE>& erase) {
  const int warp = warp_index();
  uint32 gates[16];
  load_erase(gates, erase, item.rows);
  GateSums sum;
  sum_gates(b, turn, item, form, dt_bias, sum);
  b.operands().wait_empty(turn.slice());
  const Float2 before = exchange_sums(b, sum);
  const bool steep = b.is_steep();
  if constexpr (ERASE_WRITE) sm90::barrier_wait(b.stored(), turn.slices % 2 ^ 1U);
  b.slices().wait_full(turn.keys());
  const int stage = turn.keys().buffer;
  const SliceRows rows{b.q(stage), b.k(stage),
                       b.factors<kLayout.query_scale>(turn.factors().buffer),
                       b.factors<kLayout.key_scale>(turn.factors().buffer)};
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    Float2 anchor;
#pragma unroll
    for (int n = 0; n < 2; ++n) anchor.at[n] = steep ? sum[n][4 * four + 1] : sum[n][7];
    *reinterpret_cast<Float2*>(b.array<kLayout.anchors>() + (4 * warp + four) * kChannels +
                               2 * lane_index()) = {
        {before.at[0] + anchor.at[0], before.at[1] + anchor.at[1]}};
#pragma unroll
    for (int i = 4 * four; i < 4 * four + 4; ++i)
      // The row is opaque, since the addresses of all rows at once would spill.
      store_operands(b, item, rows, sm90::opaque(16 * warp) + i,
                     {{sum[0][i] - anchor.at[0], sum[1][i] - anchor.at[1]}}, gates[i]);
  }
  sm90::hand_over(b.operands().full(turn.slice()));
}

/// Loads a slice while the one before is computed.
WYVERN_DEVICE void make_all_operands(const Block& b, Items items, const Extents& e,
                                     const GivenRows& given, const LoadMaps& maps) {
  const bool loads = sm90::uniform(warp_index()) == 0;
  Turn turn;
  Item item, next{};
  uint32 tails = 0;
  bool more = items.next_used(next);
  if (loads && more) {
    load_item(b, turn, next, tails, maps);
    load_slice(b, turn, next, 0, maps);
  }
#pragma unroll 1
  while (more) {
    item = next;
    const GateForm form(e, HAS_A_LOG ? given.A_log[item.head] : 0.0f);
    make_factors(b, turn, item, given);
#pragma unroll 1
    for (int slice = 0; slice < slice_count(); ++slice) {
      make_operands(b, turn, item, form, bias_of(given.dt_bias, item.head, slice),
                    given.erase.at(item.token, item.head * K + slice * kChannels));
      ++turn.slices;
      if (slice + 1 < kSlices) {
        if (loads) load_slice(b, turn, item, slice + 1, maps);
        continue;
      }
      ++turn.items;
      more = items.next_used(next);
      if (!loads || !more) continue;
      load_item(b, turn, next, tails, maps);
      load_slice(b, turn, next, 0, maps);
    }
  }
}
