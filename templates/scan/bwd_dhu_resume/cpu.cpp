// The reverse state scan of one segment, value head and block of BV state columns, from the
// gradient of the state that leaves the segment.
#include "device/cpu/reverse_scan.hpp"
#include "device/cpu/segment.hpp"
#include "device/cpu/state.hpp"

using Scan = ReverseScan<Spec>;
using State = CallerState<Spec>;
constexpr ReverseScanLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  const auto queries = scanned_rows<Spec>(q, q_stride, qg, e),
             keys = scanned_rows<Spec>(k, k_stride, kg, e);
  const TokenRows<const DTYPE> gradients{dO, dO_stride};
  Scan::Inputs tensors{queries, keys, w, gradients, dv_local, G, Gk, q_rstd, k_rstd, e, e.scale};
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1];
  const Segment segment = find_segment<VARLEN, BT>(block[2], e, seq_offsets);
  if (!segment.used) return;
  const int64 n = segment.sequence;
  const int64 slot =
      (VARLEN ? chunk_offsets[n] : n * ((e.T + BT - 1) / BT)) + segment.index * e.SEG;

  const Scan::Work work = Scan::work_at<kScratch>(memory);
  const float* const leaving = segment_dstate + (block[2] * e.HV + hv) * K * V;
  load_tile(leaving + first_column, V, K, columns, work.state);
  const float least = unit_of_gradients<Spec>(e);
  const float unit =
      State::enter_unit(leaving, 1.0F, work.state, columns, (segment.tokens + BT - 1) / BT, e,
                        first_column == 0 ? dstate_unit + slot * e.HV + hv : nullptr, least);
  tensors.scale = e.scale / unit;
  tensors.dv_factor = least / unit;
  Scan::run<true, true>(work, tensors.at(segment.token, hv, first_column), segment.tokens, columns,
                        dh + (slot * e.HV + hv) * K * V + first_column,
                        du + (segment.token * e.HV + hv) * V + first_column);
  if constexpr (INITIAL_STATE)
    if (segment.index == 0)
      State::store(work.state, columns, dinitial_state + State::start(n, hv, first_column, e),
                   1.0F / unit);
}
