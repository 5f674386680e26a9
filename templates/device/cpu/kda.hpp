// Products whose decay differs by key channel, sum over c of x_rc k_sc exp(G_rc - G_sc). As on CUDA
// the decay is shared out around an anchor row n between s and r: x exp(G_r - G_n) and
// k exp(G_n - G_s), both exponents <= 0. Bounded gates admit any n within eight rows of r.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

/// Rows that share an anchor: with a bounded gate one strip's rows with themselves too; without,
/// with the rows before them only, and those among themselves have their own exponents each.
template <bool Bounded>
constexpr int kAnchorRows = Bounded ? 16 : 8;

/// The anchor of the strip of rows that starts at `first`, in a chunk of `rows`.
template <bool Bounded>
inline int anchor_row(int first, int rows) {
  return !Bounded ? first : first + 8 < rows ? first + 8 : rows - 1;
}

/// exp(x), for an x that is 0 or less where `Bounded` is not set: elsewhere nobody looks.
template <bool Bounded>
inline f32 anchored_exp(f32 x) {
  return exp(Bounded ? x : at_most(x, f32{}));
}

/// dst_rc = src_rc exp(G_rc - anchor_c), rows at or after the anchor.
template <bool Bounded>
[[gnu::noinline]] static void decay_after(const float* src, const float* G, int64 ld,
                                          const float* anchor, int rows, int columns, float* dst) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes)
      store(dst + r * ld + c, load(src + r * ld + c) *
                                  anchored_exp<Bounded>(load(G + r * ld + c) - load(anchor + c)));
}

/// dst_cs = k_cs exp(G_cn - G_cs) for `keys` columns at or before column n = `anchor`; all three
/// are transposed, a row a channel.
template <bool Bounded>
[[gnu::noinline]] static void decay_before_transposed(const float* k, const float* G, int64 ld,
                                                      int anchor, int channels, int keys,
                                                      float* dst) {
  for (int c = 0; c < channels; ++c) {
    const float from = G[c * ld + anchor];
    for (int s = 0; s < keys; s += kLanes)
      store(dst + c * ld + s,
            load(k + c * ld + s) * anchored_exp<Bounded>(from - load(G + c * ld + s)));
  }
}

/// Products of query and key r with key s, s <= r, for the first `rows` of up to kAnchorRows<false>
/// rows, each pair with its own exponents: to qk[r * ld_out + s] and, for s < r, kk[...].
[[gnu::noinline]] static void pair_products(const float* q, const float* k, const float* G,
                                            int64 ld, int rows, int columns, float* qk, float* kk,
                                            int64 ld_out) {
  for (int r = 0; r < rows; ++r)
    for (int s = 0; s <= r; ++s) {
      f32 sum_q{}, sum_k{};
      for (int c = 0; c < columns; c += kLanes) {
        const f32 x =
            load(k + s * ld + c) * anchored_exp<false>(load(G + r * ld + c) - load(G + s * ld + c));
        sum_q += load(q + r * ld + c) * x;
        sum_k += load(k + r * ld + c) * x;
      }
      qk[r * ld_out + s] = sum(sum_q);
      if (s < r) kk[r * ld_out + s] = sum(sum_k);
    }
}

/// What the products of a chunk's queries and keys are made of, as tiles of row_stride(K) floats a
/// row: `k`, `q` and `G`, and of row_stride(chunk size): their transposes.
struct IntraTiles {
  float *q, *k, *G;
  float *k_t, *G_t;
  float* left;      ///< 2 kAnchorRows rows of row_stride(K)
  float* right;     ///< K rows of row_stride(chunk size)
  float* products;  ///< 2 kAnchorRows rows of row_stride(chunk size): of queries, then of keys

  IntraTiles(Scratch& scratch, int chunk, int channels, int strip)
      : q(scratch.tile(chunk, channels)),
        k(scratch.tile(chunk, channels)),
        G(scratch.tile(chunk, channels)),
        k_t(scratch.tile(channels, chunk)),
        G_t(scratch.tile(channels, chunk)),
        left(scratch.tile(2 * strip, channels)),
        right(scratch.tile(channels, chunk)),
        products(scratch.tile(2 * strip, chunk)) {}
};

/// Where a chunk of one value head's rows are: `row` counts heads of tokens, key heads for
/// `key_row`.
struct IntraRows {
  int64 row, key_row;
  int rows;
};

/// Fills in the tiles of a chunk, Chunk_ rows long at most, queries and keys with their scales
/// where `Scaled`. `scale` is scratch of a value a row.
template <bool Scaled, int H_, int HV_, int K_, int Chunk_, class T>
static void load_intra(const IntraTiles& to, const IntraRows& from, const T* q, const T* k,
                       const float* Gk, const float* q_rstd, const float* k_rstd, float* scale) {
  constexpr int64 kKeyRow = row_stride(K_), kRow = row_stride(Chunk_), kStride = int64{H_} * K_;
  const int rows = from.rows;
  if constexpr (Scaled) load_column(q_rstd + from.key_row, H_, rows, scale);
  load_tile<Scaled>(q + from.key_row * K_, kStride, rows, K_, to.q, kKeyRow, scale);
  if constexpr (Scaled) load_column(k_rstd + from.key_row, H_, rows, scale);
  load_tile<Scaled>(k + from.key_row * K_, kStride, rows, K_, to.k, kKeyRow, scale);
  load_tile(Gk + from.row * K_, int64{HV_} * K_, rows, K_, to.G, kKeyRow);
  transpose<true>(to.k, kKeyRow, rows, K_, to.k_t, kRow);
  transpose<true>(to.G, kKeyRow, rows, K_, to.G_t, kRow);
}

/// Products with the keys up to their own, for a strip of rows from `first`: rows of queries, then
/// as many of keys, to `products`. Its rows number at most kAnchorRows, and are returned. What lies
/// above the diagonal may be anything.
template <bool Bounded>
static int strip_products(const IntraTiles& tiles, int64 ld_K, int64 ld, int channels, int first,
                          int chunk_rows) {
  constexpr int kRows = kAnchorRows<Bounded>;
  const int rows = chunk_rows - first < kRows ? chunk_rows - first : kRows;
  const int keys = Bounded ? first + rows : first;
  const int n = anchor_row<Bounded>(first, chunk_rows);
  const float* q = tiles.q + first * ld_K;
  const float* k = tiles.k + first * ld_K;
  const float* G = tiles.G + first * ld_K;
  if (keys > 0) {
    const float* anchor = tiles.G + n * ld_K;
    decay_after<Bounded>(q, G, ld_K, anchor, rows, channels, tiles.left);
    decay_after<Bounded>(k, G, ld_K, anchor, rows, channels, tiles.left + rows * ld_K);
    clear_rows(tiles.left, ld_K, 2 * rows, round_up(2 * rows, kTileRows), channels);
    decay_before_transposed<Bounded>(tiles.k_t, tiles.G_t, ld, n, channels, keys, tiles.right);
    multiply(2 * rows, keys, channels, tiles.left, ld_K, tiles.right, ld, tiles.products, ld);
  }
  if constexpr (!Bounded)
    pair_products(q, k, G, ld_K, rows, channels, tiles.products + first,
                  tiles.products + rows * ld + first, ld);
  return rows;
}

/// dst_s = factor x_s for the `keys` first of `columns`, else 0.
inline void masked_row(const float* x, float factor, int keys, int columns, float* dst) {
  const i32 lanes = lane_numbers();
  for (int s = 0; s < columns; s += kLanes)
    store(dst + s, lanes < keys - s ? load(x + s) * factor : f32{});
}

/// q <- exp(G) q, k <- exp(G_last - G) k, and factor = rate exp(G) k with k as it was; rows of
/// `factor` are padded with 0 to whole kTileRows.
[[gnu::noinline]] static void decay_keys(float* q, float* k, const float* G, int64 ld, int rows,
                                         int columns, const float* rate, float* factor) {
  const float* last = G + (rows - 1) * ld;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes) {
      const int64 i = r * ld + c;
      const f32 G_r = load(G + i), k_r = load(k + i);
      const f32 decay = exp(G_r);
      store(q + i, load(q + i) * decay);
      store(factor + i, k_r * decay * rate[r]);
      store(k + i, k_r * exp(load(last + c) - G_r));
    }
  clear_rows(factor, ld, rows, round_up(rows, kTileRows), columns);
}

}  // namespace wyvern::cpu
