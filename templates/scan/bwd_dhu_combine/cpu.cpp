// The gradients of the states that leave segments.
#include "device/cpu/combine.hpp"
#include "device/cpu/state.hpp"

using Segments = SegmentStates<Spec>;
using State = CallerState<Spec>;
constexpr SegmentStatesLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2];

  const Segments::Work work = Segments::work_at<kScratch>(memory);
  if constexpr (FINAL_STATE)
    State::load(dht + State::start(n, hv, first_column, e), columns, work.state);
  else
    clear_rows(work.state, 0, K, columns);
  Segments::run<true>(work, segment_dM, segment_dR, seq_offsets, segment_dstate, e, n, hv,
                      first_column);
}
