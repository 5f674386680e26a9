// What a block of the state scan, of its reverse and of the templates that carry states from
// segment to segment keeps in shared memory.
#pragma once

#include "device/cuda/layout.hpp"

namespace wyvern::cuda {

/// num_stages buffers that chunks pass through on the way from the first to the last; places are
/// offsets in one buffer.
template <class S>
struct ForwardScanLayout {
  TilePlace w, k, u;
  ArrayPlace G;       // of the chunk's rows
  ArrayPlace Gk_end;  // of the chunk's last row
  ArrayPlace k_rstd;
  int buffer_bytes;
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
    bytes = static_cast<int>(s.num_stages * buffer_bytes);
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
    bytes = static_cast<int>(s.num_stages * buffer_bytes);
  }
};

/// The transposed states at two neighbouring borders of segments, and two tiles of rows of M; those
/// of even and odd borders and tiles.
template <class S>
struct CombineLayout {
  TilePlace even_state, odd_state, even_rows, odd_rows;
  int bytes;

  constexpr explicit CombineLayout(const S& s) {
    LayoutBuilder at;
    even_state = at.tile(s.BV, padded(s.K), DType::fp32);
    odd_state = at.tile(s.BV, padded(s.K), DType::fp32);
    even_rows = at.tile(s.BK, padded(s.K), DType::fp32);
    odd_rows = at.tile(s.BK, padded(s.K), DType::fp32);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cuda
