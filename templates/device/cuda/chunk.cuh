// Where a chunk's rows are, and the per-row scalars of a chunk.
#pragma once

#include "device/cuda/token_rows.cuh"

namespace wyvern::cuda {

constexpr float kLog2E = 1.4426950408889634f;

/// exp(x) for x <= 0; never above 1, 0 where the true value is subnormal.
WYVERN_DEVICE float decay(float x) { return exp2_fast(x * kLog2E); }

/// Rows token .. token + rows - 1 of the token-major tensors; none for an unused slot.
struct Chunk {
  int64 token = 0;
  int rows = 0;
  int sequence = 0;
};

/// The chunk in `slot`, for chunks of Size tokens.
template <bool Packed, int Size>
WYVERN_DEVICE Chunk locate_chunk(int slot, const Extents& e, const int32* seq_offsets,
                                 const int32* chunk_index) {
  Chunk chunk;
  if constexpr (Packed) {
    const int sequence = chunk_index[2 * slot];
    if (sequence < 0) return chunk;
    chunk.token = seq_offsets[sequence] + chunk_index[2 * slot + 1] * Size;
    chunk.rows = smaller(seq_offsets[sequence + 1] - static_cast<int>(chunk.token), Size);
    chunk.sequence = sequence;
  } else {
    const int tokens = static_cast<int>(e.T);
    const int per_sequence = ceil_div(tokens, Size);
    const int first = slot % per_sequence * Size;
    chunk.sequence = slot / per_sequence;
    chunk.token = chunk.sequence * e.T + first;
    chunk.rows = smaller(tokens - first, Size);
  }
  return chunk;
}

/// The chunk's rows of a tensor whose rows are `stride` elements apart, each from `column` on.
template <class T>
WYVERN_DEVICE TokenRows<T> rows_in(const Chunk& chunk, T* tensor, int64 stride, int column) {
  return TokenRows<T>{tensor, stride}.at(chunk.token, column);
}

/// Rows token .. token + tokens - 1 of a sequence, and the slot of its first chunk.
struct Sequence {
  int64 token;
  int tokens;
  int64 slot;
};

/// Sequence n, for chunks of Size tokens.
template <bool Packed, int Size>
WYVERN_DEVICE Sequence locate_sequence(int n, const Extents& e, const int32* seq_offsets,
                                       const int32* chunk_offsets) {
  if constexpr (Packed)
    return {seq_offsets[n], seq_offsets[n + 1] - seq_offsets[n], chunk_offsets[n]};
  const int tokens = static_cast<int>(e.T);
  return {n * e.T, tokens, int64{n} * ceil_div(tokens, Size)};
}

/// Starts copying the summed gate of a chunk's rows, zeros up to Count; only zeros, and G is not
/// read, for an operator that is not Gated.
template <bool Gated, int Threads, int Count>
WYVERN_DEVICE void load_gates(float* to, const float* G, int64 stride, int rows) {
  if constexpr (Gated)
    load_column<Threads, Count>(to, G, stride, rows);
  else
    for (int i = thread_index(); i < Count; i += Threads) to[i] = 0.0f;
}

/// beta as the recurrence uses it, from what the tensor holds.
template <bool Sigmoid, bool Negative, class T>
WYVERN_DEVICE float activate_beta(T raw) {
  const float beta = to_float(raw);
  if constexpr (!Sigmoid) return beta;
  return (Negative ? 2.0f : 1.0f) / (1.0f + exponential(-beta));
}

/// x, or where its magnitude is less than `least` that with the sign of x.
WYVERN_DEVICE float away_from_zero(float x, float least) {
  const float other = bits_float(float_bits(x) & 0x80000000U | float_bits(least));
  return x < least && x > -least ? other : x;
}

/// beta as it is divided by, which gives its gradient: where it is next to nothing it counts as
/// 2^-40, by which its row adds nothing that shows.
WYVERN_DEVICE float beta_divisor(float beta) { return away_from_zero(beta, 0x1p-40f); }

/// beta of kernels that find W and U. Where values are kept a backward pass divides them by beta.
template <class S>
WYVERN_DEVICE float beta_of_values(Element<S::BETA_DTYPE> raw) {
  const float beta = activate_beta<S::BETA_SIGMOID, S::NEG_EIGVAL>(raw);
  return S::KEEP_STATES ? beta_divisor(beta) : beta;
}

}  // namespace wyvern::cuda
