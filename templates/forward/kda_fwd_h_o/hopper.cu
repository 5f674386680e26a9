// The state scan and the output of Kimi Delta Attention in one kernel, one block BV columns of V of
// one sequence and value head: neither states nor V' are written.
constexpr bool kQueries = true;

#include "device/cuda/chunk.cuh"
#include "device/cuda/share.cuh"
#include "forward/kda_fwd_h_o/walk.cuh"

WYVERN_KERNEL(kThreads, 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % HV;
  const int sequences = static_cast<int>(e.N);
  int n = block_index() / kTilesV / HV;
  if constexpr (VARLEN)
    n = longest_first<kThreads>(n, sequences, seq_offsets, reinterpret_cast<int*>(b.shared));
  const Sequence sequence = locate_sequence<VARLEN, kChunk>(n, e, seq_offsets, chunk_offsets);
  b.token = sequence.token;
  b.tokens = sequence.tokens;
  begin_block(b);

  const int warp = sm90::uniform(warp_index());
  if (warp < 4) {
    sm90::lower_registers<kBringRegisters>();
    if (warp > 0)
      convert_chunks(b, warp - 1, Aqk + (b.token * HV + b.head) * BT,
                     Gk + (b.token * HV + b.head) * K);
    else if (lane_index() == 0)
      bring_chunks(b, w_map, qg_map, kg_map, u_map);
  } else {
    sm90::raise_registers<kStateRegisters>();
    const int64 state_start = (int64{n} * HV + b.head) * K * V;
    StateWalk walk{b, (warp - 4) / 4 * kColumns, {}, {}, {}};
    const int column = b.tile * BV + walk.column;
    if constexpr (INITIAL_STATE)
      sm90::visit_state<V, STATE_V_FIRST>(
          walk.state, column, [from = initial_state + state_start](int offset, float& x) {
            x = to_float(from[offset]);
          });
    if (b.tokens > 0) walk_state(walk, e.scale, {o, o_stride});
    if constexpr (FINAL_STATE)
      sm90::visit_state<V, STATE_V_FIRST>(
          walk.state, column,
          [to = final_state + state_start](int offset, float& x) { to[offset] = x; });
  }
}
