// Tiles of fp32 in scratch memory and their exchange with tensors.
//
// A tile with n columns has row_stride(n) floats between rows; the columns from n to the next whole
// vector are 0. Rows that are loaded for a product are padded with rows of 0 to whole kTileRows.
#pragma once

#include "device/cpu/math.hpp"
#include "device/cpu/scratch.hpp"

namespace wyvern::cpu {

using wyvern::scratch::row_stride;

/// Rows of a product's register tile. With 32 registers 8 x 2 accumulators hide the latency of two
/// FMA units; with 16 there is room for 4 x 2.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

/// Hands out scratch memory front to back.
class Scratch {
 public:
  explicit Scratch(void* memory) : next_(static_cast<float*>(memory)) {}
  float* tile(int rows, int columns) { return take(wyvern::scratch::tile(rows, columns)); }
  float* vector(int count) { return take(wyvern::scratch::vector(count)); }

 private:
  float* take(int64 floats) {
    float* start = next_;
    next_ += floats;
    return start;
  }
  float* next_;
};

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

template <class T>
inline void load_tile(const T* src, int64 stride, int rows, int columns, float* dst, int64 ld) {
  load_tile<false>(src, stride, rows, columns, dst, ld, nullptr);
}

/// dst (rows x columns, `stride` elements between rows) = factor * src, rounded to T.
template <class T>
[[gnu::noinline]] static void store_tile(const float* src, int64 ld, int rows, int columns, T* dst,
                                         int64 stride, float factor = 1.0F) {
  const int whole = columns / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const float* from = src + r * ld;
    T* to = dst + r * stride;
    for (int c = 0; c < whole; c += kLanes) store(to + c, load(from + c) * factor);
    if (whole < columns) store_part(to + whole, load(from + whole) * factor, columns - whole);
  }
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

}  // namespace detail

/// dst (columns x rows) = src^T (src is rows x columns); strides count elements. `Pad`: dst is a
/// tile, whose columns from `rows` to the next whole vector become 0; else nothing else is written.
template <bool Pad, class From, class To>
[[gnu::noinline]] static void transpose(const From* src, int64 stride, int rows, int columns,
                                        To* dst, int64 ld) {
  for (int r = 0; r < rows; r += kLanes)
    for (int c = 0; c < columns; c += kLanes) {
      const int height = rows - r < kLanes ? rows - r : kLanes;
      const int width = columns - c < kLanes ? columns - c : kLanes;
      f32 square[kLanes];
      if (height == kLanes && width == kLanes) {
#pragma clang loop unroll(full)
        for (int i = 0; i < kLanes; ++i) square[i] = load(src + (r + i) * stride + c);
        detail::transpose_square(square);
#pragma clang loop unroll(full)
        for (int i = 0; i < kLanes; ++i) store(dst + (c + i) * ld + r, square[i]);
        continue;
      }
      for (int i = 0; i < kLanes; ++i)
        square[i] = i < height ? load_part(src + (r + i) * stride + c, width) : f32{};
      detail::transpose_square(square);
      for (int i = 0; i < width; ++i) {
        if (Pad || height == kLanes)
          store(dst + (c + i) * ld + r, square[i]);
        else
          store_part(dst + (c + i) * ld + r, square[i], height);
      }
    }
}

}  // namespace wyvern::cpu
