// What a block of the state scan, of its reverse and of the templates that carry states from
// segment to segment keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda {

/// Warps of a scan that have the same columns of the state, each a part of their keys: more than
/// one where there are more warps than strips of sixteen columns.
template <class S>
constexpr int key_parts(const S& s) {
  return s.num_warps * 16 > s.BV ? static_cast<int>(s.num_warps * 16 / s.BV) : 1;
}

/// What warps that share columns hand each other: of each warp the sums, over its keys, of the rows
/// of a chunk that are its neighbour's.
template <class S>
constexpr long long handed_sums(const S& s) {
  return key_parts(s) == 1 ? 0 : s.BV * s.BT;
}

/// num_stages buffers that chunks pass through on the way from the first to the last; places are
/// offsets in one buffer.
template <class S>
struct ForwardScanLayout {
  TilePlace w, k, u;
  ArrayPlace G;       // of the chunk's rows
  ArrayPlace Gk_end;  // of the chunk's last row
  ArrayPlace k_rstd;
  int buffer_bytes;
  ArrayPlace largest;  // behind the buffers: a number of each warp
  ArrayPlace sums;     // between warps that share columns
  int bytes;

  constexpr explicit ForwardScanLayout(const S& s) {
    LayoutBuilder at;
    w = at.tile(s.BT, padded(s.K), s.DTYPE);
    k = at.tile(s.BT, padded(s.K), s.DTYPE);
    u = at.tile(s.BT, s.BV, s.U_DTYPE);
    if (s.SCALAR_GATE) G = at.array(s.BT);
    if (s.VECTOR_GATE) Gk_end = at.array(padded(s.K));
    if (s.QK_L2NORM && !s.VECTOR_GATE) k_rstd = at.array(s.BT);
    buffer_bytes = at.bytes;
    at.bytes = static_cast<int>(s.num_stages * buffer_bytes);
    if (s.STATE_UNIT) largest = at.array(s.num_warps);
    sums = at.array(handed_sums(s));
    bytes = at.bytes;
  }
};

/// The same on the way from the last chunk to the first.
template <class S>
struct ReverseScanLayout {
  TilePlace q, k, w, dO, dv;
  ArrayPlace G;       // of the chunk's rows
  ArrayPlace Gk_end;  // of the chunk's last row
  ArrayPlace q_rstd, k_rstd;
  int buffer_bytes;
  ArrayPlace largest;  // behind the buffers: a number of each warp
  int bytes;

  constexpr explicit ReverseScanLayout(const S& s) {
    LayoutBuilder at;
    q = at.tile(s.BT, padded(s.K), s.DTYPE);
    k = at.tile(s.BT, padded(s.K), s.DTYPE);
    w = at.tile(s.BT, padded(s.K), s.DTYPE);
    dO = at.tile(s.BT, s.BV, s.DTYPE);
    dv = at.tile(s.BT, s.BV, s.DTYPE);
    if (s.SCALAR_GATE) G = at.array(s.BT);
    if (s.VECTOR_GATE) Gk_end = at.array(padded(s.K));
    if (s.QK_L2NORM && !s.VECTOR_GATE) {
      q_rstd = at.array(s.BT);
      k_rstd = at.array(s.BT);
    }
    buffer_bytes = at.bytes;
    at.bytes = static_cast<int>(s.num_stages * buffer_bytes);
    if (s.STATE_UNIT) largest = at.array(s.num_warps);
    bytes = at.bytes;
  }
};

/// The states at two neighbouring borders of segments: four rows of K side by side for each column
/// of V. Eight floats of padding after each four rows keep loads of fragments free of bank
/// conflicts.
template <class S>
struct CombineLayout {
  int floats = 0;     ///< of a state
  ArrayPlace states;  ///< of even borders, of odd borders
  int bytes;

  static constexpr int kRows = 4;
  static constexpr int stride(long long BV) { return static_cast<int>(BV) * kRows + 8; }

  constexpr explicit CombineLayout(const S& s) {
    LayoutBuilder at;
    floats = padded(s.K) / kRows * stride(s.BV);
    states = at.array(2LL * floats);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cuda
