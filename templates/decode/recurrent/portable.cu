// The recurrence token by token, for a few tokens a sequence. A warp keeps all of K x kColumns of
// one state in registers from the first token to the last; warps do not synchronize, there is no
// shared memory, and a state is read once and written once. With OUTPUT_NORM a block has all
// columns: at once, and its warps tell each other their sums of squares once a token; or, where
// they are too many for its registers, BV after BV and twice, first for the sums of squares of
// rows of o, then for the rows.
#include "decode/recurrent/portable_layout.hpp"
#include "device/cuda/decode.cuh"
#include "device/drafts.hpp"

constexpr recurrent::PortableLayout kLayout{Spec{}};
constexpr bool kAtOnce = recurrent::all_columns_at_once(Spec{});
constexpr int kSumRows = recurrent::sum_rows(Spec{});
constexpr int kThreads = num_warps * 32;
constexpr int kBlocksAHead = OUTPUT_NORM ? 1 : ceil_div(V, BV);

using State = decode::State<Spec>;
using Decay = decode::Decay<Spec, VECTOR_GATE>;
using Products = decode::Products<Spec>;
template <class T>
using KeyVector = decode::KeyVector<Spec, T>;
template <class T>
using ValueVector = decode::ValueVector<Spec, T>;
constexpr int kKeys = decode::Share<Spec>::kKeys;
constexpr int kValues = decode::Share<Spec>::kValues;

/// Inputs of a step of a token, as stored: loaded one step ahead of their use. A token's first step
/// decays the state, its last one reads it with q.
struct Token {
  KeyVector<DTYPE> k, q;
  KeyVector<G_DTYPE> gates;  // VECTOR_GATE
  G_DTYPE gate;              // SCALAR_GATE
  BETA_DTYPE beta;
  ValueVector<DTYPE> v;
  KeyVector<BETA_DTYPE> erase;    // ERASE_WRITE
  ValueVector<BETA_DTYPE> write;  // ERASE_WRITE
};

struct Tensors {
  TokenRows<const DTYPE> q, k, v;
  TokenRows<const BETA_DTYPE> beta, erase, write;
  TokenRows<const G_DTYPE> g;
};

/// A token has STEPS rows of k. Whether row `row` decays the state; whether it reads it.
WYVERN_DEVICE bool is_first(int64 row) { return STEPS == 1 || row % STEPS == 0; }
WYVERN_DEVICE bool is_last(int64 row) { return STEPS == 1 || row % STEPS == STEPS - 1; }

WYVERN_DEVICE void load_step(Token& to, const Tensors& in, int64 row, int head, int column) {
  const int64 token = STEPS == 1 ? row : row / STEPS;
  const int keys = head / GROUP * K;
  to.k.load(in.k.row(row) + keys);
  if (is_last(row)) to.q.load(in.q.row(token) + keys);
  if (is_first(row)) {
    if constexpr (VECTOR_GATE) to.gates.load(in.g.row(token) + head * K);
    if constexpr (SCALAR_GATE) to.gate = in.g.row(token)[head];
  }
  if constexpr (ERASE_WRITE) {
    to.erase.load(in.erase.row(row) + head * K);
    to.write.load(in.write.row(row) + head * V, column);
  } else {
    to.beta = in.beta.row(row)[head];
  }
  to.v.load(in.v.row(row) + head * V, column);
}

WYVERN_DEVICE void decay_and_multiply(State& S, Products& sums, const Token& now, const Decay& gate,
                                      bool first, float lower_bound) {
  float scalar = 1.0f;
  if constexpr (SCALAR_GATE)
    if (first) scalar = gate.of(to_float(now.gate), 0, lower_bound);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float k = now.k[i];
    const float q = now.q[i];
    const float erasing = ERASE_WRITE ? now.erase[i] * k : k;
    float factor = scalar;
    if constexpr (VECTOR_GATE)
      if (first) factor = gate.of(now.gates[i], i, lower_bound);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if constexpr (GATED) S.x[i][j] *= factor;
      sums.with_k[j] = fused_multiply_add(S.x[i][j], erasing, sums.with_k[j]);
      sums.with_q[j] = fused_multiply_add(S.x[i][j], q, sums.with_q[j]);
    }
    sums.add_keys(k, q);
  }
  sums.reduce();
}

/// Rows of o from `first` to `end`; tokens before them only update the state. With OUTPUT_NORM and
/// not kAtOnce one pass computes their sums of squares (not `measured`), the next the rows.
struct Rows {
  int64 first, end;
  bool measured = true;
};

/// Where one head's rows of o go.
struct Output {
  TokenRows<DTYPE> o;
  TokenRows<const DTYPE> norm_gate;
  const float* norm_weight;
  float norm_eps;
  float* squares;  ///< with OUTPUT_NORM a row's sums of squares, one a warp

  WYVERN_DEVICE float* squares_of(int64 row, const Rows& rows) const {
    return squares + (row - rows.first) % kSumRows * num_warps;
  }

  /// A row's part of this thread: stored, or with OUTPUT_NORM added to the sum of squares.
  WYVERN_DEVICE void begin(const float (&part)[kValues], int64 row, int column,
                           const Rows& rows) const {
    if constexpr (!OUTPUT_NORM) {
      ValueVector<DTYPE> out;
#pragma unroll
      for (int j = 0; j < kValues; ++j) out[j] = from_float<DTYPE>(part[j]);
      out.store(o.row(row), column);
    } else if (kAtOnce || (!rows.measured && row >= rows.first)) {
      constexpr int kRun = decode::Share<Spec>::kValueRun;
      float sum = 0.0f;
      // Of lanes that share columns, one counts them.
      if (decode::Share<Spec>::key_lane() == 0)
#pragma unroll
        for (int j = 0; j < kValues; ++j)
          if (column + decode::Share<Spec>::value(j / kRun) < V)
            sum = fused_multiply_add(part[j], part[j], sum);
      sum = sum_warp(sum);
      float& to = squares_of(row, rows)[warp_index()];
      if (lane_index() == 0) to = kAtOnce ? sum : to + sum;
    }
  }
  /// With OUTPUT_NORM: normalized, gated and stored.
  WYVERN_DEVICE void finish(const float (&part)[kValues], int64 row, int column,
                            const Rows& rows) const {
    if constexpr (!OUTPUT_NORM) return;
    if (!kAtOnce && (!rows.measured || row < rows.first)) return;
    ValueVector<DTYPE> z = {};
    ValueVector<float> weight = {};
    z.load(norm_gate.row(row), column);
    weight.load(norm_weight, column);
    if constexpr (kAtOnce) sync_block();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < num_warps; ++i) sum += squares_of(row, rows)[i];
    const float rstd = reciprocal_sqrt(sum / V + norm_eps);
    ValueVector<DTYPE> out;
#pragma unroll
    for (int j = 0; j < kValues; ++j)
      out[j] =
          from_float<DTYPE>(part[j] * rstd * weight[j] * decode::output_gate<Spec>(to_float(z[j])));
    out.store(o.row(row), column);
  }
};

/// One step: the state becomes S_t, and `begin` and `finish` get, of a token's last one, the
/// thread's columns of o_t = scale (S~^T q + u (k . q)). One round of sums serves both u and o.
template <class Begin, class Finish>
WYVERN_DEVICE void step(State& S, const Token& now, const Decay& gate, bool first, bool last,
                        const Extents& e, Begin&& begin, Finish&& finish) {
  Products sums;
  decay_and_multiply(S, sums, now, gate, first, e.lower_bound);
  const float k_rstd = QK_L2NORM ? reciprocal_sqrt(sums.kk + 1e-6f) : 1.0f;
  const float q_rstd = QK_L2NORM ? reciprocal_sqrt(sums.qq + 1e-6f) : 1.0f;
  const float beta = ERASE_WRITE ? 1.0f : activate_beta<BETA_SIGMOID, NEG_EIGVAL>(now.beta);
  float u[kValues], part[kValues];
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const float value = ERASE_WRITE ? now.write[j] * now.v[j] : now.v[j];
    u[j] = k_rstd * (beta * (value - k_rstd * sums.with_k[j]));
    part[j] = e.scale * q_rstd * (sums.with_q[j] + u[j] * sums.kq);
  }
  if (last) begin(part);
  decode::add_update(S, now.k, u);
  if (last) finish(part);
}

WYVERN_KERNEL(kThreads, 0) {
  const int first_column =
      block_index() % kBlocksAHead * BV + warp_index() * decode::kColumns<Spec>;
  if (!OUTPUT_NORM && first_column >= V) return;
  const int head = block_index() / kBlocksAHead;
  const int64 n = block_row();
  if (n >= e.N) return;
  const int64 begin = decode::sequence_start<VARLEN>(cu_seqlens, n, e);
  const int64 end = decode::sequence_start<VARLEN>(cu_seqlens, n + 1, e);
  const StateSlots slots = find_starting_state<Spec>(
      n, head, e, state_stride, state_index, output_state_index, num_accepted, intermediate_index);
  const Output output{{o + head * V, o_stride},
                      {norm_gate + head * V, norm_gate_stride},
                      norm_weight,
                      e.norm_eps,
                      array_at<kLayout.squares>(shared_memory())};

  const auto decode = [&](int column, const Rows& rows) {
    // The pass that measures rows leaves the pool unchanged: the next one starts from it too.
    const bool keeps = kAtOnce || !OUTPUT_NORM || rows.measured;
    State S;
    S.clear();
    if (slots.null) {
      decode::clear_output<Spec>({o, o_stride}, begin, end, head, column);
      if constexpr (FINAL_STATE) S.store(final_state + (n * e.HV + head) * (K * V), column);
      return;
    }
    const Tensors in{{q, q_stride},       {k, k_stride},         {v, v_stride},
                     {beta, beta_stride}, {erase, erase_stride}, {write, write_stride},
                     {g, g_stride}};
    Token next = {};
    if (begin < end) load_step(next, in, begin * STEPS, head, column);
    const auto load_start = [&] {
      if constexpr (INPLACE_STATE || INITIAL_STATE)
        if (starts_from_slot<Spec>(n, has_initial_state))
          return S.load((INPLACE_STATE ? state : initial_state) + slots.from, column,
                        scale_at<Spec>(state_scale, slots.from_scale));
      if constexpr (PARENT) S.clear();
    };
    load_start();
    Decay gate;
    gate.load(A_log, dt_bias, head);
    // With PARENT: the tokens that have a state, a bit for each, and the one whose state S is.
    [[maybe_unused]] unsigned live = 0;
    [[maybe_unused]] int held = -1;
    for (int64 row = begin * STEPS; row < rows.end * STEPS; ++row) {
      const Token now = next;
      if (row + 1 < rows.end * STEPS) load_step(next, in, row + 1, head, column);
      if constexpr (PARENT) {
        const int from = parent_of(n, row - begin, e, parent, live);
        if (from == kNoToken) {
          decode::clear_output<Spec>({o, o_stride}, row, row + 1, head, column);
          // Rows r and r + 2 share a slot of `squares`: a row without a step needs its barrier too.
          if constexpr (OUTPUT_NORM && kAtOnce) sync_block();
          continue;
        }
        // This thread wrote what it reads here, so that the order of its accesses is enough.
        if (from != held && from >= 0)
          S.load(
              intermediate_states + intermediate_state<Spec>(n, from, head, e, intermediate_index),
              column);
        else if (from != held)
          load_start();
        held = static_cast<int>(row - begin);
        live |= 1U << held;
      }
      const int64 token = row / STEPS;
      step(
          S, now, gate, is_first(row), is_last(row), e,
          [&](const float(&part)[kValues]) { output.begin(part, token, column, rows); },
          [&](const float(&part)[kValues]) { output.finish(part, token, column, rows); });
      if constexpr (INDEX_COLUMNS && !KEEP_POOL) {
        const StateSlots own = token_slot<Spec>(n, row - begin, head, e, state_stride, state_index);
        if (keeps && !own.null)
          S.store(state + own.to, column, scale_at<Spec>(state_scale, own.to_scale));
      }
      if constexpr (INTERMEDIATE_STATES) {
        const int64 to = intermediate_state<Spec>(n, row - begin, head, e, intermediate_index);
        if (to != kNoState) S.store(intermediate_states + to, column);
      }
    }
    if (!keeps || rows.end < end) return;
    if constexpr (INPLACE_STATE && !INDEX_COLUMNS && !KEEP_POOL)
      S.store(state + slots.to, column, scale_at<Spec>(state_scale, slots.to_scale));
    if constexpr (FINAL_STATE) S.store(final_state + slots.to, column);
  };
  if constexpr (!OUTPUT_NORM || kAtOnce) {
    decode(first_column, {begin, end});
  } else {
    const auto walk_columns = [&](const Rows& rows) {
#pragma unroll 1
      for (int column = first_column; column < V; column += BV) decode(column, rows);
    };
    int64 first = begin;
    do {
      const int64 last = first + kSumRows < end ? first + kSumRows : end;
      for (int i = thread_index(); i < kSumRows * num_warps; i += kThreads)
        output.squares[i] = 0.0f;
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        sync_block();
        walk_columns({first, last, turn == 1});
      }
      sync_block();
      first = last;
    } while (first < end);
  }
}
