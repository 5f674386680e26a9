// Gradients of rows of q, k and v that were convolved, and of the weights by parts of the tokens. A
// block has a part and some channels of it, a warp some of its tokens, a lane a few channels: it
// keeps the last CONV_WIDTH rows in registers, makes each convolved row again for its slope, and
// writes the gradient of a row once it has those of all rows made of it. Behind its own rows it
// takes CONV_WIDTH - 1 more. Rows are loaded kAhead before they are needed, so that enough bytes
// are under way. The blocks behind those have sequences without tokens.
#include "device/conv_rows.hpp"
#include "device/cuda/conv_taps.cuh"
#include "layer/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kVector =
    smaller(short_conv_bwd::kMostVector, smaller(vector_bytes<DTYPE>(K), vector_bytes<DTYPE>(V)) /
                                             static_cast<int>(sizeof(DTYPE)));
constexpr int kAhead = 4;  // and rows in registers, so that an unrolled loop moves none of them
constexpr int kBefore = CONV_WIDTH - 1;
constexpr int kRows = kConvPartTokens / num_warps;
constexpr short_conv_bwd::SharedLayout kLayout{Spec{}};
static_assert(CONV_WIDTH <= kAhead);
static_assert(kRows * num_warps == kConvPartTokens);
using Part = Vector<DTYPE, kVector>;
using Taps = ConvTaps<Spec, kVector>;

/// The gradients of a lane's weights and biases.
struct Sums {
  float weight[kVector * CONV_WIDTH];
  float bias[kVector];
};

/// Gradients of a row's elements behind the convolution, from those of the convolved row.
WYVERN_DEVICE void through_activation(const Taps& taps, const float (&rows)[kAhead][kVector],
                                      int now, const Part& dy, float (&dc)[kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    dc[j] = to_float(dy.at[j]);
    if constexpr (CONV_SILU) {
      const float c = taps.convolved(rows, now, j), gate = conv_gate(c);
      dc[j] *= gate * fused_multiply_add(c, 1.0f - gate, 1.0f);
    }
  }
}

/// Adds what row `now` gives to the gradients of its weights.
WYVERN_DEVICE void add_row(const float (&rows)[kAhead][kVector], const float (&dc)[kAhead][kVector],
                           int now, Sums& sums) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
#pragma unroll
    for (int i = 0; i < CONV_WIDTH; ++i) {
      float& sum = sums.weight[j * CONV_WIDTH + i];
      sum = fused_multiply_add(dc[now][j], rows[(now - kBefore + i + kAhead) % kAhead][j], sum);
    }
    if constexpr (HAS_CONV_BIAS) sums.bias[j] += dc[now][j];
  }
}

/// The gradients of the row kBefore rows before row `now`.
WYVERN_DEVICE void of_first_row(const Taps& taps, const float (&dc)[kAhead][kVector], int now,
                                float (&dx)[kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    dx[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < CONV_WIDTH; ++i)
      dx[j] = fused_multiply_add(taps.weight[j * CONV_WIDTH + i],
                                 dc[(now - i + kAhead) % kAhead][j], dx[j]);
  }
}

WYVERN_KERNEL(kThreads, short_conv_bwd::resident_warps(Spec{}) / num_warps) {
  const Sequences<Spec, SEQLENS_DTYPE> sequences{cu_seqlens, e.T, e.N};
  const int64 keys = int64{e.H} * K, values = int64{e.HV} * V;
  const int64 channels = keys + STEPS * (keys + values);
  const int64 groups = (channels / kVector + 31) / 32;
  const int64 row_blocks = e.TP * groups;
  if (CONV_INITIAL && block_index() >= row_blocks) {
    const int64 i = (block_index() - row_blocks) * kThreads + thread_index();
    const int64 n = i / channels;
    if (n >= e.N || sequences.begin(n) != sequences.begin(n + 1)) return;
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
      DTYPE x = {};
      if constexpr (CONV_FINAL) x = dfinal_conv_state[i * kBefore + j];
      dinitial_conv_state[i * kBefore + j] = x;
    }
    return;
  }
  const int64 part = block_index() / groups, group = block_index() - part * groups;
  const int64 channel = (group * 32 + lane_index()) * kVector;
  Sums sums = {};
  if (channel < channels) {
    const auto rows =
        rows_of_channel<Spec>(channel,
                              ConvTensors<const DTYPE, const DTYPE>{
                                  q, k, v, q_stride, k_stride, v_stride, dq_conv, dk_conv, dv_conv,
                                  dq_conv_stride, dk_conv_stride, dv_conv_stride},
                              e);
    const auto to =
        rows_of_channel<Spec>(channel,
                              ConvTensors<DTYPE, const DTYPE>{
                                  dq, dk, dv, dq_stride, dk_stride, dv_stride, dq_conv, dk_conv,
                                  dv_conv, dq_conv_stride, dk_conv_stride, dv_conv_stride},
                              e);
    Taps taps = {};
    taps.load_from(conv_weight, conv_bias, channel);
    const int64 tokens = e.B * e.T, first = part * kConvPartTokens + warp_index() * kRows;
    const int last = static_cast<int>(first + kRows < tokens ? first + kRows : tokens);
    int token = static_cast<int>(first);
#pragma unroll 1
    while (token < last) {
      const int64 n = sequences.of(token);
      const int begin = static_cast<int>(sequences.begin(n));
      const int behind = static_cast<int>(sequences.begin(n + 1));
      const int own = (behind < last ? behind : last) - token;
      // Rows that there are of those from `token` on.
      const int there = own + kBefore < behind - token ? own + kBefore : behind - token;
      const int64 window = (n * channels + channel) * kBefore;
      // Slot i of a ring has the rows i, i + kAhead, ... from `token` on.
      float ring[kAhead][kVector], dc[kAhead][kVector] = {};
#pragma unroll
      for (int j = 0; j < kBefore; ++j) {
        float(&x)[kVector] = ring[kAhead - kBefore + j];
        const int row = token - kBefore + j;
        if (row >= begin) {
          load_floats<kVector>(rows.given + row * rows.stride, x);
        } else {
#pragma unroll
          for (int c = 0; c < kVector; ++c) {
            x[c] = 0.0f;
            if constexpr (CONV_INITIAL)
              x[c] = to_float(
                  initial_conv_state[window + c * kBefore + window_column<Spec>(row, begin)]);
          }
        }
      }
      const DTYPE* from = rows.given + token * rows.stride;
      const DTYPE* from_dy = rows.convolved + token * rows.convolved_stride;
      DTYPE* to_dx = to.given + (token - kBefore) * to.stride;
      Part x[kAhead] = {}, dy[kAhead] = {};
#pragma unroll
      for (int r = 0; r < kAhead; ++r, from += rows.stride, from_dy += rows.convolved_stride)
        if (r < there) x[r] = load<kVector>(from), dy[r] = load<kVector>(from_dy);
#pragma unroll 1
      for (int start = 0; start < own + kBefore; start += kAhead)
#pragma unroll
        for (int r = 0; r < kAhead;
             ++r, from += rows.stride, from_dy += rows.convolved_stride, to_dx += to.stride) {
          const int step = start + r;
#pragma unroll
          for (int c = 0; c < kVector; ++c) ring[r][c] = to_float(x[r].at[c]);
          through_activation(taps, ring, r, dy[r], dc[r]);
          x[r] = {}, dy[r] = {};
          if (step + kAhead < there) x[r] = load<kVector>(from), dy[r] = load<kVector>(from_dy);
          if (step < own) add_row(ring, dc, r, sums);
          if (step >= own + kBefore) continue;
          float dx[kVector];
          of_first_row(taps, dc, r, dx);
          if constexpr (CONV_FINAL)
            if (step >= behind - token)
#pragma unroll
              for (int c = 0; c < kVector; ++c)
                dx[c] +=
                    to_float(dfinal_conv_state[window + c * kBefore + step - (behind - token)]);
          if (step >= kBefore) {
            Part rounded;
#pragma unroll
            for (int c = 0; c < kVector; ++c) rounded.at[c] = from_float<DTYPE>(dx[c]);
            store_vector(to_dx, rounded);
          } else if (CONV_INITIAL && token == begin) {
#pragma unroll
            for (int c = 0; c < kVector; ++c)
              dinitial_conv_state[window + c * kBefore + step] = from_float<DTYPE>(dx[c]);
          }
        }
      token += own;
    }
  }
  // The warps' sums, added in their order.
  constexpr int kChannels = 32 * kVector;
  float* const weights = array_at<kLayout.weight>(shared_memory());
  float* const biases = array_at<kLayout.bias>(shared_memory());
  const int lane = warp_index() * kChannels + lane_index() * kVector;
#pragma unroll
  for (int i = 0; i < kVector * CONV_WIDTH; ++i) weights[lane * CONV_WIDTH + i] = sums.weight[i];
  if constexpr (HAS_CONV_BIAS)
#pragma unroll
    for (int i = 0; i < kVector; ++i) biases[lane + i] = sums.bias[i];
  sync_block();
  const auto add_up = [&](const float* from, float* to, int width) {
    const int64 start = group * kChannels * width, all = channels * width;
    for (int i = thread_index(); i < kChannels * width && start + i < all; i += kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < num_warps; ++warp) total += from[warp * kChannels * width + i];
      to[part * all + start + i] = total;
    }
  };
  add_up(weights, dconv_weight_part, CONV_WIDTH);
  if constexpr (HAS_CONV_BIAS) add_up(biases, dconv_bias_part, 1);
}
