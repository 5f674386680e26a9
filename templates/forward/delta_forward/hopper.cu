// The whole forward pass of the delta rule with one gate a head or none, one block BV columns
// of V of one sequence, or of a share of it, and value head. The state stays on chip: of q, k, v,
// beta and g nothing but they themselves is read, and nothing but o and the final state written.
//
// Warpgroup 0 brings tiles and makes factors of rows. The helpers prepare chunks: the decayed
// scores of queries, and I + A, which two helpers that take turns invert themselves, and one leaves
// to other warps of warpgroup 0. The last warpgroups have states.
#include "forward/delta_forward/shared_state.cuh"
#include "forward/delta_forward/transposed_state.cuh"

constexpr int kTilesV = V / BV;

/// Registers of a thread: of the warpgroup of tiles and factors, of those that prepare, and of
/// those with states. At launch all have as many; what the first two give up the last take.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kFirstRegisters = kPipelined ? 56 : 64;
constexpr int kHelperRegisters = K > 128 ? 168 : kPipelined ? 72 : 112;
constexpr int kStateRegisters = K > 128 ? 248 : kPipelined ? 192 : 224;
static_assert(kFirstRegisters <= kLaunchRegisters && kHelperRegisters <= kLaunchRegisters);
static_assert(kFirstRegisters + kHelpers * kHelperRegisters + kWalkers * kStateRegisters <=
              kLaunchRegisters * (1 + kHelpers + kWalkers));

// ---- the block ----------------------------------------------------------------------------------

WYVERN_DEVICE void begin_block(const Block& b) {
  if (thread_index() == 0) {
    *reinterpret_cast<Block*>(array_at<kLayout.block>(b.shared)) = b;
    const int walkers = b.halves ? 1 : kWalkers;
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(b.barrier<kLayout.loaded>(i), 32);
      sm90::barrier_init(b.barrier<kLayout.scaled>(i), 32 * kScalers);
      sm90::barrier_init(b.barrier<kLayout.free>(i), 128 * (1 + walkers));
    }
    for (int i = 0; i < kSlots; ++i) {
      sm90::barrier_init(b.barrier<kLayout.ready>(i), kPipelined ? 128 + 96 : 128);
      sm90::barrier_init(b.barrier<kLayout.lowered>(i), 128);
      sm90::barrier_init(b.barrier<kLayout.joined>(i), 64);
      sm90::barrier_init(b.barrier<kLayout.inverted>(i), 32);
    }
    for (int i = 0; i < kScoreSlots; ++i)
      sm90::barrier_init(b.barrier<kLayout.taken>(i), 128 * walkers);
    sm90::barrier_init(b.barrier<kLayout.landed>(0), 1);
    sm90::fence_barrier_init();
  }
  // Above the diagonal both stay as they are here.
  auto* const words = reinterpret_cast<uint32*>(b.shared + kLayout.inverse.offset);
  for (int i = thread_index(); i < (kSlots + kScoreSlots) * SquareTile::kBytes / 4; i += kThreads)
    words[i] = 0;
  sm90::fence_proxy_async();
  sync_block();
}

WYVERN_KERNEL(kThreads, 1) {
  Block b{};
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % HV;
  const int sequences = static_cast<int>(e.N);
  b.sequence = block_index() / kTilesV / HV % sequences;
  if constexpr (VARLEN)
    b.sequence = longest_first<kThreads>(b.sequence, sequences, seq_offsets,
                                         reinterpret_cast<int*>(b.shared));
  const Sequence sequence =
      locate_sequence<VARLEN, kRows>(b.sequence, e, seq_offsets, chunk_offsets);
  GateForm form{e.gate_floor, 0.0f, 0.0f};
  if constexpr (GATE_IN_KERNEL) {
    form.A_log = A_log[b.head];
    if constexpr (HAS_DT_BIAS) form.bias = dt_bias[b.head];
  }

  const TokenRows<const G_DTYPE> g_rows{g, g_stride};
  const TokenRows<const BETA_DTYPE> beta_rows{beta, beta_stride};

  // Without a gate older states always count.
  const int shares = SCALAR_GATE ? block_count() / (kTilesV * HV * sequences) : 1;
  const int share = shares - 1 - block_index() / (kTilesV * HV * sequences);
  // Two blocks of a sequence share out its chunks, or, where states last so long that this is
  // faster, its columns: what both see in front of the second share decides.
  const bool may_halve = kWalkers == 2 && shares == 2;
  const int all = ceil_div(sequence.tokens, kRows);
  const int first = static_cast<int>(int64{all} * (may_halve ? 1 : share) / shares);
  int warm = 0;
  if (SCALAR_GATE && first > 0)
    warm = warm_up<kRows, kThreads, 32>(first, b.factors<kLayout.G>(0), [&](int last) {
      const int t = last - lane_index();
      return t < 0 ? 0.0f
                   : stretch(sequence.token + t, b.head, form, g_rows, beta_rows, {k, k_stride});
    });
  // A chunk of 64 columns takes about 0.75 of the time of one of 128.
  b.halves = may_halve && 4 * (all - first + warm) > 3 * all;
  static_cast<SharedWalk&>(b) = share_out<kRows>(sequence, b.halves ? 0 : share,
                                                 b.halves ? 1 : shares, [&](int) { return warm; });
  if (b.chunks == 0 && !b.to_end) return;
  begin_block(b);

  const int warp = sm90::uniform(warp_index());
  const int warpgroup = warp / 4;
  if (warpgroup == 0) {
    sm90::lower_registers<kFirstRegisters>();
    if (b.chunks == 0) return;
    const bool scales = warp >= kFirstScaler && warp < kFirstScaler + kScalers;
    if (warp == 0 || scales) {
      Position at;
      RawRows next = {};
      float owed = 0.0f;  // log2 of the decay that the state owes
      if (scales) next = read_rows(b, 0, g_rows, beta_rows);
#pragma unroll 1
      for (int c = 0; c < b.chunks; ++c, at.advance()) {
        const Block block = kPipelined ? recalled(b) : b;
        if (warp == 0) bring_tiles(block, c, at, q_map, k_map, v_map);
        if (scales) scale_rows(block, c, at, next, owed, e.scale, form, g_rows, beta_rows);
      }
    } else if constexpr (kPipelined) {
      invert_chunks(b);
    }
  } else if (warpgroup <= kHelpers) {
    sm90::lower_registers<kHelperRegisters>();
    if constexpr (kPipelined)
      lower_chunks(b);
    else
      prepare_chunks(b, warpgroup - 1);
  } else {
    if (b.halves && warpgroup > 1 + kHelpers) return;
    sm90::raise_registers<kStateRegisters>();
    // Computed where it is used: in between registers are few.
    const auto state_start = [&] {
      const Block copy = recalled(b);
      return (int64{copy.sequence} * HV + copy.head) * K * V;
    };
    const auto compute = [&](auto&& walker, auto&& visit) {
      if constexpr (INITIAL_STATE) {
        if (b.from_start)
          visit([from = initial_state + state_start()](int offset, float& x) {
            x = to_float(from[offset]);
          });
      }
      if (b.chunks > 0) walk(walker, o_map, {o, o_stride});
      if constexpr (FINAL_STATE) {
        if (recalled(b).to_end)
          visit([to = final_state + state_start()](int offset, float& x) { to[offset] = x; });
      }
    };
    if constexpr (kLayout.shares_state) {
      SharedState walker{b, warpgroup - 1 - kHelpers, {}, {}, {}};
      compute(walker, [&](auto&& act) {
#pragma unroll
        for (int p = 0; p < kParts; ++p)
          sm90::visit_rows<K, V, STATE_V_FIRST>(walker.state[p], 64 * p, walker.column(), act);
      });
    } else {
      TransposedState walker{b, b.halves ? share : warpgroup - 1 - kHelpers, {}, {}, {}};
      compute(walker, [&](auto&& act) {
        sm90::visit_state<V, STATE_V_FIRST>(walker.state, walker.column(), act);
      });
    }
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  }
}
