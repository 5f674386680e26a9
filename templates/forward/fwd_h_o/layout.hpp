// What a block of fwd_h_o keeps in shared memory: the scan's buffers, then its own.
#pragma once

#include "device/cuda/scan_layout.hpp"

namespace wyvern::fwd_h_o {

/// num_stages buffers for the queries of chunks, and the scores of one chunk; places are offsets
/// in one buffer, and behind all of them.
template <class S>
struct SharedLayout {
  int first;  ///< where the buffers start
  cuda::TilePlace q;
  cuda::ArrayPlace q_rstd;
  int buffer_bytes;
  cuda::TilePlace scores;
  cuda::TilePlace values;  ///< V', of warps that share columns
  cuda::ArrayPlace sums;   ///< of outputs, between these
  int bytes;

  constexpr explicit SharedLayout(const S& s) : first(cuda::ForwardScanLayout<S>(s).bytes) {
    cuda::LayoutBuilder at;
    q = at.tile(s.BT, cuda::padded(s.K), s.DTYPE);
    if (s.QK_L2NORM) q_rstd = at.array(s.BT);
    buffer_bytes = at.bytes;
    at.bytes = first + static_cast<int>(s.num_stages * buffer_bytes);
    scores = at.tile(s.BT, s.BT, s.DTYPE);
    if (cuda::key_parts(s) > 1) {
      values = at.tile(s.BT, s.BV, s.DTYPE);
      sums = at.array(cuda::handed_sums(s));
    }
    bytes = at.bytes;
  }
};

}  // namespace wyvern::fwd_h_o
