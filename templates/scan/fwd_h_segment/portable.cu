// What a segment does to a state, S -> M S + R: R is what the scan makes of a state of zeros, and M
// what it makes of the identity when there are no values. One block BV columns of M or of R.
#include "device/cuda/scan.cuh"
#include "device/cuda/segment.cuh"

using Scan = ForwardScan<Spec, VECTOR_GATE>;

constexpr int kTilesK = ceil_div(K, BV);
constexpr int kTilesV = Scan::kTilesV;

WYVERN_KERNEL(Scan::kThreads, min_blocks) {
  const int tile = block_index() % (kTilesK + kTilesV);
  const int head = block_index() / (kTilesK + kTilesV) % e.HV;
  const int slot = block_index() / (kTilesK + kTilesV) / e.HV;
  const Segment segment = locate_segment<VARLEN, BT>(slot, e, seq_offsets);
  if (!segment.used || (segment.last && !SUMMARY)) return;
  const bool finds_M = tile < kTilesK;
  const int first = (finds_M ? tile : tile - kTilesK) * BV;
  Scan::State state;
  Scan::scan_chunks(
      shared_memory(), state, {scanned_rows<Spec>(k, k_stride, kg, e), w, u, G, Gk, k_rstd, e},
      ScanRange{segment.token, segment.tokens, head}, StateColumns{first, !finds_M},
      [&] {
        if (finds_M)
          Scan::for_each_element(state, first, K,
                                 [](int row, int col, float& x) { x = row == col ? 1.0f : 0.0f; });
      },
      [](int, const Scan::State&) {}, [](int, int, const Scan::Values&) {});
  const int width = finds_M ? K : V;
  float* const to = (finds_M ? segment_M : segment_R) + (int64{slot} * e.HV + head) * K * width;
  Scan::for_each_element(state, first, width, [&](int row, int col, float& x) {
    to[row * width + col] = finds_M ? element_of_M(x) : x * kValueUnit<Spec>;
  });
}
