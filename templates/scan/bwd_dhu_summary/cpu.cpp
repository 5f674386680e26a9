// The gradient of the state that enters a sequence. One call is BV columns of it.
#include "device/cpu/combine.hpp"
#include "device/cpu/state.hpp"

using Segments = SegmentStates<Spec>;
using State = CallerState<Spec>;
constexpr SegmentStatesLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  const int first = static_cast<int>(block[0]) * BV;
  const int columns = V - first < BV ? V - first : BV;
  const int64 hv = block[1], n = block[2];

  const Segments::Work work = Segments::work_at<kScratch>(memory);
  if constexpr (FINAL_STATE)
    State::load(dht + State::start(n, hv, first, e), columns, work.state);
  else
    clear_rows(work.state, 0, K, columns);
  const Tile<BV> entering = Segments::walk<true, true>(
      work, segment_dM, segment_dR, seq_offsets, e, n, hv, first, columns, [](int64, Tile<BV>) {});
  store_tile(entering, K, columns, dsummary + ((n * e.HV + hv) * K * V) + first, V);
}
