// Gradients of gates: from the gradient of G back to the log decays, the raw gates and the gates'
// parameters.
#pragma once

#include "device/cuda/columns.cuh"
#include "device/cuda/warp.cuh"

namespace wyvern::cuda {

/// The gradient of the chunk's log decays: reverse sums of dG, and 0 where the floor took the place
/// of the decay. G and dG point to the chunk's first row. A floor of -infinity has no effect:
/// nothing is below it.
template <class Shape>
WYVERN_DEVICE void log_decay_gradient(ColumnTile<Shape>& dg, const float* dG, const float* G,
                                      int64 stride, float floor, const Chunk& chunk,
                                      const ColumnPlace<Shape>& at) {
  dg.load(dG, stride, chunk, at);
  ColumnTile<Shape> sums;
  sums.load(G, stride, chunk, at);
  float before[Shape::kVector];
  load_columns<Shape>(before, G + (at.row - 1) * stride + at.column,
                      at.active && at.row > 0 && at.row < chunk.rows);
  sum_backward(dg, at);
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) {
      if (sums.x[i][j] - before[j] < 0.9999f * floor) dg.x[i][j] = 0.0f;
      before[j] = sums.x[i][j];
    }
}

/// What a thread's rows add to the gradients of the parameters of its columns.
template <class Shape>
struct ParameterParts {
  float A_log[Shape::kVector] = {};
  float bias[Shape::kVector] = {};
};

/// Turns gradients of log decays into those of the raw gates `g`, which points to the chunk's first
/// row; sums up the parameters' parts before anything is rounded.
template <bool Bounded, class Shape, class T>
WYVERN_DEVICE ParameterParts<Shape> raw_gate_gradient(ColumnTile<Shape>& dg, const T* g,
                                                      int64 stride,
                                                      const float (&rate)[Shape::kVector],
                                                      const float (&bias)[Shape::kVector],
                                                      float lower_bound, const Chunk& chunk,
                                                      const ColumnPlace<Shape>& at) {
  ParameterParts<Shape> parts;
  const T* row = g + at.row * stride + at.column;
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    const bool active = at.active && at.row + i < chunk.rows;
    float raw[Shape::kVector];
    load_columns<Shape>(raw, row, active);
    row += stride;
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) {
      const GateSlopes slopes = gate_slopes<Bounded>(raw[j] + bias[j], rate[j], lower_bound);
      parts.A_log[j] += active ? dg.x[i][j] * slopes.by_A_log : 0.0f;
      dg.x[i][j] = active ? dg.x[i][j] * slopes.by_x : 0.0f;
      parts.bias[j] += dg.x[i][j];
    }
  }
  return parts;
}

/// The parameters of a scalar gate's heads, and the end of its backward pass for one chunk slot: dg
/// holds gradients of log decays. Unused slots give parts of 0.
template <bool HasBias, class Shape, class T>
WYVERN_DEVICE void scalar_gate_backward(ColumnTile<Shape>& dg, const TokenRows<const T>& g,
                                        const float* A_log, const float* dt_bias, T* dg_raw,
                                        float* dA_part, float* dbias_part, int64 slot,
                                        const Chunk& chunk, const ColumnPlace<Shape>& at) {
  constexpr int kHeads = Shape::kColumns;
  float rate[Shape::kVector];
  float bias[Shape::kVector] = {};
  load_columns<Shape>(rate, A_log + at.column, at.active);
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j) rate[j] = gate_rate<false>(rate[j]);
  if constexpr (HasBias) load_columns<Shape>(bias, dt_bias + at.column, at.active);
  const ParameterParts<Shape> parts =
      raw_gate_gradient<false>(dg, g.row(chunk.token), g.stride, rate, bias, 0.0f, chunk, at);
  dg.store(dg_raw + chunk.token * kHeads, kHeads, chunk, at);
  float sum[Shape::kVector];
  sum_segments<Segments::all>(parts.A_log, at, sum);
  if (at.active && at.segment == 0) store_columns<Shape>(dA_part + slot * kHeads + at.column, sum);
  if constexpr (HasBias) {
    sum_segments<Segments::all>(parts.bias, at, sum);
    if (at.active && at.segment == 0)
      store_columns<Shape>(dbias_part + slot * kHeads + at.column, sum);
  }
}

/// The sum of x over the block, always in the same order. `totals` is shared memory for a float of
/// each warp.
template <int Threads>
WYVERN_DEVICE float sum_block(float* totals, float x) {
  x = sum_warp(x);
  sync_block();  // what lay here has been read
  if (lane_index() == 0) totals[warp_index()] = x;
  sync_block();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < Threads / 32; ++warp) sum += totals[warp];
  return sum;
}

/// The backward pass of a vector gate for one chunk slot and value head: load(dg, place) gives
/// gradients of log decays of a group of the head's keys. `shared` is where ColumnPlace's memory
/// starts.
template <class Shape, bool HasALog, bool HasBias, bool Bounded, class T, class Load>
WYVERN_DEVICE void vector_gate_backward(unsigned char* shared, const TokenRows<const T>& g,
                                        const float* A_log, const float* dt_bias, T* dg_raw,
                                        float* dA_part, float* dbias_part, const Extents& e,
                                        int64 slot, int head, const Chunk& chunk, Load&& load) {
  constexpr int kKeys = Shape::kColumns;
  const int64 stride = int64{e.HV} * kKeys;
  const int64 start = chunk.token * stride + head * kKeys;
  float rate[Shape::kVector];
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j)
    rate[j] = HasALog ? gate_rate<Bounded>(A_log[head]) : 1.0f;
  float dA = 0.0f;
  for (int group = 0; group < Shape::kGroups; ++group) {
    const ColumnPlace<Shape> at(group, shared);
    ColumnTile<Shape> dg;
    load(dg, at);
    float bias[Shape::kVector] = {};
    if constexpr (HasBias) load_columns<Shape>(bias, dt_bias + head * kKeys + at.column, at.active);
    const ParameterParts<Shape> parts = raw_gate_gradient<Bounded>(
        dg, g.row(chunk.token) + head * kKeys, g.stride, rate, bias, e.lower_bound, chunk, at);
    dg.store(dg_raw + start, stride, chunk, at);
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) dA += parts.A_log[j];
    if constexpr (HasBias) {
      float sum[Shape::kVector];
      sum_segments<Segments::all>(parts.bias, at, sum);
      if (at.active && at.segment == 0)
        store_columns<Shape>(dbias_part + slot * stride + head * kKeys + at.column, sum);
    }
  }
  if constexpr (HasALog) {
    const float sum = sum_block<Shape::kThreads>(array_at<Shape::kLayout.sums>(shared), dA);
    if (thread_index() == 0) dA_part[slot * e.HV + head] = sum;
  }
}

}  // namespace wyvern::cuda
