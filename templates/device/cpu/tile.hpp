// Tiles of fp32 in scratch memory, loaded from tensors and stored to them.
//
// The columns of a tile from its last one to the next whole vector are 0. Rows that are loaded for
// a product are padded with rows of 0 to whole kTileRows.
//
// Functions of tiles are static, not inline: the compiler propagates constants, above all a tile's
// stride, from their calls into the functions of `detail`, which are compiled once for all calls.
#pragma once

#include "device/cpu/layout.hpp"
#include "device/cpu/math.hpp"
#include "device/token_rows.hpp"

namespace wyvern::cpu {

/// Rows of a product's register tile. With 32 registers 8 x 2 accumulators hide the latency of two
/// FMA units; with 16 there is room for 4 x 2.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

/// A tile with Cols columns, or the part of one from some row and column on.
template <int Cols>
struct Tile {
  static constexpr int kCols = Cols;
  static constexpr int64 kStride = row_stride(Cols);  ///< floats between rows

  float* data;

  float* row(int64 r) const { return data + r * kStride; }
  Tile from(int64 row, int64 column = 0) const { return {data + row * kStride + column}; }
};

/// The type of the tile that a layout has in Place.
template <TilePlace Place>
using TileAt = Tile<Place.cols>;

/// That tile, where `memory` is the block's scratch.
template <TilePlace Place>
inline TileAt<Place> tile_at(void* memory) {
  return {static_cast<float*>(memory) + Place.offset};
}

/// The vector that a layout has in Place.
template <VectorPlace Place>
inline float* vector_at(void* memory) {
  return static_cast<float*>(memory) + Place.offset;
}

namespace detail {

/// Writes 0 to rows [begin, end) of a tile.
static void clear_rows(float* tile, int64 ld, int begin, int end, int columns) {
  for (int r = begin; r < end; ++r)
    for (int c = 0; c < columns; c += kLanes) store(tile + r * ld + c, f32{});
}

/// dst = src (rows x columns, `stride` elements between rows) as fp32, row r times scale[r] where
/// `Scaled`. Pads columns and rows with 0.
template <bool Scaled, class T>
[[gnu::noinline]] static void load_tile(const T* src, int64 stride, int rows, int columns,
                                        float* dst, int64 ld, const float* scale) {
  const int whole = columns / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const T* from = src + r * stride;
    float* to = dst + r * ld;
    const float factor = Scaled ? scale[r] : 1.0F;
    for (int c = 0; c < whole; c += kLanes) {
      const f32 v = load(from + c);
      store(to + c, Scaled ? v * factor : v);
    }
    if (whole < columns) {
      const f32 v = load_part(from + whole, columns - whole);
      store(to + whole, Scaled ? v * factor : v);
    }
  }
  clear_rows(dst, ld, rows, round_up(rows, kTileRows), columns);
}

/// dst (rows x columns, `stride` elements between rows) = factor * src, rounded to T.
template <class T>
[[gnu::noinline]] static void store_tile(const float* src, int64 ld, int rows, int columns, T* dst,
                                         int64 stride, float factor) {
  const int whole = columns / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const float* from = src + r * ld;
    T* to = dst + r * stride;
    for (int c = 0; c < whole; c += kLanes) store(to + c, load(from + c) * factor);
    if (whole < columns) store_part(to + whole, load(from + whole) * factor, columns - whole);
  }
}

}  // namespace detail

/// Writes 0 to rows [begin, end) of a tile, in whole vectors.
template <int C>
static void clear_rows(Tile<C> tile, int begin, int end, int columns) {
  detail::clear_rows(tile.data, tile.kStride, begin, end, columns);
}

/// tile *= factor in `rows` rows, in whole vectors.
template <int C>
static void scale_tile(Tile<C> tile, int rows, int columns, float factor) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes)
      store(tile.row(r) + c, load(tile.row(r) + c) * factor);
}

/// dst = src (rows x columns, `stride` elements between rows) as fp32. Pads columns and rows with
/// 0.
template <class T, int C>
static void load_tile(const T* src, int64 stride, int rows, int columns, Tile<C> dst) {
  detail::load_tile<false>(src, stride, rows, columns, dst.data, dst.kStride, nullptr);
}

/// As above, row r times scale[r] where `Scaled`.
template <bool Scaled, class T, int C>
static void load_tile(const T* src, int64 stride, int rows, int columns, Tile<C> dst,
                      const float* scale) {
  detail::load_tile<Scaled>(src, stride, rows, columns, dst.data, dst.kStride, scale);
}

/// load_tile of such rows.
template <class T, int C>
static void load_tile(const TokenRows<const T>& src, int rows, int columns, Tile<C> dst) {
  load_tile(src.first, src.stride, rows, columns, dst);
}
template <bool Scaled, class T, int C>
static void load_tile(const TokenRows<const T>& src, int rows, int columns, Tile<C> dst,
                      const float* scale) {
  load_tile<Scaled>(src.first, src.stride, rows, columns, dst, scale);
}

/// dst (rows x columns, `stride` elements between rows) = factor * src, rounded to T.
template <int C, class T>
static void store_tile(Tile<C> src, int rows, int columns, T* dst, int64 stride,
                       float factor = 1.0F) {
  detail::store_tile(src.data, src.kStride, rows, columns, dst, stride, factor);
}

/// Zeros in `columns` elements of rows with a stride of `stride` elements: the output of a null
/// sequence.
template <class T>
static void clear_output(int64 rows, int columns, T* to, int64 stride) {
  for (int64 r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) to[r * stride + c] = T{};
}

namespace detail {

template <int... I>
struct Lanes {};

#if defined(__AVX512F__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX__)
using AllLanes = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using AllLanes = Lanes<0, 1, 2, 3>;
#endif

/// a0 b0 a1 b1 ... from the lower (First = 0) or upper (First = kLanes / 2) halves of both.
template <int First, int... I>
inline f32 interleave(f32 a, f32 b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, (First + I / 2 + (I % 2) * kLanes)...);
}

/// Transposes a square in registers by log2(kLanes) perfect shuffles of its rows.
inline void transpose_square(f32 (&m)[kLanes]) {
#pragma clang loop unroll(full)
  for (int width = 1; width < kLanes; width *= 2) {
    f32 next[kLanes];
#pragma clang loop unroll(full)
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave<0>(m[i], m[i + kLanes / 2], AllLanes{});
      next[2 * i + 1] = interleave<kLanes / 2>(m[i], m[i + kLanes / 2], AllLanes{});
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < kLanes; ++i) m[i] = next[i];
  }
}

/// dst (columns x rows) = src^T (src is rows x columns), times `factor` where `Scaled`; strides
/// count elements. `Pad`: dst is a tile, whose columns from `rows` to the next whole vector are set
/// to 0.
template <bool Pad, bool Scaled = false, class From, class To>
[[gnu::noinline]] static void transpose(const From* src, int64 stride, int rows, int columns,
                                        To* dst, int64 ld, float factor = 1.0F) {
  const auto scaled = [factor](f32 v) { return Scaled ? v * factor : v; };
  for (int r = 0; r < rows; r += kLanes)
    for (int c = 0; c < columns; c += kLanes) {
      const int height = rows - r < kLanes ? rows - r : kLanes;
      const int width = columns - c < kLanes ? columns - c : kLanes;
      f32 square[kLanes];
      if (height == kLanes && width == kLanes) {
#pragma clang loop unroll(full)
        for (int i = 0; i < kLanes; ++i) square[i] = scaled(load(src + (r + i) * stride + c));
        transpose_square(square);
#pragma clang loop unroll(full)
        for (int i = 0; i < kLanes; ++i) store(dst + (c + i) * ld + r, square[i]);
        continue;
      }
      for (int i = 0; i < kLanes; ++i)
        square[i] = i < height ? scaled(load_part(src + (r + i) * stride + c, width)) : f32{};
      transpose_square(square);
      for (int i = 0; i < width; ++i) {
        if (Pad || height == kLanes)
          store(dst + (c + i) * ld + r, square[i]);
        else
          store_part(dst + (c + i) * ld + r, square[i], height);
      }
    }
}

}  // namespace detail

/// dst (columns x rows) = src^T for a tensor's rows x columns, `stride` elements between rows. Pads
/// columns of dst with 0.
template <class T, int C>
static void transpose(const T* src, int64 stride, int rows, int columns, Tile<C> dst) {
  detail::transpose<true>(src, stride, rows, columns, dst.data, dst.kStride);
}

/// The same for a tile.
template <int From, int To>
static void transpose(Tile<From> src, int rows, int columns, Tile<To> dst) {
  transpose(src.data, src.kStride, rows, columns, dst);
}

/// dst (columns x rows, `ld` elements between rows) = src^T for a tile, times `factor` where
/// `Scaled`, rounded to T.
template <bool Scaled = false, int C, class T>
static void transpose(Tile<C> src, int rows, int columns, T* dst, int64 ld, float factor = 1.0F) {
  detail::transpose<false, Scaled>(src.data, src.kStride, rows, columns, dst, ld, factor);
}

/// dst (columns x rows) = src^T (rows x columns) for parts of tensors; strides count elements.
template <class From, class To>
static void transpose(const From* src, int64 stride, int rows, int columns, To* dst, int64 ld) {
  detail::transpose<false>(src, stride, rows, columns, dst, ld);
}

}  // namespace wyvern::cpu
