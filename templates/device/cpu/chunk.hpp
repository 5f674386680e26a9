// Where a chunk's tokens are, and the per-token values of one head.
#pragma once

#include "device/cpu/tile.hpp"

namespace wyvern::cpu {

/// `rows` tokens from `token`, counted over the whole batch; no rows: an unused chunk slot.
struct Chunk {
  int64 token;
  int rows;
  int64 sequence;
};

/// The chunk of a slot. `seq_offsets` and `chunk_index` are read only where `Packed`.
template <bool Packed>
inline Chunk find_chunk(int64 slot, int chunk_size, const Extents& e, const int32* seq_offsets,
                        const int32* chunk_index) {
  int64 first, end, sequence;
  if constexpr (Packed) {
    sequence = chunk_index[2 * slot];
    if (sequence < 0) return {0, 0, 0};
    first = seq_offsets[sequence] + static_cast<int64>(chunk_index[2 * slot + 1]) * chunk_size;
    end = seq_offsets[sequence + 1];
  } else {
    const int64 per_sequence = (e.T + chunk_size - 1) / chunk_size;
    sequence = slot / per_sequence;
    first = sequence * e.T + slot % per_sequence * chunk_size;
    end = (sequence + 1) * e.T;
  }
  return {first, static_cast<int>(end - first < chunk_size ? end - first : chunk_size), sequence};
}

/// The chunk's rows of a tensor with a row stride of `stride` elements, each from `column` on.
template <class T>
inline TokenRows<T> rows_in(const Chunk& chunk, T* tensor, int64 stride, int64 column) {
  return TokenRows<T>{tensor, stride}.at(chunk.token, column);
}

/// dst[r] = src[r * stride] for r < rows; 0 up to the next whole vector.
template <class T>
[[gnu::noinline]] static void load_column(const T* src, int64 stride, int rows, float* dst) {
  for (int r = 0; r < rows; ++r) dst[r] = load_one(src + r * stride);
  for (int r = rows; r < round_up(rows, kLanes); ++r) dst[r] = 0.0F;
}

/// dst[r * stride] = src[r], rounded to T.
template <class T>
[[gnu::noinline]] static void store_column(const float* src, int rows, T* dst, int64 stride) {
  for (int r = 0; r < rows; ++r) store_part(dst + r * stride, splat(src[r]), 1);
}

/// dst = value over `rows` values, in whole vectors.
inline void fill_column(float* dst, float value, int rows) {
  for (int r = 0; r < rows; r += kLanes) store(dst + r, splat(value));
}

/// As load_column for the summed gate: zeros, and G is not read, for an operator that is not Gated.
template <bool Gated>
inline void load_gates(const float* G, int64 stride, int rows, float* dst) {
  if constexpr (Gated)
    load_column(G, stride, rows, dst);
  else
    for (int r = 0; r < rows; r += kLanes) store(dst + r, f32{});
}

/// As load_column, with the sigmoid (twice it where `Negative`) of each value where `Sigmoid`.
template <bool Sigmoid, bool Negative, class T>
inline void load_beta(const TokenRows<const T>& src, int rows, float* dst) {
  load_column(src.first, src.stride, rows, dst);
  if constexpr (Sigmoid) {
    for (int r = 0; r < rows; r += kLanes)
      store(dst + r, sigmoid(load(dst + r)) * (Negative ? 2.0F : 1.0F));
  }
}

/// Multiplies `rows` values of dst, in whole vectors.
inline void scale_column(float* dst, const float* factor, int rows) {
  for (int r = 0; r < rows; r += kLanes) store(dst + r, load(dst + r) * load(factor + r));
}

/// dst = exp(src - from) over `rows` values, in whole vectors.
inline void exp_of(const float* src, float from, int rows, float* dst) {
  for (int r = 0; r < rows; r += kLanes) store(dst + r, exp(load(src + r) - from));
}

/// dst_rs = row_scale_r exp(G_r - G_s) column_scale_s src_rs at and below diagonal `Below` (0: the
/// main one, 1: the one under it), 0 elsewhere in a square of `rows` rounded up to whole 16.
/// Elements above the diagonal are not read, so that no overflow there can reach the result.
/// column_scale is read where `Scaled`, else 1.
template <int Below, bool Scaled, int C>
[[gnu::noinline]] static void decay_lower(Tile<C> src, int rows, const float* G,
                                          const float* row_scale, const float* column_scale,
                                          Tile<C> dst) {
  const i32 lanes = lane_numbers();
  const int columns = round_up(rows, 16);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; c += kLanes) {
      if (c > r - Below) {
        store(dst.row(r) + c, f32{});
        continue;
      }
      f32 factor = exp(G[r] - load(G + c)) * row_scale[r];
      if constexpr (Scaled) factor *= load(column_scale + c);
      const f32 decayed = load(src.row(r) + c) * factor;
      store(dst.row(r) + c, lanes <= r - Below - c ? decayed : f32{});
    }
  }
  clear_rows(dst, rows, columns, columns);
}

}  // namespace wyvern::cpu
