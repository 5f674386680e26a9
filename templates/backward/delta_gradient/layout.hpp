// Shared memory of a block of delta_gradient.
#pragma once

#include "device/cuda/sm90/layout.hpp"

namespace wyvern::delta_gradient {

constexpr int kRows = 64;      ///< of a chunk
constexpr int kChannels = 64;  ///< of K in a slice
constexpr int kStages = 2;     ///< of factors; q and k, F, and sums have one
constexpr int kItemWords = 5;  ///< of an item

/// Columns of V in a band: all gradients but v's are sums over columns, so a block goes through the
/// bands of a value head as if each were a head. V is a multiple of 64.
constexpr int band_of(long long K, long long V) {
  if (K > 128 && V % 256 != 0 && V % 192 == 0) return 192;  // bands of 128 would spill
  int columns = K > 128 || V <= 256 ? 256 : 128;
  while (columns > 64 && V % columns != 0) columns /= 2;
  return columns;
}

template <class S>
struct HopperLayout {
  int band;         ///< columns of V in a band
  int row_stages;   ///< of a band's rows
  int part_rows;    ///< rows of S^T and dS'^T (of V) that are loaded together
  int part_stages;  ///< pipeline stages of such parts
  cuda::sm90::SwizzledPlace q, k;
  /// The first stage of a band's rows: `tiles` bytes from one to the next.
  cuda::sm90::SwizzledPlace dO, z, dv;
  /// The first stage of a part of a slice of S^T and of dS'^T: `parts` bytes from one to the next.
  cuda::sm90::SwizzledPlace state, dstate;
  /// F and M of a band. dk is staged in M's place, dq in `staging`.
  cuda::sm90::SwizzledPlace F, M, staging;
  int tiles, parts;
  /// Factors of rows, the first stage; `factors` floats from one to the next. G: the running sum of
  /// gates in base 2; entering: exp(G); leaving: exp(G_C - G) times `column`; column: of k_s in
  /// products over rows s, beta times the norm's scale; anchored: the same decayed up to anchors.
  cuda::ArrayPlace G, entering, leaving, column, anchored;
  cuda::ArrayPlace query_scale, key_scale;  ///< of rows of q and k by their norms
  int factors;
  cuda::ArrayPlace own;  ///< o, from the queries' warpgroup to the keys'
  /// Sums over rows' channels: q dQ; k (R - C); k I, one a warp; and the diagonal of dV Z^T.
  cuda::ArrayPlace query_dots, key_dots, end_dots, values;
  cuda::ArrayPlace state_dots;  ///< <S, dS'>, a part a warp, two stages
  cuda::ArrayPlace item;        ///< whose q and k are loaded
  /// Full and empty barriers of the pipelines' stages.
  cuda::sm90::BarrierPlace keys, rows, states, scales, scores, sums;
  cuda::sm90::BarrierPlace tail_full;  ///< of a chunk with fewer rows
  int bytes;

  constexpr explicit HopperLayout(const S& s) {
    cuda::LayoutBuilder at;
    const auto tile = [&](long long height, long long width) {
      return cuda::sm90::swizzled_tile(at, height, width, s.DTYPE);
    };
    band = band_of(s.K, s.V);
    const bool wide = s.K > 128 || band > 128;
    row_stages = wide ? 1 : 2;
    part_rows = static_cast<int>(wide ? 64 : band);
    part_stages = wide && (s.K <= 128 || band <= 128) ? 4 : 2;
    q = tile(kRows, s.K);
    k = tile(kRows, s.K);
    int first = at.bytes;
    dO = tile(kRows, band);
    z = tile(kRows, band);
    dv = tile(kRows, band);
    tiles = at.bytes - first;
    at.bytes = first + row_stages * tiles;
    first = at.bytes;
    state = tile(part_rows, kChannels);
    dstate = tile(part_rows, kChannels);
    parts = at.bytes - first;
    at.bytes = first + part_stages * parts;
    F = tile(kRows, kRows);
    M = tile(kRows, kRows);
    staging = tile(kRows, kChannels);
    first = at.bytes;
    for (cuda::ArrayPlace* place : {&G, &entering, &leaving, &column, &query_scale, &key_scale})
      *place = at.array(kRows);
    anchored = at.array(16 + 32 + 48);
    factors = (at.bytes - first) / 4;
    at.bytes = first + kStages * factors * 4;
    for (cuda::ArrayPlace* place : {&own, &query_dots, &key_dots, &values})
      *place = at.array(kRows);
    end_dots = at.array(4);
    state_dots = at.array(kStages * 4);
    item = at.array(kItemWords, DType::int32);
    rows = cuda::sm90::barriers(at, 2 * row_stages);
    states = cuda::sm90::barriers(at, 2 * part_stages);
    scales = cuda::sm90::barriers(at, 2 * kStages);
    for (cuda::sm90::BarrierPlace* place : {&keys, &scores, &sums})
      *place = cuda::sm90::barriers(at, 2);
    tail_full = cuda::sm90::barriers(at, 1);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::delta_gradient
