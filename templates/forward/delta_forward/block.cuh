// A block of the kernels of delta_forward: how it begins, and what each of its warps does.
//
// Warpgroup 0 brings tiles and makes factors of rows. The helpers prepare chunks: the decayed
// scores of queries, and I + A, which two helpers that take turns invert themselves, and one leaves
// to other warps of warpgroup 0. The last warpgroups have states.
#pragma once

#include "forward/delta_forward/shared_state.cuh"
#include "forward/delta_forward/transposed_state.cuh"

constexpr int kTilesV = V / BV;

/// Registers of a thread: of the warpgroup of tiles and factors, of those that prepare, and of
/// those with states, which need fewer where no output is asked. At launch all have as many; what
/// the first two give up the last take.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kFirstRegisters = kPipelined ? 56 : 64;
constexpr int kHelperRegisters = K > 128 ? 168 : kQueries ? (kPipelined ? 72 : 112) : 120;
constexpr int kStateRegisters = K > 128      ? 248
                                : kPipelined ? (kQueries ? 192 : 168)
                                             : (kQueries ? 224 : 208);
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

// ---- checkpoints --------------------------------------------------------------------------------

/// Writes a warpgroup's state times `factor` to a row of `checkpoints`. S is the kernel's Spec.
template <class S, class State, class Element>
WYVERN_DEVICE void write_checkpoint(State& walker, int row, float factor, Element* checkpoints,
                                    const Extents& e) {
  const int head = recalled(walker.b).head;
  const auto element = Checkpoints<S>{.row = static_cast<uint32>(row)}.element(head, e);
  walker.template store<S::STATE_V_FIRST>(factor, checkpoints + element);
}

// ---- its warps ----------------------------------------------------------------------------------

/// What the block reads a row of tokens at a time.
struct ScalarRows {
  TokenRows<const G_DTYPE> g;
  TokenRows<const BETA_DTYPE> beta;
};

/// All of a block's work after begin_block(). A warpgroup with a state calls compute(walker), which
/// fills the state, walks, and stores it; `first` is the first walker's columns, in 64s.
/// find_kept() gives a warp the checkpoints of the walk, counted from its first token, or
/// NoCheckpoints.
template <class FindKept, class Compute>
WYVERN_DEVICE void run_block(const Block& b, const GateForm& form, float scale,
                             const ScalarRows& rows, const TensorMap& q_map, const TensorMap& k_map,
                             const TensorMap& v_map, int first, FindKept&& find_kept,
                             Compute&& compute) {
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
      if (scales) next = read_rows(b, 0, rows.g, rows.beta);
      auto kept = scales ? find_kept() : decltype(find_kept()){};
#pragma unroll 1
      for (int c = 0; c < b.chunks; ++c, at.advance()) {
        const Block block = kPipelined ? recalled(b) : b;
        if (warp == 0) bring_tiles(block, c, at, q_map, k_map, v_map);
        if (scales) scale_rows(block, c, at, next, owed, scale, form, rows.g, rows.beta, kept);
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
    const int own = first + warpgroup - 1 - kHelpers;
    if constexpr (kLayout.shares_state) {
      SharedState walker{b, own, {}, {}, {}};
      compute(walker);
    } else {
      TransposedState walker{b, own, {}, {}, {}};
      compute(walker);
    }
  }
}
