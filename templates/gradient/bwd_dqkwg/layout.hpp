// What a block of bwd_dqkwg keeps in shared memory.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cuda/backward_layout.hpp"

namespace wyvern::bwd_dqkwg {

/// The pipeline's buffers, then tiles and arrays of the whole kernel.
template <class S>
struct SharedLayout {
  cuda::TilePlace dO, v_new, du, P;
  cuda::ArrayPlace diagonal, pairs;
  cuda::gradient::ColumnPlace columns;
  cuda::ArrayPlace gate, end;
  int bytes;

  constexpr explicit SharedLayout(const S& s) {
    cuda::LayoutBuilder at;
    at.take(s.num_stages * cuda::gradient::StateBufferLayout<S>(s).bytes);
    dO = cuda::gradient::take_values(at, s);
    v_new = cuda::gradient::take_values(at, s);
    du = cuda::gradient::take_values(at, s);
    P = cuda::gradient::take_square(at, s);
    diagonal = at.array(s.BT);
    pairs = at.array(s.BT * earlier_steps(s));
    columns = cuda::gradient::take_columns(at, s);
    gate = cuda::gradient::take_row_sums(at, s);
    end = at.array(s.num_warps);
    bytes = at.bytes;
  }
};

}  // namespace wyvern::bwd_dqkwg
