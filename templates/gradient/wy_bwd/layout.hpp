// What a block of wy_bwd keeps in shared memory.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cuda/backward_layout.hpp"

namespace wyvern::wy_bwd {

/// One of the buffers that tiles of BK columns pass through.
template <class S>
struct BufferLayout {
  cuda::TilePlace k, dw;
  int bytes;

  constexpr explicit BufferLayout(const S& s) {
    cuda::LayoutBuilder at;
    k = at.tile(s.BT, s.BK, s.DTYPE);
    dw = at.tile(s.BT, s.BK, s.DTYPE);
    bytes = at.bytes;
  }
};

/// The pipeline's buffers, in whose place v is until the first is filled, then tiles and arrays of
/// the whole kernel.
template <class S>
struct SharedLayout {
  cuda::TilePlace v, v_new, x, Tinv, N;
  cuda::ArrayPlace pairs, beta, values;
  cuda::gradient::ColumnPlace columns;
  cuda::ArrayPlace gate, keys, all_keys;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder before, at;
    v = cuda::gradient::take_values(before, s);
    at.take(s.num_stages * BufferLayout<S>(s).bytes);
    at.cover(before);
    v_new = cuda::gradient::take_values(at, s);
    x = cuda::gradient::take_values(at, s);
    Tinv = cuda::gradient::take_square(at, s);
    N = cuda::gradient::take_square(at, s);
    pairs = at.array(s.BT * earlier_steps(s));
    beta = at.array(s.BT);
    values = at.array(s.num_warps * s.BT);
    columns = cuda::gradient::take_columns(at, s);
    gate = cuda::gradient::take_row_sums(at, s);
    keys = cuda::gradient::take_row_sums(at, s);
    if (earlier_steps(s) > 0) all_keys = cuda::gradient::take_row_sums(at, s);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::wy_bwd
