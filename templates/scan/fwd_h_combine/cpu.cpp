// The states that enter segments.
#include "device/cpu/combine.hpp"
#include "device/cpu/state.hpp"
#include "device/state_slots.hpp"

using Segments = SegmentStates<Spec>;
using State = CallerState<Spec>;
constexpr SegmentStatesLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2];

  const Segments::Work work = Segments::work_at<kScratch>(memory);
  const StateSlots slots =
      find_states<Spec>(n, static_cast<int>(hv), e, state_stride, state_index, output_state_index);
  if (slots.null) return;  // no kernel reads a null sequence's states
  if ((INPLACE_STATE || INITIAL_STATE) && starts_from_slot<Spec>(n, has_initial_state))
    State::load(
        (INPLACE_STATE ? state : initial_state) + slots.from + State::columns_at(first_column),
        columns, work.state, scale_at<Spec>(state_scale, slots.from_scale));
  else
    clear_rows(work.state, 0, K, columns);
  Segments::run<false>(work, segment_M, segment_R, seq_offsets, segment_state, e, n, hv,
                       first_column);
}
