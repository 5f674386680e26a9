// Both walks of the backward pass over the chunks of a sequence, one block BV columns of V of one
// of them and one value head: forward for the states that enter chunks and Z, and backwards, in the
// first half of the blocks, for the gradients of states that leave chunks and dV.
#include "backward/delta_scans/state.cuh"

constexpr int kTilesV = V / BV;

/// Registers of a thread: of the producer's warpgroup, of those that prepare, and of those with
/// states. At launch all have as many; what the first two give up the last take.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kFirstRegisters = kPipelined ? 56 : 64;
constexpr int kHelperRegisters = kSharesState ? 168 : kPipelined ? 72 : 112;
constexpr int kStateRegisters = kSharesState ? 248 : kPipelined ? 192 : 224;
static_assert(kFirstRegisters + kHelpers * kHelperRegisters + kConsumers * kStateRegisters <=
              kLaunchRegisters * (1 + kHelpers + kConsumers));

template <class B>
WYVERN_DEVICE void begin_block(const B& b) {
  if (thread_index() == 0) {
    *reinterpret_cast<B*>(array_at<kLayout.block>(b.shared)) = b;
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(b.template barrier<kLayout.loaded>(i), 32);
      sm90::barrier_init(b.template barrier<kLayout.scaled>(i), 32 * kScalers);
      sm90::barrier_init(b.template barrier<kLayout.free>(i), 128 * (1 + kConsumers));
    }
    for (int i = 0; i < kValueStages; ++i) {
      sm90::barrier_init(b.template barrier<kLayout.values_loaded>(i), 32);
      sm90::barrier_init(b.template barrier<kLayout.values_free>(i), 128 * kConsumers);
    }
    for (int i = 0; i < kSlots; ++i) {
      sm90::barrier_init(b.template barrier<kLayout.ready>(i), kPipelined ? 128 + 96 : 128);
      sm90::barrier_init(b.template barrier<kLayout.lowered>(i), 128);
      sm90::barrier_init(b.template barrier<kLayout.joined>(i), 64);
      sm90::barrier_init(b.template barrier<kLayout.inverted>(i), 32);
      sm90::barrier_init(b.template barrier<kLayout.taken>(i), 128 * kConsumers);
      sm90::barrier_init(b.template barrier<kLayout.scored>(i), 128 * kConsumers);
    }
    sm90::barrier_init(b.template barrier<kLayout.landed>(0), 1);
    sm90::fence_barrier_init();
  }
  // Above the diagonal both stay as they are here.
  auto* const words = reinterpret_cast<uint32*>(b.shared + kLayout.inverse.offset);
  for (int i = thread_index(); i < (kSlots + kScoreSlots) * SquareTile::kBytes / 4; i += kThreads)
    words[i] = 0;
  sm90::fence_proxy_async();
  sync_block();
}

/// All of a block's work; consume(warpgroup) is that of a warpgroup with a state.
template <class B, class Consume>
WYVERN_DEVICE void run_block(const B& b, const GateForm& form, float scale, const ScalarRows& rows,
                             const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                             Consume&& consume) {
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
      if (scales) next = read_rows(b, 0, rows);
#pragma unroll 1
      for (int turn = 0; turn < b.chunks; ++turn, at.advance()) {
        const B block = kPipelined ? recalled(b) : b;
        if (warp == 0) load_keys(block, turn, at, q_map, k_map);
        if (scales) scale_rows(block, turn, at, next, scale, form, rows);
        if (warp == 0) load_values(block, turn, v_map);
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
    sm90::raise_registers<kStateRegisters>();
    consume(warpgroup - 1 - kHelpers);
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  }
}

WYVERN_KERNEL(kThreads, 1) {
  const int walks = block_count() / 2;
  const bool reverse = block_index() < walks;
  const int walk = reverse ? block_index() : block_index() - walks;
  unsigned char* const shared = sm90::swizzled_memory();
  const int head = walk / kTilesV % HV;
  const int n = walk / kTilesV / HV;
  const Sequence sequence = locate_sequence<VARLEN, kRows>(n, e, seq_offsets, chunk_offsets);
  GateForm form{e.gate_floor, 0.0f, 0.0f};
  if constexpr (GATE_IN_KERNEL) {
    form.A_log = A_log[head];
    if constexpr (HAS_DT_BIAS) form.bias = dt_bias[head];
  }
  const ScalarRows rows{{g, g_stride}, {beta, beta_stride}};
  const auto state_start = [](const auto& b) {
    const auto copy = recalled(b);
    return (int64{copy.sequence} * HV + copy.head) * K * V;
  };
  const auto block_of = [&](auto b) {
    b.shared = shared;
    b.token = sequence.token;
    b.slot = sequence.slot;
    b.tokens = sequence.tokens;
    b.chunks = ceil_div(sequence.tokens, kRows);
    b.sequence = n;
    b.head = head;
    b.tile = walk % kTilesV;
    return b;
  };
  if (reverse) {
    const auto b = block_of(Block<true>{});
    run_block(b, form, e.scale, rows, q_map, k_map, do_map, [&](int consumer) {
      Reverse own{{b, consumer, {}, {}}};
      if constexpr (FINAL_STATE)
        own.visit([from = dht + state_start(b)](int offset, float& x) { x = from[offset]; });
      if (b.chunks > 0) own.walk(dstate_map, dv_map, dv);
      if constexpr (INITIAL_STATE)
        own.visit([to = dinitial_state + state_start(b)](int offset, float& x) { to[offset] = x; });
    });
  } else {
    const auto b = block_of(Block<false>{});
    if (b.chunks == 0) return;
    run_block(b, form, e.scale, rows, q_map, k_map, v_map, [&](int consumer) {
      Forward own{{b, consumer, {}, {}}};
      if constexpr (INITIAL_STATE)
        own.visit([from = initial_state + state_start(b)](int offset, float& x) {
          x = to_float(from[offset]);
        });
      own.walk(state_map, z_map);
    });
  }
}
