// Gradients of rows of o that were normalized and gated, each V elements in a power of two of
// lanes. A block has a part of the rows, and sums its part of the weight's gradient. A lane loads
// its vectors of BC rows before it computes, so that enough bytes are under way; rows too long for
// registers are read twice, first for their sums.
#include "device/cuda/norm_rows.cuh"
#include "device/cuda/warp.cuh"
#include "layer/layout.hpp"

constexpr int kThreads = num_warps * 32;
using Shape = RowShape<DTYPE, V>;
constexpr int kVector = Shape::kVector;
constexpr int kLanes = Shape::kLanes;
constexpr int kPerLane = Shape::kPerLane;
constexpr int kSideBySide = kThreads / kLanes;
constexpr bool kHeld = V <= output_norm_bwd::kMostHeld;
static_assert(kHeld || BC == 1, "long rows are taken one by one");
constexpr output_norm_bwd::SharedLayout kLayout{Spec{}};
using Part = Vector<DTYPE, kVector>;
using Weights = NormWeights<kVector>;

/// Where a row is: its first element in dense tensors, and its place in strided ones.
struct Row {
  int64 dense;
  int64 token;
  int64 column;
};

/// What a gate's input opens, and the derivative of it.
struct Gate {
  float open, slope;
};

WYVERN_DEVICE Gate gate_of(float z) {
  // sigmoid(z) and 1 - sigmoid(z), neither by a subtraction.
  const float small = exp2_fast(maximum(z, -z) * -1.44269504f);
  const float more = reciprocal_fast(1.0f + small), less = small * more;
  const float open = z < 0.0f ? less : more, closed = z < 0.0f ? more : less;
  if constexpr (NORM_SILU) return {z * open, open * fused_multiply_add(z, closed, 1.0f)};
  return {open, open * closed};
}

/// kVector elements of a row behind the norm.
struct Elements {
  float x[kVector];       ///< of the row
  float d[kVector];       ///< gradients of the normalized row times its weights
  float d_gate[kVector];  ///< gradients of the gate, but for the normalized row

  WYVERN_DEVICE Elements(const Part& dy, const Part& in, const Part& z, const Weights& weights) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const Gate gate = gate_of(to_float(z.at[j]));
      const float gradient = to_float(dy.at[j]);
      x[j] = to_float(in.at[j]);
      d[j] = gradient * gate.open;
      d_gate[j] = gradient * weights.at[j] * gate.slope;
    }
  }

  WYVERN_DEVICE void add_sums(const Weights& weights, float& squares, float& products) const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      squares = fused_multiply_add(x[j], x[j], squares);
      products = fused_multiply_add(d[j] * weights.at[j], x[j], products);
    }
  }

  /// Writes both gradients and adds those of the weights.
  WYVERN_DEVICE void finish(const Weights& weights, float rstd, float along, DTYPE* to_row,
                            DTYPE* to_gate, float (&sums)[kVector]) const {
    Part row, gate;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float normalized = x[j] * rstd;
      row.at[j] =
          from_float<DTYPE>(rstd * fused_multiply_add(normalized, -along, d[j] * weights.at[j]));
      gate.at[j] = from_float<DTYPE>(d_gate[j] * normalized);
      sums[j] = fused_multiply_add(d[j], normalized, sums[j]);
    }
    store_vector(to_row, row);
    store_vector(to_gate, gate);
  }
};

/// The mean product of the gradient with the normalized row.
WYVERN_DEVICE float mean_along(float products, float rstd) { return products * rstd * (1.0f / V); }

WYVERN_KERNEL(kThreads, 0) {
  const int64 first = int64{block_index()} * kNormPartRows;
  const int64 left = e.B * e.T * e.HV - first;
  const int rows = left < kNormPartRows ? static_cast<int>(left) : kNormPartRows;
  const int64 token = first / e.HV;
  const int head = static_cast<int>(first - token * e.HV);
  float* const part = dnorm_weight_part + int64{block_index()} * V;
  const auto row_at = [&](int local) -> Row {
    return {(first + local) * V, token + (head + local) / e.HV, int64{(head + local) % e.HV} * V};
  };
  const auto load_rows = [&](const Row& row, int64 at, Part& dy, Part& x, Part& z) {
    dy = load<kVector>(dO + row.token * dO_stride + row.column + at);
    x = load<kVector>(o_raw + row.dense + at);
    z = load<kVector>(norm_gate + row.token * norm_gate_stride + row.column + at);
  };
  const auto gate_at = [&](const Row& row, int64 at) {
    return dnorm_gate + row.token * dnorm_gate_stride + row.column + at;
  };
  if constexpr (kHeld) {
    const int column = thread_index() % kLanes * kVector;
    Weights weights[kPerLane] = {};
    float sums[kPerLane][kVector] = {};
#pragma unroll
    for (int v = 0; v < kPerLane; ++v) {
      const int at = column + v * kLanes * kVector;
      if (at < V) weights[v].load_from(norm_weight + at);
    }
#pragma unroll 1
    for (int start = 0; start < rows; start += kSideBySide * BC) {
      Row row[BC];
      Part dy[BC][kPerLane] = {}, x[BC][kPerLane] = {}, z[BC][kPerLane] = {};
      bool active[BC];
#pragma unroll
      for (int i = 0; i < BC; ++i) {
        const int local = start + i * kSideBySide + thread_index() / kLanes;
        active[i] = local < rows;
        row[i] = row_at(local);
#pragma unroll
        for (int v = 0; v < kPerLane; ++v) {
          const int at = column + v * kLanes * kVector;
          if (active[i] && at < V) load_rows(row[i], at, dy[i][v], x[i][v], z[i][v]);
        }
      }
#pragma unroll
      for (int i = 0; i < BC; ++i) {
        float squares = 0.0f, products = 0.0f;
#pragma unroll
        for (int v = 0; v < kPerLane; ++v)
          Elements(dy[i][v], x[i][v], z[i][v], weights[v]).add_sums(weights[v], squares, products);
        const float rstd = norm_rstd<V>(sum_lanes<kLanes>(squares), e.norm_eps);
        const float along = mean_along(sum_lanes<kLanes>(products), rstd);
#pragma unroll
        for (int v = 0; v < kPerLane; ++v) {
          const int at = column + v * kLanes * kVector;
          if (active[i] && at < V)
            Elements(dy[i][v], x[i][v], z[i][v], weights[v])
                .finish(weights[v], rstd, along, do_raw + row[i].dense + at, gate_at(row[i], at),
                        sums[v]);
        }
      }
    }
    float* const totals = array_at<kLayout.weight>(shared_memory());
#pragma unroll
    for (int v = 0; v < kPerLane; ++v) {
      const int at = column + v * kLanes * kVector;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
#pragma unroll
        for (int mask = kLanes; mask < 32; mask *= 2) sums[v][j] += shuffle_xor(sums[v][j], mask);
        if (lane_index() < kLanes && at < V) totals[warp_index() * V + at + j] = sums[v][j];
      }
    }
    sync_block();
    for (int at = thread_index(); at < V; at += kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < num_warps; ++warp) total += totals[warp * V + at];
      part[at] = total;
    }
  } else {
    float* const rstds = array_at<kLayout.rstd>(shared_memory());
    float* const alongs = array_at<kLayout.along>(shared_memory());
    for (int local = warp_index(); local < rows; local += num_warps) {
      const Row row = row_at(local);
      float squares = 0.0f, products = 0.0f;
#pragma unroll 2
      for (int64 at = lane_index() * kVector; at < V; at += 32 * kVector) {
        Part dy, x, z;
        Weights weights;
        load_rows(row, at, dy, x, z);
        weights.load_from(norm_weight + at);
        Elements(dy, x, z, weights).add_sums(weights, squares, products);
      }
      const float rstd = norm_rstd<V>(sum_warp(squares), e.norm_eps);
      const float along = mean_along(sum_warp(products), rstd);
      if (lane_index() == 0) rstds[local] = rstd, alongs[local] = along;
    }
    sync_block();
#pragma unroll 1
    for (int64 at = thread_index() * kVector; at < V; at += kThreads * kVector) {
      Weights weights;
      weights.load_from(norm_weight + at);
      float sums[kVector] = {};
#pragma unroll 2
      for (int local = 0; local < rows; ++local) {
        const Row row = row_at(local);
        Part dy, x, z;
        load_rows(row, at, dy, x, z);
        Elements(dy, x, z, weights)
            .finish(weights, rstds[local], alongs[local], do_raw + row.dense + at, gate_at(row, at),
                    sums);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) part[at + j] = sums[j];
    }
  }
}
