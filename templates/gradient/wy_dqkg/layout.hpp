// What a block of wy_dqkg keeps in shared memory.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cuda/backward_layout.hpp"

namespace wyvern::wy_dqkg {

/// The pipeline's buffers, in whose place v is until the first is filled, then tiles and arrays of
/// the whole kernel.
template <class S>
struct SharedLayout {
  cuda::TilePlace v, dO, v_new, x, P, N;
  cuda::ArrayPlace diagonal, pairs_P, pairs_N, beta, values;
  cuda::gradient::ColumnPlace columns;
  cuda::ArrayPlace gate, keys, all_keys, end;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder before, at;
    v = cuda::gradient::take_values(before, s);
    at.take(s.num_stages * cuda::gradient::StateBufferLayout<S>(s).bytes);
    at.cover(before);
    dO = cuda::gradient::take_values(at, s);
    v_new = cuda::gradient::take_values(at, s);
    x = cuda::gradient::take_values(at, s);
    P = cuda::gradient::take_square(at, s);
    N = cuda::gradient::take_square(at, s);
    diagonal = at.array(s.BT);
    pairs_P = at.array(s.BT * earlier_steps(s));
    pairs_N = at.array(s.BT * earlier_steps(s));
    beta = at.array(s.BT);
    values = at.array(s.num_warps * s.BT);
    columns = cuda::gradient::take_columns(at, s);
    gate = cuda::gradient::take_row_sums(at, s);
    keys = cuda::gradient::take_row_sums(at, s);
    if (earlier_steps(s) > 0) all_keys = cuda::gradient::take_row_sums(at, s);
    end = at.array(s.num_warps);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::wy_dqkg
