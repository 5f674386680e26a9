// Rows of o normalized and gated: each V elements, in a power of two of lanes. A lane loads its
// vectors of BC rows before it computes, so that enough bytes are under way; rows too long for
// registers are read twice, once for the sum of squares.
#pragma once

#include "device/cuda/norm_rows.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = RowShape<DTYPE, V>;
constexpr int kVector = Shape::kVector;
constexpr int kLanes = Shape::kLanes;
constexpr int kPerLane = Shape::kPerLane;
constexpr int kSideBySide = kThreads / kLanes;
constexpr bool kHeld = kPerLane <= 4;
static_assert(kHeld || BC == 1, "long rows are taken one by one");
using Part = Vector<DTYPE, kVector>;
using Weights = NormWeights<kVector>;

/// A row of o: its token, its first column there, and where it and its gate are.
struct Row {
  int64 token, column;
  const DTYPE* from;
  const DTYPE* gate;
  bool active;
};

/// Calls write(row, at, y) for each of the lane's vectors y, from column `at` of the row on; by all
/// lanes of a warp alike, with a vector of zeros where the row is not active or `at` is not below
/// V.
template <class Write>
WYVERN_DEVICE void normalize_rows(const DTYPE* o_raw, const DTYPE* norm_gate,
                                  int64 norm_gate_stride, const float* norm_weight,
                                  const Extents& e, Write&& write) {
  const int64 rows = e.B * e.T * e.HV;
  const int64 first = int64{block_index()} * (kSideBySide * BC);
  const int64 token = first / e.HV;
  const int head = static_cast<int>(first - token * e.HV);
  const int column = thread_index() % kLanes * kVector;
  const auto row_at = [&](int i) -> Row {
    const int local = i * kSideBySide + thread_index() / kLanes;
    const int64 row = first + local;
    const int64 of = token + (head + local) / e.HV;
    const int64 in_token = int64{(head + local) % e.HV} * V;
    return {of, in_token, o_raw + row * V, norm_gate + of * norm_gate_stride + in_token,
            row < rows};
  };
  if constexpr (kHeld) {
    Row row[BC];
    Part x[BC][kPerLane] = {}, z[BC][kPerLane] = {};
    Weights weights[kPerLane] = {};
#pragma unroll
    for (int i = 0; i < BC; ++i) {
      row[i] = row_at(i);
#pragma unroll
      for (int v = 0; v < kPerLane; ++v) {
        const int at = column + v * kLanes * kVector;
        if (!row[i].active || at >= V) continue;
        x[i][v] = load<kVector>(row[i].from + at);
        z[i][v] = load<kVector>(row[i].gate + at);
      }
    }
#pragma unroll
    for (int v = 0; v < kPerLane; ++v) {
      const int at = column + v * kLanes * kVector;
      if (at < V) weights[v].load_from(norm_weight + at);
    }
#pragma unroll
    for (int i = 0; i < BC; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int v = 0; v < kPerLane; ++v) add_squares(x[i][v], sum);
      const float rstd = norm_rstd<V>(sum_lanes<kLanes>(sum), e.norm_eps);
#pragma unroll
      for (int v = 0; v < kPerLane; ++v)
        write(row[i], column + v * kLanes * kVector,
              normalized<Spec>(x[i][v], z[i][v], weights[v], rstd));
    }
  } else {
    const Row row = row_at(0);
    float sum = 0.0f;
#pragma unroll 4
    for (int64 at = column; at < V; at += kLanes * kVector)
      if (row.active) add_squares(load<kVector>(row.from + at), sum);
    const float rstd = norm_rstd<V>(sum_lanes<kLanes>(sum), e.norm_eps);
#pragma unroll 1
    for (int start = 0; start < V; start += kLanes * kVector) {
      const int at = start + column;
      Part y = {};
      if (row.active && at < V) {
        Weights weights;
        weights.load_from(norm_weight + at);
        y = normalized<Spec>(load<kVector>(row.from + at), load<kVector>(row.gate + at), weights,
                             rstd);
      }
      write(row, at, y);
    }
  }
}
