// The gate and its running sum.
#pragma once

#include "device/cuda/chunk.cuh"

namespace wyvern::cuda {

/// exp(A_log), finite, so that times 0 it is 0: a bounded gate's input counts as 0 below 1e-28
/// then, and dt_bias may be large.
template <bool Bounded>
WYVERN_DEVICE float gate_rate(float A_log) {
  constexpr float kMost = Bounded ? 0x1p100f : 0x1p127f;
  const float rate = exponential(A_log);
  return rate < kMost ? rate : kMost;
}

/// -exp(A_log) * softplus(x), the log decay of the gated delta rule; x includes dt_bias.
WYVERN_DEVICE float log_decay(float x, float A_log) {
  const float softplus = x > 20.0f ? x : log_one_plus(exponential(x));
  return -gate_rate<false>(A_log) * softplus;
}

/// How a block of Threads covers one chunk of Size rows and a group of heads: lanes along the
/// heads, and equal segments of rows.
template <int Threads, int Size, int Heads>
struct CumsumShape {
  static constexpr int kLanes = smaller(power_of_two(Heads), 32);
  static constexpr int kGroups = ceil_div(Heads, kLanes);
  static constexpr int kSegments = smaller(Threads / kLanes, Size);
  static constexpr int kRows = Size / kSegments;
};

/// A sum and what its roundings lost (two-sum: Knuth, TAOCP 2, 4.2.2).
struct ExactSum {
  float sum = 0.0f, lost = 0.0f;

  WYVERN_DEVICE void add(float x) {
    const float total = sum + x;
    const float taken = total - sum;
    lost += (sum - (total - taken)) + (x - taken);
    sum = total;
  }
  WYVERN_DEVICE float value() const { return sum + lost; }
};

/// G(r) = sum over i <= r of load(i, head), for the block's chunk and group of heads. `totals` is
/// shared memory for two floats of each thread. G may be some hundred, and what its roundings lose
/// there is an error of decays, which are differences of it.
template <int Threads, int Size, int Heads, class Load>
WYVERN_DEVICE void chunk_cumsum(float* totals, const Chunk& chunk, int group, float* G,
                                Load&& load) {
  using Shape = CumsumShape<Threads, Size, Heads>;
  const int lane = thread_index() % Shape::kLanes;
  const int segment = thread_index() / Shape::kLanes;
  const int head = group * Shape::kLanes + lane;
  const bool active = head < Heads && segment < Shape::kSegments;
  const int first = segment * Shape::kRows;
  float term[Shape::kRows];
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
    term[i] = active && first + i < chunk.rows ? load(first + i, head) : 0.0f;
  ExactSum total;
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) total.add(term[i]);
  totals[thread_index()] = total.sum;
  totals[thread_index() + Threads] = total.lost;
  sync_block();
  ExactSum running;
  for (int i = lane; i < segment * Shape::kLanes; i += Shape::kLanes)
    running.add(totals[i]), running.add(totals[i + Threads]);
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    running.add(term[i]);
    if (active && first + i < chunk.rows)
      G[(chunk.token + first + i) * Heads + head] = running.value();
  }
}

WYVERN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/// The log decay of a gate's raw input x, which includes dt_bias, with rate = exp(A_log), or 1
/// without A_log: -rate softplus(x), or lower_bound sigmoid(rate x) where `Bounded`.
template <bool Bounded>
WYVERN_DEVICE float log_decay(float x, float rate, float lower_bound) {
  if constexpr (Bounded) return lower_bound * sigmoid(rate * x);
  return -rate * (x > 20.0f ? x : log_one_plus(exponential(x)));
}

/// The derivatives of log_decay. They are finite: where a decay erases all, its gradient is 0 times
/// them.
struct GateSlopes {
  float by_x, by_A_log;
};
template <bool Bounded>
WYVERN_DEVICE GateSlopes gate_slopes(float x, float rate, float lower_bound) {
  if constexpr (Bounded) {
    // sigmoid(z) (1 - sigmoid(z)), the same for z and -z
    const float z = rate * x;
    const float small = exponential(z < 0.0f ? z : -z);
    const float slope = lower_bound * rate * (small / ((1.0f + small) * (1.0f + small)));
    return {slope, slope * x};
  } else {
    return {-rate * sigmoid(x), maximum(log_decay<false>(x, rate, lower_bound), -0x1.fffffep127f)};
  }
}

}  // namespace wyvern::cuda
