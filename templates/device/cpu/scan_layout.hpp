// Scratch of the state scans' blocks.
#pragma once

#include "device/cpu/layout.hpp"

namespace wyvern::cpu {

/// Of ForwardScan.
template <class S>
struct ForwardScanLayout {
  TilePlace state, keys, values;
  VectorPlace decay, end_decay;
  long bytes;

  constexpr explicit ForwardScanLayout(const S& s, LayoutBuilder at = {}) {
    state = at.tile(s.K, s.BV);
    keys = at.tile(s.BT, s.K);  // W's rows, then K's
    values = at.tile(s.BT, s.BV);
    decay = at.vector(s.BT);
    end_decay = at.vector(s.K);
    bytes = at.bytes;
  }
};

/// Of ReverseScan.
template <class S>
struct ReverseScanLayout {
  TilePlace state, keys, values;
  VectorPlace from_start, to_end, end;
  long bytes;

  constexpr explicit ReverseScanLayout(const S& s, LayoutBuilder at = {}) {
    state = at.tile(s.K, s.BV);
    keys = at.tile(2 * s.BT, s.K);     // K's rows, then W's and after them Q's
    values = at.tile(2 * s.BT, s.BV);  // -dU's rows and after them dO's
    from_start = at.vector(s.BT);
    to_end = at.vector(s.BT);
    end = at.vector(s.K);
    bytes = at.bytes;
  }
};

/// Of SegmentStates.
template <class S>
struct SegmentStatesLayout {
  TilePlace state, next, M;
  VectorPlace ones;
  long bytes;

  constexpr explicit SegmentStatesLayout(const S& s, LayoutBuilder at = {}) {
    state = at.tile(s.K, s.BV);
    next = at.tile(s.K, s.BV);
    M = at.tile(s.K, s.K);
    ones = at.vector(s.K + 8);  // whole kTileRows
    bytes = at.bytes;
  }
};

}  // namespace wyvern::cpu
