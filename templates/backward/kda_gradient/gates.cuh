// Warpgroup 3 of kda_gradient.hopper: from dG to the gradients of gates as they were given and of
// their parameters, <S, dS'> of each channel, and the gradient of beta.
#pragma once

#include "backward/kda_gradient/block.cuh"
#include "device/cuda/backward.cuh"

constexpr int kGatesName = 4;  ///< of the warpgroup's named barrier

WYVERN_DEVICE void sync_gates() { sync_named(kGatesName, 128); }

/// What each warp of the warpgroup has in `parts`, of this lane's two channels.
WYVERN_DEVICE Float2 sum_parts(const float* parts) {
  Float2 sum{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Float2 part = load<2>(parts + i * kChannels + 2 * lane_index());
#pragma unroll
    for (int n = 0; n < 2; ++n) sum.at[n] += part.at[n];
  }
  return sum;
}

/// <S, dS'> of this lane's two channels of a slice.
WYVERN_DEVICE Float2 multiply_states(const Block& b, const Turn& turn) {
  const int thread = thread_index() % 128;
  const int channel = thread % 8 * 8;
  float sum[8] = {};
  b.states().wait_full(turn.slice());
#pragma unroll 2
  for (int row = thread / 8; row < V; row += 16) {
    const auto left = load<4>(reinterpret_cast<const uint32*>(b.state().at(row, channel)));
    const auto right = load<4>(reinterpret_cast<const uint32*>(b.dstate().at(row, channel)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Float2 x = sm90::unpack<DTYPE>(left.at[i]);
      const Float2 y = sm90::unpack<DTYPE>(right.at[i]);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        sum[2 * i + n] = fused_multiply_add(x.at[n], y.at[n], sum[2 * i + n]);
    }
  }
  sm90::hand_over(b.states().empty(turn.slice()));
  float* const parts = b.array<kLayout.through>();
  const int first = sum_lanes<16, 8>(sum);
  *reinterpret_cast<Float2*>(parts + warp_index() % 4 * kChannels + channel +
                             first) = {{sum[0], sum[1]}};
  sync_gates();
  return sum_parts(parts);
}

/// Where gradients go, and the gate's inputs as they were given.
struct GateGradients {
  TokenRows<const BETA_DTYPE> beta;
  const float *A_log, *dt_bias;
  BETA_DTYPE* dbeta;
  G_DTYPE* dg;
  float *dA, *dbias;
};

/// Which of this lane's gates of a slice count as the floor, a bit each, two a row: all that is
/// needed of gates that are given as they count, so that the next slice's can be loaded.
WYVERN_DEVICE uint32 floored_gates(const Block& b, const Turn& turn, const Extents& e) {
  if constexpr (GATE_IN_KERNEL) return 0;
  const GateTile given = b.gates(turn.gates().buffer);
  const int first = 16 * (warp_index() % 4);
  uint32 floored = 0;
  b.given().wait_full(turn.gates());
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const auto raw = load<2>(given.at(first + i, 2 * lane_index()));
#pragma unroll
    for (int n = 0; n < 2; ++n)
      floored |= to_float(raw.at[n]) < 0.9999f * e.gate_floor ? 1U << (2 * i + n) : 0;
  }
  sm90::hand_over(b.given().empty(turn.gates()));
  return floored;
}

/// Gradients of a slice's gates, a lane two channels of its warp's 16 rows; dG reaches from a row
/// to the chunk's end, where `end` is added. Returns this thread's part of the gradient of A_log.
WYVERN_DEVICE float store_slice(const Block& b, const Turn& turn, const Item& item, int slice,
                                const Extents& e, Float2 end, uint32 floored,
                                const GateGradients& to) {
  const int warp = sm90::uniform(warp_index()) % 4;
  const int first = 16 * warp;
  const int channel = 2 * lane_index();
  sm90::barrier_wait(b.summed(), turn.slices % 2);
  // Sums up to the warp's last row stay where dG was.
  Float2 running{};
#pragma unroll 8
  for (int i = 15; i >= 0; --i) {
    auto* const at = reinterpret_cast<Float2*>(b.pair<kLayout.dG>(first + i, channel));
    const Float2 dG = *at;
#pragma unroll
    for (int n = 0; n < 2; ++n) running.at[n] += dG.at[n];
    *at = running;
  }
  float* const sums = b.array<kLayout.sums>();
  *reinterpret_cast<Float2*>(sums + warp * kChannels + channel) = running;
  const Float2 of_keys = sum_parts(b.array<kLayout.ends>() + turn.slices % 2 * 4 * kChannels);
  sync_gates();
#pragma unroll
  for (int n = 0; n < 2; ++n) end.at[n] += of_keys.at[n];
#pragma unroll
  for (int i = 3; i > 0; --i) {
    const Float2 later = load<2>(sums + i * kChannels + channel);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (i > warp) end.at[n] += later.at[n];
  }
  if constexpr (GATE_IN_KERNEL) b.given().wait_full(turn.gates());
  const GateTile given = b.gates(turn.gates().buffer);
  const int64 place = (int64{item.token} * e.HV + item.head) * K + slice * kChannels + channel;
  const Float2 bias = bias_of(to.dt_bias, item.head, slice);
  const float rate = HAS_A_LOG ? gate_rate<LOWER_BOUND>(to.A_log[item.head]) : 1.0f;
  float rate_part = 0.0f;
  Float2 bias_part{};
#pragma unroll 4
  for (int row = first; row < smaller(first + 16, item.rows); ++row) {
    Vector<G_DTYPE, 2> raw;
    if constexpr (GATE_IN_KERNEL) raw = load<2>(given.at(row, channel));
    const Float2 sum = load<2>(b.pair<kLayout.dG>(row, channel));
    Vector<G_DTYPE, 2> dg;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float gradient = sum.at[n] + end.at[n];
      if constexpr (GATE_IN_KERNEL) {
        const float x = to_float(raw.at[n]) + bias.at[n];
        const GateSlopes slopes = gate_slopes<LOWER_BOUND>(x, rate, e.lower_bound);
        if (!LOWER_BOUND && slopes.by_A_log < 0.9999f * e.gate_floor) gradient = 0.0f;
        rate_part = fused_multiply_add(gradient, slopes.by_A_log, rate_part);
        gradient *= slopes.by_x;
        bias_part.at[n] += gradient;
      } else if ((floored >> (2 * (row - first) + n) & 1U) != 0) {
        gradient = 0.0f;
      }
      dg.at[n] = from_float<G_DTYPE>(gradient);
    }
    store_vector(to.dg + place + int64{row} * e.HV * K, dg);
  }
  sm90::barrier_arrive(b.dots().empty(turn.slice()));
  if constexpr (GATE_IN_KERNEL) sm90::hand_over(b.given().empty(turn.gates()));
  if constexpr (HAS_DT_BIAS) {
    float* const parts = b.array<kLayout.biases>();
    *reinterpret_cast<Float2*>(parts + warp * kChannels + channel) = bias_part;
    sync_gates();
    if (warp == 0)
      store_vector(to.dbias + int64{item.place} * K + slice * kChannels + channel,
                   sum_parts(parts));
  }
  return rate_part;
}

/// Slots that no chunk uses add nothing to the gate's parameters.
WYVERN_DEVICE void clear_unused_parts(Items items, const GateGradients& to) {
  Item item;
#pragma unroll 1
  while (items.next(item)) {
    if (item.rows > 0) continue;
    const int64 place = item.place;
    const int thread = thread_index() % 128;
    if (HAS_A_LOG && thread == 0) to.dA[place] = 0.0f;
    if (HAS_DT_BIAS && thread < K) to.dbias[place * K + thread] = 0.0f;
  }
}

/// With ERASE_WRITE: values, what they are written with, and where gradients of all gates go.
struct ElementGradients {
  TokenRows<const DTYPE> v;
  TokenRows<const BETA_DTYPE> write;
  DTYPE* dv;
  BETA_DTYPE *dwrite, *derase;
};

/// dv = write dwritten and dwrite = v dwritten of an item's rows, a slice's share of them: loads of
/// kAtOnce pieces of eight columns are under way at a time.
WYVERN_DEVICE void store_values(const Block& b, const Turn& turn, const Item& item, int slice,
                                const Extents& e, const ElementGradients& to) {
  constexpr int kPieces = V / 8;
  constexpr int kOwn = kRows / kSlices * kPieces / 128;  ///< of a thread
  constexpr int kAtOnce = smaller(kOwn, 2);
  const int thread = sm90::opaque(thread_index() % 128);
  const int col = thread % kPieces * 8;
  const int first = slice * (kRows / kSlices) + thread / kPieces;
  b.rows().wait_full(turn.item());
#pragma unroll 1
  for (int i = 0; i < kOwn; i += kAtOnce) {
    const auto row_of = [&](int j) { return first + (i + j) * (128 / kPieces); };
    Vector<uint32, 4> v[kAtOnce] = {}, write[kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (row_of(j) >= item.rows) continue;
      const int64 token = item.token + row_of(j);
      v[j] = load<4>(reinterpret_cast<const uint32*>(to.v.row(token) + item.head * V + col));
      write[j] =
          load<4>(reinterpret_cast<const uint32*>(to.write.row(token) + item.head * V + col));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (row_of(j) >= item.rows) continue;
      const auto dwritten = load<4>(reinterpret_cast<const uint32*>(b.dv().at(row_of(j), col)));
      uint32 dv[4], dwrite[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const Float2 x = sm90::unpack<DTYPE>(dwritten.at[n]);
        const Float2 of_v = sm90::unpack<DTYPE>(v[j].at[n]);
        const Float2 gate = sm90::unpack<DTYPE>(write[j].at[n]);
        dv[n] = pack<DTYPE>(x.at[0] * gate.at[0], x.at[1] * gate.at[1]);
        dwrite[n] = pack<DTYPE>(x.at[0] * of_v.at[0], x.at[1] * of_v.at[1]);
      }
      const int64 at = (int64{item.token + row_of(j)} * e.HV + item.head) * V + col;
      store_words(to.dv + at, dv);
      store_words(to.dwrite + at, dwrite);
    }
  }
  if (slice + 1 == kSlices) sm90::hand_over(b.rows().empty(turn.item()));
}

/// A slice of derase, when warpgroup 2 has left it.
WYVERN_DEVICE void store_erase(const Block& b, const Turn& turn, const Item& item, int slice,
                               const Extents& e, BETA_DTYPE* derase) {
  const int thread = sm90::opaque(thread_index() % 128);
  const int column = thread % 8 * 8;
  sm90::barrier_wait(b.summed(), turn.slices % 2);
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    const int row = thread / 8 + 16 * i;
    if (row >= item.rows) continue;
    const int64 at = (int64{item.token + row} * e.HV + item.head) * K + slice * kChannels + column;
    store_words(derase + at, *reinterpret_cast<const uint32(*)[4]>(b.erase().at(row, column)));
  }
  sm90::barrier_arrive(b.stored());
}

WYVERN_DEVICE void end_gates(const Block& b, Items items, const Extents& e, const GateGradients& to,
                             const ElementGradients& elements) {
  if (VARLEN && (HAS_A_LOG || HAS_DT_BIAS)) clear_unused_parts(items, to);
  const int row = thread_index() % 128;
  Turn turn;
  Item item;
#pragma unroll 1
  for (; items.next_used(item); ++turn.items) {
    float rate_part = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < slice_count(); ++slice, ++turn.slices) {
      const uint32 floored = floored_gates(b, turn, e);
      Float2 through = multiply_states(b, turn);
      if constexpr (ERASE_WRITE) store_values(b, turn, item, slice, e, elements);
      b.operands().wait_full(turn.slice());
      const Float2 whole = load<2>(b.array<kLayout.whole>() + 2 * lane_index());
      sm90::barrier_arrive(b.operands().empty(turn.slice()));
#pragma unroll
      for (int n = 0; n < 2; ++n) through.at[n] *= exp2_fast(whole.at[n]);
      if constexpr (ERASE_WRITE) store_erase(b, turn, item, slice, e, elements.derase);
      rate_part += store_slice(b, turn, item, slice, e, through, floored, to);
    }
    b.scales().wait_full(turn.factors());
    if (!ERASE_WRITE && row < item.rows) {
      const float value = b.array<kLayout.values>()[turn.items % 2 * kRows + row];
      const float slope =
          gradient::beta_slope<BETA_SIGMOID, NEG_EIGVAL>(to.beta.row(item.token + row)[item.head]);
      to.dbeta[int64{item.token + row} * e.HV + item.head] = from_float<BETA_DTYPE>(
          slope * value / b.factors<kLayout.beta>(turn.factors().buffer)[row]);
    }
    sm90::barrier_arrive(b.scales().empty(turn.factors()));
    if constexpr (HAS_A_LOG) {
      float* const parts = b.array<kLayout.rates>();
      const float part = sum_warp(rate_part);
      sync_gates();
      if (lane_index() == 0) parts[warp_index() % 4] = part;
      sync_gates();
      if (row == 0) to.dA[item.place] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
  }
}
