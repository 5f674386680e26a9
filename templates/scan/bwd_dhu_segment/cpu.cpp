// A segment's map of a state's gradient, dS -> dM dS + dR: dR is the reverse scan from zeros, dM
// the reverse scan from the identity without values. One call is BV columns of dM or of dR.
#include "device/cpu/reverse_scan.hpp"
#include "device/cpu/segment.hpp"
#include "device/state_unit.hpp"

using Scan = ReverseScan<Spec>;
constexpr ReverseScanLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  const auto queries = scanned_rows<Spec>(q, q_stride, qg, e),
             keys = scanned_rows<Spec>(k, k_stride, kg, e);
  const TokenRows<const DTYPE> gradients{dO, dO_stride};
  const Scan::Inputs tensors{queries, keys,   w,      gradients, dv_local, G,
                             Gk,      q_rstd, k_rstd, e,         e.scale};
  constexpr int kTilesK = (K + BV - 1) / BV;
  const int64 hv = block[1];
  const Segment segment = find_segment<VARLEN, BT>(block[2], e, seq_offsets);
  if (!segment.used || (segment.index == 0 && !SUMMARY)) return;
  const bool finds_dM = block[0] < kTilesK;
  const int width = finds_dM ? K : V;
  const int first = static_cast<int>(finds_dM ? block[0] : block[0] - kTilesK) * BV;
  const int columns = width - first < BV ? width - first : BV;

  const float unit = unit_of_gradients<Spec>(e);
  const Scan::Work work = Scan::work_at<kScratch>(memory);
  clear_rows(work.state, 0, K, columns);
  Scan::Inputs inputs = tensors.at(segment.token, hv, finds_dM ? 0 : first);
  if (finds_dM) {
    for (int c = 0; c < columns; ++c) work.state.row(first + c)[c] = 1.0F;
    Scan::run<false, false>(work, inputs, segment.tokens, columns, nullptr, nullptr);
  } else {
    inputs.scale = e.scale / unit;
    Scan::run<true, false>(work, inputs, segment.tokens, columns, nullptr, nullptr);
  }
  store_tile(work.state, K, columns,
             (finds_dM ? segment_dM : segment_dR) + (block[2] * e.HV + hv) * K * width + first,
             width, finds_dM ? 1.0F : unit);
}
