// Tiles in shared memory and how they get there.
#pragma once

#include "device/cuda/float8.cuh"
#include "device/cuda/layout.hpp"

namespace wyvern::cuda {

WYVERN_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
WYVERN_DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
WYVERN_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
WYVERN_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

/// 16-bit tensor-core products, as opposed to fp32 ones in a Precision.
template <class T>
inline constexpr bool kHalf = sizeof(T) == 2;

/// The widest access that divides `elements` elements of T, 16 bytes at most.
template <class T>
WYVERN_DEVICE constexpr int vector_bytes(int elements) {
  int bytes = 16;
  while (elements * static_cast<int>(sizeof(T)) % bytes != 0) bytes /= 2;
  return bytes;
}

/// N elements that move in one access of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T at[N];
};
using Float2 = Vector<float, 2>;

/// N elements from `from`, which is a multiple of N elements from a 16-byte boundary.
template <int N, class T>
WYVERN_DEVICE Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

WYVERN_DEVICE uint32 word_of(float x) { return float_bits(x); }
WYVERN_DEVICE uint32 word_of(uint32 x) { return x; }

/// Writes N elements to `to`, which is a multiple of N elements from a 16-byte boundary: to global
/// memory, or to shared memory.
template <bool Shared = false, class T, int N>
WYVERN_DEVICE void store_vector(T* to, const Vector<T, N>& x) {
  constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  if constexpr (kWords == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = x.at[i];
  } else {
    uint32 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 1)
        words[i] = x.at[4 * i].bits | static_cast<uint32>(x.at[4 * i + 1].bits) << 8U |
                   static_cast<uint32>(x.at[4 * i + 2].bits) << 16U |
                   static_cast<uint32>(x.at[4 * i + 3].bits) << 24U;
      else if constexpr (sizeof(T) == 2)
        words[i] = x.at[2 * i].bits | static_cast<uint32>(x.at[2 * i + 1].bits) << 16U;
      else
        words[i] = word_of(x.at[i]);
    }
    if constexpr (kWords == 1)
      *reinterpret_cast<uint32*>(to) = words[0];
    else if constexpr (Shared)
      store_shared_words(to, words);
    else
      store_words(to, words);
  }
}

/// A row-major tile in shared memory.
template <class T, int Rows, int Cols>
struct Tile {
  static constexpr int kRows = Rows;
  static constexpr int kCols = Cols;
  static constexpr int kStride = tile_stride(Cols);
  static constexpr int kBytes = Rows * kStride * static_cast<int>(sizeof(T));
  using Element = T;

  T* data;

  WYVERN_DEVICE T* at(int row, int col) const { return data + row * kStride + col; }
};

// A class, because GCC 12 does not get through an alias whose Place depends on a template
// parameter.
template <TilePlace Place>
struct TileOf {
  using Type = Tile<Element<Place.type>, Place.rows, Place.cols>;
};

/// The type of the tile that a layout has in Place.
template <TilePlace Place>
using TileAt = typename TileOf<Place>::Type;

/// That tile, of a layout which starts at `start`.
template <TilePlace Place>
WYVERN_DEVICE TileAt<Place> tile_at(unsigned char* start) {
  return {reinterpret_cast<Element<Place.type>*>(start + Place.offset)};
}

/// The array that a layout which starts at `start` has in Place.
template <ArrayPlace Place>
WYVERN_DEVICE Element<Place.type>* array_at(unsigned char* start) {
  return reinterpret_cast<Element<Place.type>*>(start + Place.offset);
}

/// One vector of a tile: copied, or zeros when not `valid`.
template <int Bytes, class T>
WYVERN_DEVICE void load_vector(T* to, const T* from, bool valid) {
  if constexpr (Bytes >= 4)
    copy_async<Bytes>(to, from, valid);
  else
    *to = valid ? *from : T{};
}

/// Starts copying Rows x Cols elements, rows `row_stride` elements apart, into `tile`. Rows at or
/// past `rows` and columns at or past `cols` become zeros. Every row starts at a multiple of Align
/// elements from the tensor's 16-byte-aligned base, and `cols` is such a multiple or at least Cols.
/// All Threads of the block take part; the tile is there after copy_async_wait and sync_block.
template <int Threads, int Align, class T, int Rows, int Cols>
WYVERN_DEVICE void load_tile(const Tile<T, Rows, Cols>& tile, const T* source, int64 row_stride,
                             int rows, int cols) {
  constexpr int kBytes = vector_bytes<T>(Align);
  constexpr int kVector = kBytes / static_cast<int>(sizeof(T));
  constexpr int kPerRow = round_up(Cols, 16) / kVector;
  if constexpr (Threads % kPerRow == 0) {
    // A thread stays in its column: one address, and equal steps from it.
    constexpr int kStep = Threads / kPerRow;
    const int row = thread_index() / kPerRow;
    const int col = thread_index() % kPerRow * kVector;
    const int64 step = kStep * row_stride;
    const T* from = source + row * row_stride + col;
    T* const to = tile.at(row, col);
    const int valid_rows = col < cols ? rows - row : 0;
#pragma unroll
    for (int r = 0; r < Rows; r += kStep) {
      if (Rows % kStep == 0 || row + r < Rows)
        load_vector<kBytes>(to + r * tile.kStride, from, r < valid_rows);
      from += step;
    }
  } else if constexpr (kPerRow % Threads == 0) {
    // All threads have the same row, parts of it in turn. A loop: unrolled over all rows, addresses
    // and sizes of copies would fill the registers.
    const int own = thread_index() * kVector;
    const T* from = source + own;
#pragma unroll 4
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int col = 0; col < kPerRow * kVector; col += Threads * kVector)
        load_vector<kBytes>(tile.at(row, own + col), from + col, row < rows && own + col < cols);
      from += row_stride;
    }
  } else {
#pragma unroll
    for (int first = 0; first < Rows * kPerRow; first += Threads) {
      const int row = (first + thread_index()) / kPerRow;
      const int col = (first + thread_index()) % kPerRow * kVector;
      if (row < Rows)
        load_vector<kBytes>(tile.at(row, col), source + row * row_stride + col,
                            row < rows && col < cols);
    }
  }
}

/// Starts copying `rows` elements `stride` apart, zeros up to Count.
template <int Threads, int Count, class T>
WYVERN_DEVICE void load_column(T* to, const T* source, int64 stride, int rows) {
#pragma unroll
  for (int first = 0; first < Count; first += Threads) {
    const int i = first + thread_index();
    if (Count % Threads != 0 && i >= Count) break;
    load_vector<sizeof(T)>(to + i, source + i * stride, i < rows);
  }
}

/// The least power of two that is not below n.
WYVERN_DEVICE constexpr int power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

}  // namespace wyvern::cuda
