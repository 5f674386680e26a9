// Products whose decay differs by key channel, sum over c of x_rc k_sc exp(G_rc - G_sc). As on CUDA
// the decay is divided at an anchor row n between s and r: x exp(G_r - G_n) and k exp(G_n - G_s),
// both exponents <= 0. Bounded gates admit any n within eight rows of r.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/kda_layout.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

/// The anchor of the strip of rows that starts at `first`, in a chunk of `rows`.
template <bool Bounded>
inline int anchor_row(int first, int rows) {
  return !Bounded ? first : first + 8 < rows ? first + 8 : rows - 1;
}

/// exp(x); without `Bounded` only results for x <= 0 are used.
template <bool Bounded>
inline f32 anchored_exp(f32 x) {
  return exp(Bounded ? x : at_most(x, f32{}));
}

/// dst_rc = src_rc exp(G_rc - anchor_c), rows at or after the anchor.
template <bool Bounded, int C>
[[gnu::noinline]] static void decay_after(Tile<C> src, Tile<C> G, const float* anchor, int rows,
                                          int columns, Tile<C> dst) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes)
      store(dst.row(r) + c,
            load(src.row(r) + c) * anchored_exp<Bounded>(load(G.row(r) + c) - load(anchor + c)));
}

/// dst_cs = k_cs exp(G_cn - G_cs) for `keys` columns at or before column n = `anchor`; all three
/// are transposed, a row a channel.
template <bool Bounded, int C>
[[gnu::noinline]] static void decay_before_transposed(Tile<C> k, Tile<C> G, int anchor,
                                                      int channels, int keys, Tile<C> dst) {
  for (int c = 0; c < channels; ++c) {
    const float from = G.row(c)[anchor];
    for (int s = 0; s < keys; s += kLanes)
      store(dst.row(c) + s, load(k.row(c) + s) * anchored_exp<Bounded>(from - load(G.row(c) + s)));
  }
}

/// Products of query and erasing key r with key s, s <= r, for the first `rows` of up to
/// anchor_rows(false) rows, each pair with its own exponents: to row r and column s of qk and, for
/// s < r, of kk.
template <int C, int Out>
[[gnu::noinline]] static void pair_products(Tile<C> q, Tile<C> erasing, Tile<C> k, Tile<C> G,
                                            int rows, int columns, Tile<Out> qk, Tile<Out> kk) {
  for (int r = 0; r < rows; ++r)
    for (int s = 0; s <= r; ++s) {
      f32 sum_q{}, sum_k{};
      for (int c = 0; c < columns; c += kLanes) {
        const f32 x =
            load(k.row(s) + c) * anchored_exp<false>(load(G.row(r) + c) - load(G.row(s) + c));
        sum_q += load(q.row(r) + c) * x;
        sum_k += load(erasing.row(r) + c) * x;
      }
      qk.row(r)[s] = sum(sum_q);
      if (s < r) kk.row(r)[s] = sum(sum_k);
    }
}

/// x *= gate over `rows` rows, element by element. Padding stays 0.
template <class Gate, int Cols>
[[gnu::noinline]] static void multiply_elements(const TokenRows<const Gate>& gate, int rows,
                                                int columns, Tile<Cols> x) {
  const int whole = columns / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const Gate* from = gate.row(r);
    float* to = x.row(r);
    for (int c = 0; c < whole; c += kLanes) store(to + c, load(to + c) * load(from + c));
    if (whole < columns)
      store(to + whole, load(to + whole) * load_part(from + whole, columns - whole));
  }
}

/// beta of the rows of a kernel with the constants S; 1 where elementwise gates replace it.
template <class S, class Beta>
static void load_rates(const TokenRows<const Beta>& beta, int rows, float* rate) {
  if constexpr (S::ERASE_WRITE)
    fill_column(rate, 1.0F, rows);
  else
    load_beta<S::BETA_SIGMOID, S::NEG_EIGVAL>(beta, rows, rate);
}

/// Where a chunk of one value head's rows are: `row` counts heads of tokens, key heads for
/// `key_row`.
struct IntraRows {
  int64 row, key_row;
  int rows;
  const Extents& e;
};

/// The products of a chunk's queries and keys, a strip of rows at a time.
template <class S>
struct IntraProducts {
  static constexpr int BT = S::BT, K = S::K;
  static constexpr bool kBounded = S::SAFE_GATE;
  static constexpr int kStrip = anchor_rows(kBounded);

  Tile<K> q, k, G;    ///< of the chunk's rows, q and k with their scales
  Tile<K> erasing;    ///< left operand of A: k, or with ERASE_WRITE erase k
  Tile<BT> k_t, G_t;  ///< transposed
  Tile<K> left;       ///< 2 kStrip rows
  Tile<BT> right;     ///< K rows
  Tile<BT> products;  ///< 2 kStrip rows: of queries, then of keys

  template <IntraProductsLayout<S> Place>
  static IntraProducts at(void* memory) {
    return {.q = tile_at<Place.q>(memory),
            .k = tile_at<Place.k>(memory),
            .G = tile_at<Place.G>(memory),
            .erasing = tile_at<Place.erasing>(memory),
            .k_t = tile_at<Place.k_t>(memory),
            .G_t = tile_at<Place.G_t>(memory),
            .left = tile_at<Place.left>(memory),
            .right = tile_at<Place.right>(memory),
            .products = tile_at<Place.products>(memory)};
  }

  /// Fills the tiles of a chunk from its rows of `queries`, `keys` and `erase`. `scale` is scratch
  /// of a value a row.
  template <class T, class Gate>
  void load(const IntraRows& from, const TokenRows<const T>& queries,
            const TokenRows<const T>& keys, const TokenRows<const Gate>& erase, const float* Gk,
            const float* q_rstd, const float* k_rstd, float* scale) const {
    const int rows = from.rows;
    if constexpr (S::QK_L2NORM) load_column(q_rstd + from.key_row, from.e.H, rows, scale);
    load_tile<S::QK_L2NORM>(queries, rows, K, q, scale);
    if constexpr (S::QK_L2NORM) load_column(k_rstd + from.key_row, from.e.H, rows, scale);
    load_tile<S::QK_L2NORM>(keys, rows, K, k, scale);
    if constexpr (S::ERASE_WRITE) {
      load_tile<S::QK_L2NORM>(keys, rows, K, erasing, scale);
      multiply_elements(erase, rows, K, erasing);
    }
    load_tile(Gk + from.row * K, int64{from.e.HV} * K, rows, K, G);
    transpose(k, rows, K, k_t);
    transpose(G, rows, K, G_t);
  }

  /// Products of a strip of rows from `first` with keys at or before them: rows of queries, then as
  /// many of erasing keys, to `products`. Returns the strip's rows, at most kStrip. Elements above
  /// the diagonal are undefined.
  int strip(int first, int chunk_rows) const {
    const int rows = chunk_rows - first < kStrip ? chunk_rows - first : kStrip;
    const int keys = kBounded ? first + rows : first;
    const int n = anchor_row<kBounded>(first, chunk_rows);
    const Tile<K> strip_q = q.from(first), strip_k = k.from(first), strip_G = G.from(first);
    const Tile<K> strip_erasing = erasing.from(first);
    if (keys > 0) {
      decay_after<kBounded>(strip_q, strip_G, G.row(n), rows, K, left);
      decay_after<kBounded>(strip_erasing, strip_G, G.row(n), rows, K, left.from(rows));
      clear_rows(left, 2 * rows, round_up(2 * rows, kTileRows), K);
      decay_before_transposed<kBounded>(k_t, G_t, n, K, keys, right);
      multiply(2 * rows, keys, K, left, right, products);
    }
    if constexpr (!kBounded)
      pair_products(strip_q, strip_erasing, strip_k, strip_G, rows, K, products.from(0, first),
                    products.from(rows, first));
    return rows;
  }
};

/// dst_s = factor x_s for the first `keys` of `columns` columns, else 0.
inline void masked_row(const float* x, float factor, int keys, int columns, float* dst) {
  const i32 lanes = lane_numbers();
  for (int s = 0; s < columns; s += kLanes)
    store(dst + s, lanes < keys - s ? load(x + s) * factor : f32{});
}

/// q <- exp(G) q, k <- exp(G_last - G) k, and factor = rate exp(G) k with k as it was; rows of
/// `factor` are padded with 0 to whole kTileRows.
template <int C>
[[gnu::noinline]] static void decay_keys(Tile<C> q, Tile<C> k, Tile<C> G, int rows, int columns,
                                         const float* rate, Tile<C> factor) {
  const float* last = G.row(rows - 1);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes) {
      const f32 G_r = load(G.row(r) + c), k_r = load(k.row(r) + c);
      const f32 decay = exp(G_r);
      store(q.row(r) + c, load(q.row(r) + c) * decay);
      store(factor.row(r) + c, k_r * decay * rate[r]);
      store(k.row(r) + c, k_r * exp(load(last + c) - G_r));
    }
  clear_rows(factor, rows, round_up(rows, kTileRows), columns);
}

}  // namespace wyvern::cpu
