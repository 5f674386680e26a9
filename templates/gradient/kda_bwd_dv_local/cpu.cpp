// dv_local of one chunk and value head, BV columns at a time.
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/state_unit.hpp"
#include "gradient/kda_bwd_dv_local/cpu_layout.hpp"

/// Rows of one product, which starts at the diagonal: elements left of it are zero.
constexpr int kStrip = 16;

constexpr kda_bwd_dv_local::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  const int64 at = chunk.token * e.HV + block[0];
  const int rows = chunk.rows;
  if (rows <= 0) return;

  const auto attention = tile_at<kScratch.attention>(memory);
  const auto gradient = tile_at<kScratch.gradient>(memory);
  const auto result = tile_at<kScratch.result>(memory);

  load_tile(Aqk + at * BT, int64{e.HV} * BT, rows, BT, attention);
  for (int c = 0; c < V; c += BV) {
    const int columns = V - c < BV ? V - c : BV;
    load_tile(rows_in(chunk, dO, dO_stride, block[0] * V + c), rows, columns, gradient);
    for (int s = 0; s < rows; s += kStrip)
      multiply<Layout::columns>(rows - s < kStrip ? rows - s : kStrip, columns, rows - s,
                                attention.from(s, s), gradient.from(s), result.from(s));
    store_tile(result, rows, columns, dv_local + at * V + c, int64{e.HV} * V,
               e.scale / unit_of_gradients<Spec>(e));
  }
}
