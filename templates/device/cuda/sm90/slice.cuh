// A slice of 16 tokens of Kimi Delta Attention as one warp has it in registers: rows, gates and
// their sums, in the layout of mma's operands, without shuffles.
#pragma once

#include "device/cuda/gate.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/sm90/tile.cuh"

namespace wyvern::cuda::sm90 {

constexpr int kSlice = 16;  ///< tokens
constexpr int kGroup = 32;  ///< channels that a warp has in registers at once

/// Gates of Rows tokens as tensor copies write them: panels of 128 bytes a row.
template <class T, int Rows>
struct GateTile {
  unsigned char* data;

  WYVERN_DEVICE T* at(int row, int col) const {
    constexpr int kColumns = 128 / static_cast<int>(sizeof(T));
    constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
    const int piece = (col % kColumns / kPiece) ^ (row % 8);
    auto* const element =
        reinterpret_cast<T*>(data + col / kColumns * Rows * 128 + row * 128 + piece * 16) +
        col % kPiece;
    touch(element);
    return element;
  }
};

/// From a gate as given to its log decay in base 2.
template <bool InKernel, bool HasALog, bool Bounded>
struct GateForm {
  float rate, bound, floor;

  GateForm() = default;
  WYVERN_DEVICE GateForm(const Extents& e, float A_log)
      : rate(HasALog ? gate_rate<Bounded>(A_log) : 1.0f),
        bound(e.lower_bound * kLog2E),
        floor(e.gate_floor * kLog2E) {}

  /// dt_bias for `operator()`.
  WYVERN_DEVICE float bias(float dt_bias) const {
    return Bounded ? -rate * kLog2E * dt_bias : dt_bias;
  }
  WYVERN_DEVICE float operator()(float x, float bias) const {
    if constexpr (!InKernel) {
      return maximum(x * kLog2E, floor);
    } else if constexpr (Bounded) {
      const float y = exp2_fast(fused_multiply_add(-rate * kLog2E, x, bias));
      return bound * reciprocal_fast(1.0f + y);
    } else {
      return maximum(log_decay<false>(x + bias, rate, 0.0f) * kLog2E, floor);
    }
  }
};

/// The slice's row that row `i` (of 8) of this lane's fragments stands for; row i + 8 stands for
/// the one 8 further on. In this order lanes that move 16 bytes at once have no bank conflicts.
WYVERN_DEVICE int row_of(int i) { return i % 2 * 4 + i / 2; }

/// Elements from a row of a panel to the one 8 further on, which has the same swizzle.
constexpr int kEightRows = 8 * 64;

/// A slice's rows as one warp has them: two rows, row_of(lane / 4) and 8 more, of eight channels
/// from lane % 4 * 8 on in each group of 32.
template <class T>
struct SliceRows {
  uint32 x[2][4];

  /// `first` is the place of row 0 in a tile.
  WYVERN_DEVICE explicit SliceRows(const T* first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      touch(first + i * kEightRows);
      const auto words = load<4>(reinterpret_cast<const uint32*>(first + i * kEightRows));
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] = words.at[j];
    }
  }
  /// Channel j (of 8) of row i.
  WYVERN_DEVICE float of(int i, int j) const {
    const uint32 pair = x[i][j / 2];
    return to_float(T{static_cast<uint16>(j % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)});
  }
  /// Writes row i of a group to a tile.
  WYVERN_DEVICE static void store(T* first, int i, const uint32 (&words)[4]) {
    touch(first + i * kEightRows);
    *reinterpret_cast<Vector<uint32, 4>*>(first + i * kEightRows) = {
        {words[0], words[1], words[2], words[3]}};
  }
};

/// G, the sums of gates in base 2 up to this lane's two rows: G[i][j] of row i and channel j of
/// SliceRows. A product of gates with a triangle of ones, which tf32 has exactly; gates enter in
/// two parts, of eleven digits each.
template <class Gates, class Form>
WYVERN_DEVICE void sum_gates(float (&G)[2][8], const Gates& tile, int first, int group, int rows,
                             const Form& form, const float* bias) {
  const int lane = lane_index();
  const int column = group * kGroup + lane / 4 * 4;
  const auto shift = load<4>(bias + column);
  float gate[4][4];  // of tokens 2 (lane % 4) + i % 2 + i / 2 * 8
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane % 4 * 2 + i % 2 + i / 2 * 8;
    const auto raw = load<4>(tile.at(first + row, column));
#pragma unroll
    for (int j = 0; j < 4; ++j)
      gate[i][j] = row < rows ? form(to_float(raw.at[j]), shift.at[j]) : 0.0f;
  }
  const int row = row_of(lane / 4);
  const float even = lane % 4 * 2 <= row ? 1.0f : 0.0f;
  const float odd = lane % 4 * 2 + 1 <= row ? 1.0f : 0.0f;
  const float early[4] = {even, 1.0f, odd, 1.0f};
  const float late[4] = {0.0f, even, 0.0f, odd};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float head[4];
    float tail[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      head[i] = bits_float(float_bits(gate[i][j]) & 0xFFFFE000U);
      tail[i] = bits_float(float_bits(gate[i][j] - head[i]) & 0xFFFFE000U);
    }
    float sum[4] = {};
    mma_m16n8k8_tf32(sum, early, head[0], head[1]);
    mma_m16n8k8_tf32(sum, early, tail[0], tail[1]);
    mma_m16n8k8_tf32(sum, late, head[2], head[3]);
    mma_m16n8k8_tf32(sum, late, tail[2], tail[3]);
    G[0][j] = sum[0];
    G[0][4 + j] = sum[1];
    G[1][j] = sum[2];
    G[1][4 + j] = sum[3];
  }
}

}  // namespace wyvern::cuda::sm90
