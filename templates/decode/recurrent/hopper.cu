// The recurrence token by token where there are many states: asynchronous bulk copies move whole
// states through a pipeline in shared memory, so that loads, stores and the recurrence overlap.
// Blocks are persistent, one a multiprocessor; an item is a sequence and value head. One warp
// starts the loads, one the stores, kRowWarps prepare rows of tokens, and kStateWarps hold a part
// of the state each from the first token to the last.
//
// recurrent_conv also convolves q, k and v. A block then has all value heads of a key head, and one
// more warp writes a window when the last row that reads it is prepared: so both may be one.
#include "decode/recurrent/next_windows.cuh"
#include "decode/recurrent/rows.cuh"
#include "device/cuda/sm90/barrier.cuh"

/// The Spec of decode.cuh: all columns, by the state warps.
struct StateSpec : Spec {
  static constexpr int BV = V, num_warps = recurrent::kStateWarps;
};

constexpr bool kConvolving = decode::kConvolves<Spec>;
constexpr int kRowWarps = recurrent::row_warps(kConvolving);
constexpr bool kAhead = !kConvolving;
constexpr int kMovingWarps = recurrent::moving_warps(kConvolving);
constexpr int kThreads = recurrent::block_warps(kConvolving) * 32;
constexpr recurrent::HopperLayout kLayout{Spec{}, kConvolving};
constexpr recurrent::RowLayout kPlaces{Spec{}};
constexpr int kStateBytes = K * V * static_cast<int>(sizeof(STATE_DTYPE));
constexpr bool kFromMemory = INPLACE_STATE || INITIAL_STATE;
/// Whether the state after the last token goes where slots.to says.
constexpr bool kToMemory = FINAL_STATE || (INPLACE_STATE && !INDEX_COLUMNS && !KEEP_POOL);

using State = decode::State<StateSpec>;
using StateItem = decode::StateItem;
using Tensors = decode::Tensors<Spec>;
using Convolution = decode::Convolution<Spec>;
using RowVector = decode::KeyVector<StateSpec, float>;
using StatePipeline = sm90::Pipeline<num_stages>;
using RowPipeline = sm90::Pipeline<recurrent::row_buffers(kConvolving)>;
constexpr int kKeys = decode::Share<StateSpec>::kKeys;
constexpr int kValues = decode::Share<StateSpec>::kValues;

struct Block {
  unsigned char* shared;
  StatePipeline states{sm90::barriers_at<kLayout.state_barriers>(shared)};
  RowPipeline rows{sm90::barriers_at<kLayout.row_barriers>(shared)};

  WYVERN_DEVICE STATE_DTYPE* state(const StatePipeline::Position& at) const {
    return array_at<kLayout.states>(shared) + at.buffer * (K * V);
  }
  /// Says that a state's tokens are done.
  WYVERN_DEVICE sm90::Barrier* stepped(const StatePipeline::Position& at) const {
    return sm90::barriers_at<kLayout.stepped>(shared) + at.buffer;
  }
  WYVERN_DEVICE float* row(const RowPipeline::Position& at) const {
    return array_at<kLayout.rows>(shared) + at.buffer * kPlaces.count;
  }
  WYVERN_DEVICE void init() const {
    states.init(1, kMovingWarps - 1);
    for (int i = 0; i < num_stages; ++i)
      sm90::barrier_init(sm90::barriers_at<kLayout.stepped>(shared) + i, recurrent::kStateWarps);
    rows.init(32, recurrent::kStateWarps);
  }
};

template <class Items>
WYVERN_DEVICE void bring_states(const Block& b, Items items, const STATE_DTYPE* from) {
  StateItem item;
  for (StatePipeline::Position at; items.next(item); at.advance()) {
    if (lane_index() != 0) continue;
    b.states.wait_empty(at);
    if (kFromMemory && item.starts) {
      sm90::barrier_arrive_expect(b.states.full(at), kStateBytes);
      sm90::bulk_load(b.state(at), from + item.slots.from, kStateBytes, b.states.full(at));
    } else {
      sm90::barrier_arrive(b.states.full(at));
    }
  }
}

/// `pool`: null sequences leave it alone; elsewhere they have a final state of zeros.
template <class Items, class T>
WYVERN_DEVICE void take_states(const Block& b, Items items, T* to, bool pool, const Extents& e) {
  StateItem item;
  for (StatePipeline::Position at; items.next(item); at.advance()) {
    if (lane_index() != 0) continue;
    sm90::barrier_wait(b.stepped(at), at.parity);
    if (kToMemory && !(pool && item.slots.null)) {
      const int64 place = item.slots.null ? (item.n * e.HV + item.head) * (K * V) : item.slots.to;
      sm90::bulk_store(to + place, b.state(at), kStateBytes);
      sm90::bulk_commit();
      sm90::bulk_wait_read<0>();
    }
    sm90::barrier_arrive(b.states.empty(at));
  }
}

/// Windows are read while the item's last token is computed, and written behind it.
template <class Items, class S>
WYVERN_DEVICE void take_windows(const Block& b, Items items, const decode::Tensors<S>& in,
                                const decode::Convolution<S>& conv) {
  StateItem item;
  for (StatePipeline::Position at; items.next(item); at.advance()) {
    decode::NextWindows<S> windows(item, in, conv);
    sm90::barrier_wait(b.stepped(at), at.parity);
    sync_warp();
    if (lane_index() == 0) sm90::barrier_arrive(b.states.empty(at));
    windows.store();
  }
}

/// Warp `own` of kRowWarps: every so many-th row, loaded before the one that came before is
/// prepared where registers hold two.
template <class Items>
WYVERN_DEVICE void prepare_rows(const Block& b, Items items, const Tensors& in,
                                const Convolution& conv, int own, const Extents& e) {
  decode::Row<Spec> held;
  RowPipeline::Position at, to;
  bool holds = false;
  const auto finish = [&] {
    if (!holds) return;
    b.rows.wait_empty(to);
    held.prepare(b.row(to), in, conv, e);
    sm90::barrier_arrive(b.rows.full(to));
    holds = false;
  };
  StateItem item;
  int turn = 0;
  while (items.next(item)) {
    if (item.slots.null) continue;
    for (int64 row = item.begin * STEPS; row < item.end * STEPS; ++row, at.advance()) {
      const bool mine = turn == own;
      if (++turn == kRowWarps) turn = 0;
      if (!mine) continue;
      decode::Row<Spec> next;
      next.load(in, conv, row, item);
      if constexpr (kAhead) finish();
      held = next;
      to = at;
      holds = true;
      if constexpr (!kAhead) finish();
    }
  }
  finish();
}

/// Leaves in the token's row what the warp's columns of o_t add to the sum of squares.
WYVERN_DEVICE void add_squares(const float (&o)[kValues], float* row, int column) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kValues; ++j) squares = fused_multiply_add(o[j], o[j], squares);
  // Lanes that share columns have the same numbers.
  squares = sum_warp(decode::Share<StateSpec>::key_lane() == 0 ? squares : 0.0f);
  if (lane_index() == 0) row[kPlaces.squares + column / decode::kColumns<StateSpec>] = squares;
}

/// The thread's columns of o_t, normalized and gated: the state warps synchronize here, once a
/// token.
WYVERN_DEVICE decode::ValueVector<StateSpec, DTYPE> normalized(const float (&o)[kValues],
                                                               const float* row, int column,
                                                               float eps) {
  decode::ValueVector<StateSpec, float> gate = {};
  gate.load(row + kPlaces.output_gate, column);
  sync_named(1, recurrent::kStateWarps * 32);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < recurrent::kStateWarps; i += 4) {
    const auto part = load<4>(row + kPlaces.squares + i);
    squares += part.at[0] + part.at[1] + (part.at[2] + part.at[3]);
  }
  const float rstd = reciprocal_sqrt(squares / V + eps);
  decode::ValueVector<StateSpec, DTYPE> out;
#pragma unroll
  for (int j = 0; j < kValues; ++j) out[j] = from_float<DTYPE>(o[j] * rstd * gate[j]);
  return out;
}

/// One step: the state becomes S_t, and of a token's last one the thread's columns of o_t = S~^T q
/// + u (k . q) go to `o`. One round of sums serves both u and o.
WYVERN_DEVICE void step(State& S, float* row, bool last, DTYPE* o, int column, float norm_eps) {
  float sums[2 * kValues] = {};  // of the columns' products with k, then with q
  RowVector k, q;
  k.load(row + kPlaces.k);
  q.load(row + kPlaces.q);
  const auto numbers = load<4>(row + kPlaces.numbers);
  [[maybe_unused]] RowVector decays, erasing;
  if constexpr (VECTOR_GATE) decays.load(row + kPlaces.decay);
  if constexpr (ERASE_WRITE) erasing.load(row + kPlaces.erasing);
  decode::ValueVector<StateSpec, float> v = {};
  v.load(row + kPlaces.v, column);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float factor = VECTOR_GATE ? decays[i] : numbers.at[0];
    const float by = ERASE_WRITE ? erasing[i] : k[i];
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if constexpr (GATED) S.x[i][j] *= factor;
      sums[j] = fused_multiply_add(S.x[i][j], by, sums[j]);
      sums[kValues + j] = fused_multiply_add(S.x[i][j], q[i], sums[kValues + j]);
    }
  }
  const float beta = numbers.at[1], kq = numbers.at[2];
  // Beside fp32 states a gate a key channel leaves too few registers, and one token gains nothing.
  if constexpr (sizeof(STATE_DTYPE) < 4)
    decode::Share<StateSpec>::sum_key_lanes(sums);
  else
#pragma unroll
    for (float& sum : sums) sum = decode::Share<StateSpec>::sum_key_lanes(sum);
  float u[kValues], o_t[kValues];
  decode::ValueVector<StateSpec, DTYPE> out;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    u[j] = beta * (v[j] - sums[j]);
    o_t[j] = fused_multiply_add(u[j], kq, sums[kValues + j]);
    out[j] = from_float<DTYPE>(o_t[j]);
  }
  if (OUTPUT_NORM && last)
    add_squares(o_t, row, column);
  else if (last)
    out.store(o, column);
  decode::add_update(S, k, u);
  if (OUTPUT_NORM && last) normalized(o_t, row, column, norm_eps).store(o, column);
}

/// All steps of a sequence; `keep(token)` is called after each token's.
template <class Keep>
WYVERN_DEVICE void decode_item(const Block& b, State& S, RowPipeline::Position& at,
                               const StateItem& item, int column, const TokenRows<DTYPE>& o,
                               float norm_eps, Keep&& keep) {
  for (int64 row = item.begin * STEPS; row < item.end * STEPS; ++row, at.advance()) {
    const int64 token = row / STEPS;
    const bool last = row % STEPS == STEPS - 1;
    b.rows.wait_full(at);
    step(S, b.row(at), last, o.row(token) + item.head * V, column, norm_eps);
    sync_warp();
    if (lane_index() == 0) sm90::barrier_arrive(b.rows.empty(at));
    if (last) keep(token - item.begin);
  }
}

/// Tells the emulator that this thread is about to read and write its part of the state.
WYVERN_DEVICE void touch(const STATE_DTYPE* state, int column) {
  State::for_runs(column, [&](int offset, int, int) { sm90::touch(state + offset); });
}

template <class Params>
WYVERN_DEVICE Convolution convolution_of(const Params& p) {
  if constexpr (kConvolving) {
    const int64 keys = int64{p.e.H} * K, values = int64{p.e.HV} * V;
    return {p.conv_weight,
            p.conv_bias,
            {p.initial_conv_state, p.final_conv_state, p.conv_state, p.conv_state_stride,
             p.state_index, p.output_state_index, p.has_initial_state},
            keys + STEPS * (keys + values)};
  } else {
    return {};
  }
}

/// The part of a warp that holds a part of each state.
template <class Items, class Params>
WYVERN_DEVICE void decode_items(const Block& b, Items items, int column, const Params& p) {
  const Extents& e = p.e;
  StateItem item;
  RowPipeline::Position row_at;
  for (StatePipeline::Position at; items.next(item); at.advance()) {
    State S;
    S.clear();
    b.states.wait_full(at);
    touch(b.state(at), column);
    if (kFromMemory && item.starts)
      S.load(b.state(at), column, scale_at<Spec>(p.state_scale, item.slots.from_scale));
    const TokenRows<DTYPE> o{p.o, p.o_stride};
    if (item.slots.null)
      decode::clear_output<StateSpec>(o, item.begin, item.end, item.head, column);
    else
      decode_item(b, S, row_at, item, column, o, e.norm_eps, [&](int64 token) {
        if constexpr (INDEX_COLUMNS && !KEEP_POOL) {
          const StateSlots own =
              token_slot<Spec>(item.n, token, item.head, e, p.state_stride, p.state_index);
          if (!own.null)
            S.store(p.state + own.to, column, scale_at<Spec>(p.state_scale, own.to_scale));
        }
        if constexpr (INTERMEDIATE_STATES) {
          const int64 to =
              intermediate_state<Spec>(item.n, token, item.head, e, p.intermediate_index);
          if (to != kNoState) S.store(p.intermediate_states + to, column);
        }
      });
    if constexpr (kToMemory)
      S.store<true>(b.state(at), column, scale_at<Spec>(p.state_scale, item.slots.to_scale));
    sm90::fence_proxy_async();
    sync_warp();
    if (lane_index() == 0) sm90::barrier_arrive(b.stepped(at));
  }
}

template <class Params>
WYVERN_DEVICE void decode_states(const Block& b, const Params& p) {
  const Extents& e = p.e;
  const auto find = [&](int64 n, int head) {
    return find_starting_state<Spec>(n, head, e, p.state_stride, p.state_index,
                                     p.output_state_index, p.num_accepted, p.intermediate_index);
  };
  const Convolution conv = convolution_of(p);
  // Warps that hold states have no registers for windows.
  const auto items_with = [&]<class Windows>(const Windows& windows) {
    return decode::StateItems<Spec, kConvolving ? GROUP : 1, decltype(find), Windows,
                              SEQLENS_DTYPE>(e, find, windows, p.cu_seqlens, p.has_initial_state);
  };
  const auto states = items_with(decode::NoWindows{});
  const Tensors in{{p.q, p.q_stride},
                   {p.k, p.k_stride},
                   {p.v, p.v_stride},
                   {p.beta, p.beta_stride},
                   {p.erase, p.erase_stride},
                   {p.write, p.write_stride},
                   {p.g, p.g_stride},
                   p.A_log,
                   p.dt_bias,
                   {p.norm_gate, p.norm_gate_stride},
                   p.norm_weight,
                   e.H};

  const int warp = sm90::uniform(warp_index());
  if (warp == 0) return bring_states(b, states, INPLACE_STATE ? p.state : p.initial_state);
  if (warp == 1) {
    if constexpr (FINAL_STATE)
      return take_states(b, states, p.final_state, false, e);
    else
      return take_states(b, states, p.state, true, e);
  }
  if constexpr (kConvolving)
    if (warp == 2) return take_windows(b, items_with(conv), in, conv);
  const int row_warp = warp - kMovingWarps;
  if (row_warp < kRowWarps) return prepare_rows(b, items_with(conv), in, conv, row_warp, e);
  decode_items(b, states, (row_warp - kRowWarps) * decode::kColumns<StateSpec>, p);
}

WYVERN_KERNEL(kThreads, 1) {
  const Block b{sm90::swizzled_memory()};
  if (thread_index() == 0) b.init();
  sync_block();
  decode_states(b, Params{WYVERN_ARGUMENTS});
}
