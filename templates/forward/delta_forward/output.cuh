// delta_forward's epilogues: a chunk's output as it is computed, or with the norm of o and its
// gate. By a consumer warpgroup, which has 64 columns of V of the chunk's rows, transposed.
#pragma once

#include "device/cuda/sm90/transposed_rows.cuh"
#include "forward/delta_forward/prepare.cuh"

using Columns = sm90::Accumulator<kRows>;  // of V, one for each row of a chunk

WYVERN_DEVICE SquareTile output_tile(const Block& b, int consumer, int chunk) {
  return b.output(kLayout.outputs * consumer + chunk % kLayout.outputs);
}

/// Rounded columns of a consumer, transposed: its state, and V' of a chunk.
using StateFragment = sm90::FragmentA<DTYPE, K>;
using ValueFragment = sm90::FragmentA<DTYPE, kRows>;

/// An output beside which nothing of chunks is written.
struct NothingKept {
  WYVERN_DEVICE void keep_state(const Block&, int, const StateFragment&, int) const {}
  WYVERN_DEVICE void wait_values() const {}
};

/// Stores the output as it is.
struct PlainOutput : NothingKept {
  const TensorMap& map;
  TokenRows<DTYPE> rows;

  /// When the chunk's products have started.
  WYVERN_DEVICE void prefetch(const Block&, int, int) const {}

  /// Stores a chunk's output, unless it is the overlap's: by a TMA store, or row by row where the
  /// sequence ends inside the chunk.
  WYVERN_DEVICE void store(const Block& block, int consumer, const Columns& x, int chunk) const {
    const Block b = recalled(block);
    if (chunk < b.overlap) return;
    const int thread = thread_index() % 128;
    const SquareTile tile = output_tile(b, consumer, chunk);
    // With one buffer its last store must have read it; with two the barrier below orders that.
    if constexpr (kLayout.outputs == 1) {
      if (thread == 0) sm90::bulk_wait_read<0>();
      sync_named(1 + consumer, 128);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = pack<DTYPE>(x.x[8 * j + 2 * i], x.x[8 * j + 2 * i + 1]);
      sm90::store_matrix_x4_transposed(sm90::matrices_at(tile, 2 * j), packed);
    }
    sm90::fence_proxy_async();
    if (kLayout.outputs > 1 && thread == 0) sm90::bulk_wait_read<0>();
    sync_named(1 + consumer, 128);
    sm90::store_rows(map, rows, tile, b.token + chunk * kRows, b.rows(chunk),
                     kPanels * b.tile + consumer, b.head, V);
  }
};

/// Normalizes and gates the output of two consumers, which have all columns of V. The gate's input
/// is loaded to the tile that the output is staged in: a lane reads it where it writes the output.
template <class S>
struct NormOutput : NothingKept {
  static constexpr int kConsumersName = kConsumers + 2;  ///< of a named barrier

  const TensorMap& map;
  TokenRows<DTYPE> rows;
  const TensorMap& gate_map;
  const float* weight;
  float eps;

  WYVERN_DEVICE void prefetch(const Block& block, int consumer, int chunk) const {
    if (thread_index() % 128 != 0) return;
    const Block b = recalled(block);
    if (chunk < b.overlap || chunk >= b.chunks) return;
    sm90::bulk_wait_read<0>();
    sm90::Barrier* const full = b.barrier<kLayout.gate_full>(consumer);
    sm90::barrier_arrive_expect(full, SquareTile::kBytes);
    sm90::tensor_load(output_tile(b, consumer, chunk).data, gate_map,
                      {0, static_cast<int>(b.token) + chunk * kRows, consumer, b.head}, full);
  }

  WYVERN_DEVICE void store(const Block& block, int consumer, const Columns& x, int chunk) const {
    const Block b = recalled(block);
    if (chunk < b.overlap) return;
    share_squares(b, consumer, x, chunk);
    float* const rstd = sum_squares(b, consumer, chunk);
    sync_named(1 + consumer, 128);
    const SquareTile tile = output_tile(b, consumer, chunk);
    sm90::barrier_wait(b.barrier<kLayout.gate_full>(consumer),
                       static_cast<uint32>(chunk - b.overlap) % 2);
    const int column = consumer * kColumns + static_cast<int>(warp_index()) % 4 * 16 +
                       static_cast<int>(lane_index()) / 4;
    const float weights[2] = {weight[column], weight[column + 8]};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32 pairs[4];
      load_matrix_x4_transposed(pairs, sm90::matrices_at(tile, 2 * j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Float2 z = sm90::unpack<DTYPE>(pairs[i]);
        const auto of_row = load<2>(rstd + Columns::col(8 * j + 4 * (i / 2)));
        float y[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
          y[n] = gated<S>(x.x[8 * j + 2 * i + n] * (of_row.at[n] * weights[i % 2]), z.at[n]);
        pairs[i] = pack<DTYPE>(y[0], y[1]);
      }
      sm90::store_matrix_x4_transposed(sm90::matrices_at(tile, 2 * j), pairs);
    }
    sm90::fence_proxy_async();
    sync_named(1 + consumer, 128);
    sm90::store_rows(map, rows, tile, b.token + chunk * kRows, b.rows(chunk), consumer, b.head, V);
  }

 private:
  /// Where the squares of a row's columns are summed: by warps of both consumers, in chunks of
  /// either parity.
  WYVERN_DEVICE static float* squares_of(const Block& b, int chunk) {
    return array_at<kLayout.squares>(b.shared) + chunk % 2 * (8 * kRows);
  }

  /// Sums the squares of a warp's 16 columns, two rows a lane.
  WYVERN_DEVICE static void share_squares(const Block& b, int consumer, const Columns& x,
                                          int chunk) {
    const int lane = lane_index();
    float part[16];
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        part[2 * i + n] = fused_multiply_add(x.x[4 * i + n], x.x[4 * i + n],
                                             x.x[4 * i + 2 + n] * x.x[4 * i + 2 + n]);
    // Lanes exchange halves of their rows: those with the bit keep the upper half.
#pragma unroll
    for (int half = 8, bit = 16; half >= 2; half /= 2, bit /= 2) {
      const bool upper = (lane & bit) != 0;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float sent = upper ? part[i] : part[half + i];
        part[i] = (upper ? part[half + i] : part[i]) + shuffle_xor(sent, bit);
      }
    }
    const int eight = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    const int warp = 4 * consumer + static_cast<int>(warp_index()) % 4;
    *reinterpret_cast<Float2*>(squares_of(b, chunk) + warp * kRows + eight * 8 +
                               lane % 4 * 2) = {{part[0], part[1]}};
    sync_named(kConsumersName, 256);
  }

  /// 1 / sqrt(mean + eps) of each row, by the first 64 threads of a warpgroup.
  WYVERN_DEVICE float* sum_squares(const Block& b, int consumer, int chunk) const {
    float* const rstd = array_at<kLayout.rstd>(b.shared) + consumer * kRows;
    const int row = thread_index() % 128;
    if (row < kRows) {
      const float* const squares = squares_of(b, chunk);
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 8; ++warp) sum += squares[warp * kRows + row];
      rstd[row] = norm_rstd<V>(sum, eps);
    }
    return rstd;
  }
};
