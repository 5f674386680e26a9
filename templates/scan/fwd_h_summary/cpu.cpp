// What a sequence does to a state, S -> M S + R: R the state at its end, from zeros or the given
// one, and with TRANSITION M. One call is BV columns of R or of M.
#include "device/cpu/combine.hpp"
#include "device/cpu/state.hpp"

using Segments = SegmentStates<Spec>;
using State = CallerState<Spec>;
constexpr SegmentStatesLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  constexpr int kTilesV = (V + BV - 1) / BV;
  const bool finds_M = block[0] >= kTilesV;
  const int width = finds_M ? K : V;
  const int first = static_cast<int>(finds_M ? block[0] - kTilesV : block[0]) * BV;
  const int columns = width - first < BV ? width - first : BV;
  const int64 hv = block[1], n = block[2];

  const Segments::Work work = Segments::work_at<kScratch>(memory);
  if (INITIAL_STATE && !finds_M)
    State::load(initial_state + State::start(n, hv, first, e), columns, work.state);
  else
    clear_rows(work.state, 0, K, columns);
  if (finds_M)
    for (int c = 0; c < columns; ++c) work.state.row(first + c)[c] = 1.0F;
  const Tile<BV> leaving =
      Segments::walk<false, true>(work, segment_M, finds_M ? nullptr : segment_R, seq_offsets, e, n,
                                  hv, first, columns, [](int64, Tile<BV>) {});
  store_tile(leaving, K, columns,
             summary + (n * e.HV + hv) * K * SUMMARY_COLUMNS + (finds_M ? V : 0) + first,
             SUMMARY_COLUMNS);
}
