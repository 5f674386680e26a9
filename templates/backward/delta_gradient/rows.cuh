// Warps 1 to 3 of delta_gradient: factors of rows, the states' inner product, and the gradients of
// beta and of the gate.
#pragma once

#include "backward/delta_gradient/block.cuh"
#include "device/cuda/backward.cuh"
#include "device/cuda/gate.cuh"

// ---- factors of rows ----------------------------------------------------------------------------

constexpr int kFactorWarp = 1, kGradientWarp = 2, kSpareWarp = 3;
constexpr int kWarpsName = 3;  ///< of a named barrier

/// A gate's raw input, of one head.
struct GateForm {
  float bias, rate;

  WYVERN_DEVICE float log_decay_of(G_DTYPE raw) const {
    if constexpr (!GATE_IN_KERNEL) return to_float(raw);
    return log_decay<false>(to_float(raw) + bias, rate, 0.0f);
  }
  WYVERN_DEVICE GateSlopes slopes_of(G_DTYPE raw) const {
    return gate_slopes<false>(to_float(raw) + bias, rate, 0.0f);
  }
};

/// Inputs of rows and value heads.
struct GivenRows {
  TokenRows<const G_DTYPE> g;
  TokenRows<const BETA_DTYPE> beta;
  const float* row_scales;
  const float *A_log, *dt_bias;
  float floor;
};

/// Raw inputs of rows `lane` and `lane` + 32 of a chunk and value head, past its end zeros. Loaded
/// one head ahead of their use.
struct RawRows {
  G_DTYPE g[2];
  BETA_DTYPE beta[2];
  float query_scale[2], key_scale[2];
  float A_log, bias;

  WYVERN_DEVICE void read(const Item& item, int head, const GivenRows& given) {
    const float* const scales =
        given.row_scales + (int64{item.place} * GROUP + head % GROUP) * 2 * kRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 32 * i + lane_index();
      if constexpr (kNorms) {
        query_scale[i] = scales[row];
        key_scale[i] = scales[kRows + row];
      }
      g[i] = {};
      beta[i] = {};
      if (row >= item.rows) continue;
      if constexpr (SCALAR_GATE) g[i] = given.g.row(item.token + row)[head];
      beta[i] = given.beta.row(item.token + row)[head];
    }
    A_log = bias = 0.0f;
    if constexpr (HAS_A_LOG) A_log = given.A_log[head];
    if constexpr (HAS_DT_BIAS) bias = given.dt_bias[head];
  }
  WYVERN_DEVICE GateForm form() const {
    return {bias, GATE_IN_KERNEL ? gate_rate<false>(A_log) : 1.0f};
  }
};

WYVERN_DEVICE float divisor(BETA_DTYPE raw) {
  return beta_divisor(activate_beta<BETA_SIGMOID, NEG_EIGVAL>(raw));
}

WYVERN_DEVICE void make_factors(const Block& b, const Turn& turn, const Item& item,
                                const RawRows& raw, const GateForm& form, float floor) {
  float log_decays[2] = {};
  float column[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 32 * n + lane_index();
    const bool used = row < item.rows;
    if (SCALAR_GATE && used) log_decays[n] = maximum(form.log_decay_of(raw.g[n]), floor);
    const float rate = kKept ? 1.0f : divisor(raw.beta[n]);
    column[n] = used ? rate : 0.0f;
    if constexpr (kNorms) column[n] *= raw.key_scale[n];
  }
  const sm90::DecaySums sums(log_decays);
  const int stage = turn.factors().buffer;
  b.scales().wait_empty(turn.factors());
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 32 * n + lane_index();
    b.factors<kLayout.G>(stage)[row] = sums.row[n];
    b.factors<kLayout.entering>(stage)[row] = exp2_fast(sums.row[n]);
    b.factors<kLayout.leaving>(stage)[row] = exp2_fast(sums.last - sums.row[n]) * column[n];
    b.factors<kLayout.column>(stage)[row] = column[n];
    if constexpr (kNorms) {
      b.factors<kLayout.query_scale>(stage)[row] = raw.query_scale[n];
      b.factors<kLayout.key_scale>(stage)[row] = raw.key_scale[n];
    }
  }
  sums.store_anchored(b.factors<kLayout.anchored>(stage), column);
  sm90::barrier_arrive(b.scales().full(turn.factors()));
}

// ---- gradients of beta and of the gate ----------------------------------------------------------

/// sum += x . y, of four pairs each.
WYVERN_DEVICE void add_products(float (&sum)[2], const uint32* x, const uint32* y) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Float2 u = sm90::unpack<DTYPE>(x[j]);
    const Float2 v = sm90::unpack<DTYPE>(y[j]);
#pragma unroll
    for (int n = 0; n < 2; ++n) sum[n] = fused_multiply_add(u.at[n], v.at[n], sum[n]);
  }
}

/// This thread's part of <S, dS'> of two parts of slices: both are read in the same order, or with
/// K first in S its squares of 16 transposed.
WYVERN_DEVICE void add_products(float (&sum)[2], const StateTile& state, const DStateTile& dstate,
                                int warp) {
  if constexpr (kKept) {
    constexpr int kSquares = kPartRows / 16 * (kChannels / 16);
    const int lane = lane_index();
#pragma unroll 2
    for (int i = warp - 1; i < kSquares; i += 3) {
      const int value = i / (kChannels / 16) * 16, channel = i % (kChannels / 16) * 16;
      uint32 x[4], y[4];
      load_matrix_x4_transposed(
          x, state.at(channel + lane / 16 * 8 + lane % 8, value + lane / 8 % 2 * 8));
      load_matrix_x4(y, dstate.at(value + lane % 16, channel + lane / 16 * 8));
      add_products(sum, x, y);
    }
  } else {
    constexpr int kPieces = StateTile::kBytes / 16;
    const auto* const x = reinterpret_cast<const uint32*>(state.data);
    const auto* const y = reinterpret_cast<const uint32*>(dstate.data);
#pragma unroll 4
    for (int i = thread_index() - 32; i < kPieces; i += 96) {
      const auto left = load<4>(x + 4 * i);
      const auto right = load<4>(y + 4 * i);
      add_products(sum, left.at, right.at);
    }
  }
}

/// <S, dS'> by three warps as parts arrive; the whole sum in each of them.
WYVERN_DEVICE float multiply_states(const Block& b, const Turn& turn, int warp) {
  float sum[2] = {};
#pragma unroll 1
  for (int part = 0; part < kSlices * kParts; ++part) {
    const auto at = turn.part(0, part);
    b.states().wait_full(at);
    add_products(sum, b.state(at.buffer), b.dstate(at.buffer), warp);
    sm90::hand_over(b.states().empty(at));
  }
  // Two stages: one has been read when the other's sums are complete.
  float* const parts = b.array<kLayout.state_dots>() + 4 * turn.factors().buffer;
  const float own = sum_warp(sum[0] + sum[1]);
  if (lane_index() == 0) parts[warp] = own;
  sync_named(kWarpsName, 96);
  return parts[kFactorWarp] + parts[kGradientWarp] + parts[kSpareWarp];
}

/// Where gradients of rows go, and parts of the gate's parameters.
struct RowGradients {
  BETA_DTYPE* dbeta;
  G_DTYPE* dg;
  float *dA, *dbias;
  int heads;  ///< value heads

  WYVERN_DEVICE void store_parts(int slot, int head, float A_log, float bias) const {
    if (lane_index() > 0) return;
    if constexpr (HAS_A_LOG) dA[int64{slot} * heads + head] = A_log;
    if constexpr (HAS_DT_BIAS) dbias[int64{slot} * heads + head] = bias;
  }
};

/// Of rows `lane` and `lane` + 32: the diagonal of dV Z^T, and dG but for the end's terms.
struct RowSums {
  float values[2] = {}, dots[2] = {};
  float end = 0.0f;  ///< the chunk's

  WYVERN_DEVICE RowSums operator+(const RowSums& x) const {
    return {{values[0] + x.values[0], values[1] + x.values[1]},
            {dots[0] + x.dots[0], dots[1] + x.dots[1]},
            end + x.end};
  }
};

/// A band's sums. `through` is <S, dS'>.
WYVERN_DEVICE RowSums take_sums(const Block& b, const Turn& turn, float through) {
  RowSums sums;
  b.sums().wait_full(turn.only());
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 32 * n + lane_index();
    sums.values[n] = b.array<kLayout.values>()[row];
    if constexpr (SCALAR_GATE)
      sums.dots[n] = b.array<kLayout.query_dots>()[row] + b.array<kLayout.key_dots>()[row];
  }
  if constexpr (SCALAR_GATE) {
    sums.end = through * b.factors<kLayout.entering>(turn.factors().buffer)[kRows - 1];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.end += b.array<kLayout.end_dots>()[i];
  }
  sm90::barrier_arrive(b.sums().empty(turn.only()));
  sm90::barrier_arrive(b.scales().empty(turn.factors()));
  return sums;
}

/// From the sums of a value head's rows to the gradients of beta and of the gate.
WYVERN_DEVICE void store_row_gradients(const Item& item, int head, const RawRows& raw,
                                       const GateForm& form, float floor, const RowSums& sums,
                                       const RowGradients& to) {
  // Sums of dG from the rows to the chunk's last, which has the end's terms.
  float after[2] = {};
  if constexpr (SCALAR_GATE) {
    const float up_to[2] = {sm90::running_sum(sums.dots[0]), sm90::running_sum(sums.dots[1])};
    const float all[2] = {shuffle(up_to[0], 31), shuffle(up_to[1], 31)};
    after[1] = sums.end + (all[1] - up_to[1]) + sums.dots[1];
    after[0] = sums.end + all[1] + (all[0] - up_to[0]) + sums.dots[0];
  }
  float A_part = 0.0f;
  float bias_part = 0.0f;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = 32 * n + lane_index();
    if (row >= item.rows) continue;
    const int64 place = int64{item.token + row} * to.heads + head;
    const float slope = gradient::beta_slope<BETA_SIGMOID, NEG_EIGVAL>(raw.beta[n]);
    const float rate = divisor(raw.beta[n]);
    to.dbeta[place] = from_float<BETA_DTYPE>(slope * sums.values[n] / (kKept ? rate * rate : rate));
    if constexpr (SCALAR_GATE) {
      float dg = form.log_decay_of(raw.g[n]) < 0.9999f * floor ? 0.0f : after[n];
      if constexpr (GATE_IN_KERNEL) {
        const GateSlopes slopes = form.slopes_of(raw.g[n]);
        A_part += dg * slopes.by_A_log;
        dg *= slopes.by_x;
        bias_part += dg;
      }
      to.dg[place] = from_float<G_DTYPE>(dg);
    }
  }
  if constexpr (GATE_IN_KERNEL)
    to.store_parts(item.slot, head, sum_warp(A_part), sum_warp(bias_part));
}

/// Slots that no chunk uses add nothing to the gate's parameters.
WYVERN_DEVICE void clear_unused_parts(Items items, const RowGradients& to) {
  Item item;
#pragma unroll 1
  while (items.next(item))
    for (int n = 0; item.rows == 0 && n < GROUP; ++n)
      to.store_parts(item.slot, item.head * GROUP + n, 0.0f, 0.0f);
}

/// Warps 1 to 3. Each reads the rows of a band's value head one band ahead.
WYVERN_DEVICE void work_on_rows(const Block& b, Items items, const GivenRows& given,
                                const RowGradients& to) {
  const int warp = sm90::uniform(warp_index());
  if (VARLEN && GATE_IN_KERNEL && warp == kSpareWarp) clear_unused_parts(items, to);
  Turn turn;
  Item item, following{};
  RawRows raw, next{};
  RowSums sums;
  bool more = items.next_used(following);
  if (more) next.read(following, following.head * GROUP, given);
#pragma unroll 1
  for (; more; ++turn.items) {
    item = following;
#pragma unroll 1
    for (int n = 0; n < kTurns; ++n, ++turn.bands) {
      const int head = item.head * GROUP + n / kBands, band = n % kBands;
      const bool is_last = n + 1 == kTurns;
      raw = next;
      if (is_last) more = items.next_used(following);
      if (more)
        next.read(following, is_last ? following.head * GROUP : head + (band + 1) / kBands, given);
      const GateForm form = raw.form();
      if (warp == kFactorWarp) make_factors(b, turn, item, raw, form, given.floor);
      float through = 0.0f;
      if constexpr (SCALAR_GATE) through = multiply_states(b, turn, warp);
      if (warp != kGradientWarp) continue;
      const RowSums own = take_sums(b, turn, through);
      sums = band == 0 ? own : sums + own;
      if (band + 1 == kBands) store_row_gradients(item, head, raw, form, given.floor, sums, to);
    }
  }
}
