// Work on a chunk's rows column by column, a column being a head or one key of a head. A block
// has a group of columns: lanes are laid out along them, a vector of neighbours each, and each lane
// holds a segment of the rows in registers.
#pragma once

#include "device/cuda/columns_layout.hpp"
#include "device/cuda/gate.cuh"

namespace wyvern::cuda {

/// How a block of Threads covers Size rows of Columns; vectors divide Unit, a divisor of Columns.
template <int Threads, int Size, int Columns, int Unit = Columns>
struct ColumnShape {
  static constexpr ColumnSplit kSplit{Threads, Size, Columns, Unit};
  static constexpr ColumnSumsLayout kLayout{Threads, kSplit};
  static constexpr int kThreads = Threads;
  static constexpr int kColumns = Columns;
  static constexpr int kVector = kSplit.vector;
  static constexpr int kLanes = kSplit.lanes;
  static constexpr int kGroups = kSplit.groups;
  static constexpr int kSegments = kSplit.segments;
  static constexpr int kRows = kSplit.rows;
};

/// A thread's first row and column, and where in shared memory the sums over segments pass through.
template <class Shape>
struct ColumnPlace {
  int segment, row, column;
  bool active;
  float* sums;

  /// In a block's group of columns. Where nothing is summed up over segments, no memory is needed.
  WYVERN_DEVICE explicit ColumnPlace(int group, unsigned char* shared = nullptr) {
    segment = thread_index() / Shape::kLanes;
    row = segment * Shape::kRows;
    column = (group * Shape::kLanes + thread_index() % Shape::kLanes) * Shape::kVector;
    active = column < Shape::kColumns && segment < Shape::kSegments;
    sums = array_at<Shape::kLayout.sums>(shared);
  }
};

/// A vector of a row of columns, zeros for an inactive thread.
template <class Shape, class T>
WYVERN_DEVICE void load_columns(float (&x)[Shape::kVector], const T* from, bool active) {
  Vector<T, Shape::kVector> in = {};
  if (active) in = load<Shape::kVector>(from);
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j) x[j] = to_float(in.at[j]);
}
/// To global memory.
template <class Shape, class T>
WYVERN_DEVICE void store_columns(T* to, const float (&x)[Shape::kVector]) {
  Vector<T, Shape::kVector> out;
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j) out.at[j] = from_float<T>(x[j]);
  store_vector(to, out);
}

/// What a thread holds of a chunk.
template <class Shape>
struct ColumnTile {
  float x[Shape::kRows][Shape::kVector];

  /// From the chunk's first row, `stride` elements a row; zeros outside the chunk.
  template <class T>
  WYVERN_DEVICE void load(const T* from, int64 stride, const Chunk& chunk,
                          const ColumnPlace<Shape>& at) {
    const T* row = from + at.row * stride + at.column;
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i) {
      load_columns<Shape>(x[i], row, at.active && at.row + i < chunk.rows);
      row += stride;
    }
  }
  template <class T>
  WYVERN_DEVICE void store(T* to, int64 stride, const Chunk& chunk,
                           const ColumnPlace<Shape>& at) const {
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i)
      if (at.active && at.row + i < chunk.rows)
        store_columns<Shape>(to + (at.row + i) * stride + at.column, x[i]);
  }
};

/// Whose vectors a thread adds up, in the order of segments, or against it for those after its own.
enum class Segments { before, after, all };

/// Calls add(the vector x of a segment of this thread's columns) for the segments that Which says,
/// always in the same order. By every thread of the block.
template <Segments Which, class Shape, class Add>
WYVERN_DEVICE void for_segments(const float (&x)[Shape::kVector], const ColumnPlace<Shape>& at,
                                Add&& add) {
  float* const vectors = at.sums;
  const int segment = at.segment;
  sync_block();  // the last call's vectors have been read
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j) vectors[thread_index() * Shape::kVector + j] = x[j];
  sync_block();
  constexpr bool kBack = Which == Segments::after;
  const int first = kBack ? Shape::kSegments - 1 : 0;
  const int count = Which == Segments::all      ? Shape::kSegments
                    : Which == Segments::before ? smaller(segment, Shape::kSegments)
                                                : larger(first - segment, 0);
  for (int i = 0; i < count; ++i) {
    const int other = kBack ? first - i : i;
    float vector[Shape::kVector];
    load_columns<Shape>(
        vector, vectors + (other * Shape::kLanes + thread_index() % Shape::kLanes) * Shape::kVector,
        true);
    add(vector);
  }
}

/// The sum of those vectors.
template <Segments Which, class Shape>
WYVERN_DEVICE void sum_segments(const float (&x)[Shape::kVector], const ColumnPlace<Shape>& at,
                                float (&sum)[Shape::kVector]) {
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j) sum[j] = 0.0f;
  for_segments<Which>(x, at, [&](const float(&other)[Shape::kVector]) {
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) sum[j] += other[j];
  });
}

/// Every row becomes the sum of the chunk's rows up to and including it.
template <class Shape>
WYVERN_DEVICE void sum_forward(ColumnTile<Shape>& tile, const ColumnPlace<Shape>& at) {
#pragma unroll
  for (int i = 1; i < Shape::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) tile.x[i][j] += tile.x[i - 1][j];
  float before[Shape::kVector];
  sum_segments<Segments::before>(tile.x[Shape::kRows - 1], at, before);
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) tile.x[i][j] += before[j];
}

/// Every row becomes the sum of the chunk's rows from it on. Where terms cancel, the sum is as good
/// as the terms: what it is multiplied with later may be large.
template <class Shape>
WYVERN_DEVICE void sum_backward(ColumnTile<Shape>& tile, const ColumnPlace<Shape>& at) {
  ExactSum own[Shape::kVector], after[Shape::kVector];
#pragma unroll
  for (int i = Shape::kRows - 1; i >= 0; --i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) own[j].add(tile.x[i][j]);
  float part[Shape::kVector];
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j) part[j] = own[j].sum;
  const auto add = [&](const float(&other)[Shape::kVector]) {
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) after[j].add(other[j]);
  };
  for_segments<Segments::after>(part, at, add);
#pragma unroll
  for (int j = 0; j < Shape::kVector; ++j) part[j] = own[j].lost;
  for_segments<Segments::after>(part, at, add);
#pragma unroll
  for (int i = Shape::kRows - 1; i >= 0; --i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) {
      after[j].add(tile.x[i][j]);
      tile.x[i][j] = after[j].value();
    }
}

/// Raw gates become log decays; `Unit` columns share a head.
template <bool HasALog, bool HasBias, bool Bounded, int Unit, class Shape>
WYVERN_DEVICE void apply_gate(ColumnTile<Shape>& tile, const float* A_log, const float* dt_bias,
                              float lower_bound, const ColumnPlace<Shape>& at) {
  float rate = 1.0f;
  float bias[Shape::kVector] = {};
  if constexpr (HasALog)
    if (at.active) rate = gate_rate<Bounded>(A_log[at.column / Unit]);
  if constexpr (HasBias) load_columns<Shape>(bias, dt_bias + at.column, at.active);
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j)
      tile.x[i][j] = log_decay<Bounded>(tile.x[i][j] + bias[j], rate, lower_bound);
}

}  // namespace wyvern::cuda
