// A segment's map of a state, S -> M S + R: R is the scan from zeros, M the scan from the identity
// without values. One call is BV columns of M or of R.
#include "device/cpu/scan.hpp"
#include "device/cpu/segment.hpp"
#include "device/state_unit.hpp"

using Scan = ForwardScan<Spec>;
constexpr ForwardScanLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  const Scan::Inputs tensors{scanned_rows<Spec>(k, k_stride, kg, e), w, u, G, Gk, k_rstd, e};
  constexpr int kTilesK = (K + BV - 1) / BV;
  const int64 hv = block[1];
  const Segment segment = find_segment<VARLEN, BT>(block[2], e, seq_offsets);
  if (!segment.used || (segment.last && !SUMMARY)) return;
  const bool finds_M = block[0] < kTilesK;
  const int width = finds_M ? K : V;
  const int first = static_cast<int>(finds_M ? block[0] : block[0] - kTilesK) * BV;
  const int columns = width - first < BV ? width - first : BV;

  const Scan::Work work = Scan::work_at<kScratch>(memory);
  clear_rows(work.state, 0, K, columns);
  const Scan::Inputs inputs = tensors.at(segment.token, hv, finds_M ? 0 : first);
  if (finds_M) {
    for (int c = 0; c < columns; ++c) work.state.row(first + c)[c] = 1.0F;
    Scan::run<false, false>(work, inputs, segment.tokens, columns, nullptr, nullptr);
  } else {
    Scan::run<true, false>(work, inputs, segment.tokens, columns, nullptr, nullptr);
  }
  store_tile(work.state, K, columns,
             (finds_M ? segment_M : segment_R) + (block[2] * e.HV + hv) * K * width + first, width,
             finds_M ? 1.0F : kValueUnit<Spec>);
}
