// gdn2's recurrence token by token, for a few tokens a sequence. A warp keeps all of K times its
// value columns of one state in registers from the first token to the last; warps never meet, so
// there is neither shared memory nor a barrier, and a state moves once in and once out.
#include "device/cuda/decode.cuh"
#include "device/state_slots.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTiles = ceil_div(V, BV);

using State = decode::State<Spec>;
using Decay = decode::Decay<Spec, true>;
using Products = decode::Products<Spec>;
template <class T>
using KeyVector = decode::KeyVector<Spec, T>;
template <class T>
using ValueVector = decode::ValueVector<Spec, T>;
constexpr int kKeys = decode::Share<Spec>::kKeys;
constexpr int kValues = decode::Share<Spec>::kValues;

/// What a token brings, as stored: loaded one token ahead of its use.
struct Token {
  KeyVector<DTYPE> k, q;
  KeyVector<BETA_DTYPE> erase;
  KeyVector<G_DTYPE> gates;
  ValueVector<DTYPE> v;
  ValueVector<BETA_DTYPE> write;
};

struct Tensors {
  TokenRows<const DTYPE> q, k, v;
  TokenRows<const BETA_DTYPE> erase, write;
  TokenRows<const G_DTYPE> g;

  WYVERN_DEVICE void load(Token& to, int64 token, int head, int column) const {
    const int keys = head / GROUP * K;
    to.k.load(k.row(token) + keys);
    to.q.load(q.row(token) + keys);
    to.erase.load(erase.row(token) + head * K);
    to.gates.load(g.row(token) + head * K);
    to.v.load(v.row(token) + head * V, column);
    to.write.load(write.row(token) + head * V, column);
  }
};

WYVERN_DEVICE void decay_and_multiply(State& S, Products& sums, const Token& now, const Decay& gate,
                                      float lower_bound) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float k = now.k[i];
    const float q = now.q[i];
    const float erasing = now.erase[i] * k;
    const float factor = gate.of(now.gates[i], i, lower_bound);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      S.x[i][j] *= factor;
      sums.with_k[j] = fused_multiply_add(S.x[i][j], erasing, sums.with_k[j]);
      sums.with_q[j] = fused_multiply_add(S.x[i][j], q, sums.with_q[j]);
    }
    sums.add_keys(k, q);
  }
  sums.reduce();
}

/// One step: the state becomes S_t, and the thread's columns of o_t = scale (S~^T q + u (k . q)) go
/// to `o`. One round of sums serves both u and o.
WYVERN_DEVICE void step(State& S, const Token& now, const Decay& gate, DTYPE* o, int column,
                        const Extents& e) {
  Products sums;
  decay_and_multiply(S, sums, now, gate, e.lower_bound);
  const float k_rstd = QK_L2NORM ? reciprocal_sqrt(sums.kk + 1e-6f) : 1.0f;
  const float q_rstd = QK_L2NORM ? reciprocal_sqrt(sums.qq + 1e-6f) : 1.0f;
  float u[kValues];
  ValueVector<DTYPE> out;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    u[j] = k_rstd * (now.write[j] * now.v[j] - k_rstd * sums.with_k[j]);
    out[j] = from_float<DTYPE>(e.scale * q_rstd * (sums.with_q[j] + u[j] * sums.kq));
  }
  out.store(o, column);
  decode::add_update(S, now.k, u);
}

WYVERN_KERNEL(kThreads, 0) {
  const int column = block_index() % kTiles * BV + warp_index() * decode::kColumns<Spec>;
  if (column >= V) return;
  const int head = block_index() / kTiles;
  const int64 n = block_row();
  if (n >= e.N) return;
  const int64 begin = decode::sequence_start<VARLEN>(cu_seqlens, n, e);
  const int64 end = decode::sequence_start<VARLEN>(cu_seqlens, n + 1, e);
  const StateSlots slots =
      find_states<Spec>(n, head, e, state_stride, state_index, output_state_index);

  State S;
  S.clear();
  if (slots.null) {
    decode::clear_output<Spec>({o, o_stride}, begin, end, head, column);
    if constexpr (FINAL_STATE) S.store(final_state + (n * e.HV + head) * (K * V), column);
    return;
  }
  const Tensors in{{q, q_stride},         {k, k_stride},         {v, v_stride},
                   {erase, erase_stride}, {write, write_stride}, {g, g_stride}};
  Token next = {};
  if (begin < end) in.load(next, begin, head, column);
  if constexpr (INPLACE_STATE || INITIAL_STATE)
    if (starts_from_slot<Spec>(n, has_initial_state))
      S.load((INPLACE_STATE ? state : initial_state) + slots.from, column);
  Decay gate;
  gate.load(A_log, dt_bias, head);
  for (int64 token = begin; token < end; ++token) {
    const Token now = next;
    if (token + 1 < end) in.load(next, token + 1, head, column);
    step(S, now, gate, o + token * o_stride + head * V, column, e);
  }
  if constexpr (INPLACE_STATE) S.store(state + slots.to, column);
  if constexpr (FINAL_STATE) S.store(final_state + slots.to, column);
}
