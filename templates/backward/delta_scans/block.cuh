// A block of the kernels of delta_scans: how it begins, and what each of its warps does.
#pragma once

#include "backward/delta_scans/state.cuh"

constexpr int kTilesV = V / BV;

/// Registers of a thread: of the producer's warpgroup, of those that prepare, and of those with
/// states. At launch all have as many; what the first two give up the last take.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kFirstRegisters = kPipelined ? 56 : 64;
constexpr int kHelperRegisters = kSharesState ? 168 : !kPipelined ? 112 : kWrites ? 72 : 88;
constexpr int kStateRegisters = kSharesState ? 248 : !kPipelined ? 224 : kWrites ? 192 : 184;
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
WYVERN_DEVICE void run_block(const B& b, const ScalarGate& gate, float scale,
                             const ScalarRows& rows, const TensorMap& q_map, const TensorMap& k_map,
                             const TensorMap& v_map, Consume&& consume) {
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
        if (scales) scale_rows(block, turn, at, next, scale, gate, rows);
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
