// What a segment does to the gradient of a state, dS -> dM dS + dR: dR is what the reverse scan
// makes of zeros, and dM what it makes of the identity when there are no values. One block BV
// columns of dM or of dR.
#include "device/cuda/reverse_scan.cuh"
#include "device/cuda/segment.cuh"

using Scan = ReverseScan<Spec>;

constexpr int kTilesK = ceil_div(K, BV);
constexpr int kTilesV = Scan::kTilesV;

WYVERN_KERNEL(Scan::kThreads, 0) {
  const int tile = block_index() % (kTilesK + kTilesV);
  const int head = block_index() / (kTilesK + kTilesV) % e.HV;
  const int slot = block_index() / (kTilesK + kTilesV) / e.HV;
  const Segment segment = locate_segment<VARLEN, BT>(slot, e, seq_offsets);
  if (!segment.used || (segment.index == 0 && !SUMMARY)) return;
  const bool finds_dM = tile < kTilesK;
  const int first = (finds_dM ? tile : tile - kTilesK) * BV;
  const auto queries = scanned_rows<Spec>(q, q_stride, qg, e),
             keys = scanned_rows<Spec>(k, k_stride, kg, e);
  const TokenRows<const DTYPE> gradients{dO, dO_stride};
  const float unit = unit_of_gradients<Spec>(e);
  Scan::State state;
  Scan::scan_chunks(
      shared_memory(), state,
      {queries, keys, w, gradients, dv_local, G, Gk, q_rstd, k_rstd, e, e.scale / unit},
      ScanRange{segment.token, segment.tokens, head}, StateColumns{first, !finds_dM},
      [&] {
        if (finds_dM)
          Scan::for_each_element(state, first, K,
                                 [](int row, int col, float& x) { x = row == col ? 1.0f : 0.0f; });
      },
      [](int, const Scan::State&) {}, [](int, int, const Scan::Values&) {});
  const int width = finds_dM ? K : V;
  float* const to = (finds_dM ? segment_dM : segment_dR) + (int64{slot} * e.HV + head) * K * width;
  Scan::for_each_element(state, first, width, [&](int row, int col, float& x) {
    to[row * width + col] = finds_dM ? element_of_M(x) : x * unit;
  });
}
