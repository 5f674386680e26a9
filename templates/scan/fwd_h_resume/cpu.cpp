// The state scan of one segment, value head and block of BV state columns, from the state that
// enters the segment.
#include "device/cpu/scan.hpp"
#include "device/cpu/segment.hpp"
#include "device/cpu/state.hpp"
#include "device/state_slots.hpp"

using Scan = ForwardScan<Spec>;
using State = CallerState<Spec>;
constexpr ForwardScanLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  Scan::Inputs tensors{
      scanned_rows<Spec>(k, k_stride, kg, e), w, u, G, Gk, k_rstd, e, {k, k_stride}};
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1];
  const Segment segment = find_segment<VARLEN, BT>(block[2], e, seq_offsets);
  if (!segment.used) return;
  const int64 n = segment.sequence;
  const StateSlots slots =
      find_states<Spec>(n, static_cast<int>(hv), e, state_stride, state_index, output_state_index);
  if (slots.null) return;  // h and V' of a null sequence are not read
  const int64 slot =
      (VARLEN ? chunk_offsets[n] : n * ((e.T + BT - 1) / BT)) + segment.index * e.SEG;

  const Scan::Work work = Scan::work_at<kScratch>(memory);
  const auto passed = static_cast<uint32>(segment.index * segment_tokens<BT>(e));
  const float* const entering = segment_state + (block[2] * e.HV + hv) * K * V;
  load_tile(entering + first_column, V, K, columns, work.state);
  const float unit = State::enter_unit(
      entering, 1.0F, work.state, columns, (segment.tokens + BT - 1) / BT, e,
      first_column == 0 ? state_unit + slot * e.HV + hv : nullptr, kValueUnit<Spec>);
  tensors.u_factor = kValueUnit<Spec> / unit;
  Scan::run<true, true>(work, tensors.at(segment.token, hv, first_column), segment.tokens, columns,
                        h + (slot * e.HV + hv) * K * V + first_column,
                        v_new + (segment.token * e.HV + hv) * V + first_column, passed,
                        Scan::find_checkpoints(passed, n, e, seq_offsets, checkpoint_offsets),
                        [&](const auto& checkpoint) {
                          State::store(work.state, columns,
                                       checkpoints + checkpoint.element(static_cast<int>(hv), e) +
                                           State::columns_at(first_column),
                                       1.0F / unit);
                        });
  if (!segment.last) return;
  if constexpr (VARLEN && KEEP_STATES)
    Scan::clear_unused_slots(h + first_column, n, hv, columns, chunk_offsets, e);
  const int64 to = slots.to + State::columns_at(first_column);
  if constexpr (INPLACE_STATE)
    State::store(work.state, columns, state + to,
                 scale_at<Spec>(state_scale, slots.to_scale) / unit);
  if constexpr (FINAL_STATE) State::store(work.state, columns, final_state + to, 1.0F / unit);
}
