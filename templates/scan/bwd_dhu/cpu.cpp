// The reverse state scan of one sequence, value head and block of BV state columns.
#include "device/cpu/reverse_scan.hpp"
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
  const int64 hv = block[1], n = block[2];
  const int64 first = VARLEN ? seq_offsets[n] : n * e.T;
  const int64 length = (VARLEN ? seq_offsets[n + 1] : (n + 1) * e.T) - first;
  const int64 slot = VARLEN ? chunk_offsets[n] : n * ((e.T + BT - 1) / BT);
  const int64 state_at = State::start(n, hv, first_column, e);

  const Scan::Work work = Scan::work_at<kScratch>(memory);
  if constexpr (FINAL_STATE)
    State::load(dht + state_at, columns, work.state);
  else
    clear_rows(work.state, 0, K, columns);
  const float least = unit_of_gradients<Spec>(e);
  const float unit =
      State::enter_unit(FINAL_STATE ? dht + (n * e.HV + hv) * K * V : nullptr, 1.0F, work.state,
                        columns, (length + BT - 1) / BT, e,
                        first_column == 0 ? dstate_unit + slot * e.HV + hv : nullptr, least);
  tensors.scale = e.scale / unit;
  tensors.dv_factor = least / unit;
  Scan::run<true, true>(work, tensors.at(first, hv, first_column), length, columns,
                        dh + (slot * e.HV + hv) * K * V + first_column,
                        du + (first * e.HV + hv) * V + first_column);
  if constexpr (INITIAL_STATE)
    State::store(work.state, columns, dinitial_state + state_at, 1.0F / unit);
}
