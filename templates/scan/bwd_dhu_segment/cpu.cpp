// What a segment does to the gradient of a state, dS -> dM dS + dR: dR is what the reverse scan
// makes of zeros, and dM what it makes of the identity when there are no values. One call is BV
// columns of dM or of dR.
#include "device/cpu/reverse_scan.hpp"
#include "device/cpu/segment.hpp"

WYVERN_BLOCK {
  const ScanInputs tensors{
      VECTOR_GATE ? qg : q, VECTOR_GATE ? kg : k, w, dO, dv_local, G, Gk, q_rstd, k_rstd};
  constexpr int kTilesK = (K + BV - 1) / BV;
  const int64 hv = block[1];
  const Segment segment = find_segment<VARLEN, SEG * BT>(block[2], e, seq_offsets);
  if (!segment.used || segment.index == 0) return;
  const bool finds_dM = block[0] < kTilesK;
  const int width = finds_dM ? K : V;
  const int first = static_cast<int>(finds_dM ? block[0] : block[0] - kTilesK) * BV;
  const int columns = width - first < BV ? width - first : BV;

  const ScanScratch scratch(memory);
  clear_rows(scratch.state, kValueRow, 0, K, columns);
  const ScanInputs inputs = tensors.at(segment.token, hv, finds_dM ? 0 : first);
  if (finds_dM) {
    for (int c = 0; c < columns; ++c) scratch.state[(first + c) * kValueRow + c] = 1.0F;
    scan_chunks<false, false>(scratch, inputs, segment.tokens, columns, e.scale, nullptr, nullptr);
  } else {
    scan_chunks<true, false>(scratch, inputs, segment.tokens, columns, e.scale, nullptr, nullptr);
  }
  store_tile(scratch.state, kValueRow, K, columns,
             (finds_dM ? segment_dM : segment_dR) + (block[2] * HV + hv) * K * width + first,
             width);
}
