// The recurrence token by token, for a few tokens a sequence. A warp keeps all of K x kColumns of
// one state in registers from the first token to the last; warps never meet, so there is neither
// shared memory nor a barrier, and a state moves once in and once out.
#include "device/cuda/gate.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kTiles = ceil_div(V, BV);
constexpr int kColumns = BV / num_warps;  // value columns of a warp
constexpr int kRowLength = STATE_V_FIRST ? K : V;
constexpr int kVector =
    vector_bytes<STATE_DTYPE>(kRowLength) / static_cast<int>(sizeof(STATE_DTYPE));

/// How 32 lanes share a warp's part of the state. Lanes lie along the state's rows in whole vectors
/// first: along V for K-first states, along up to sixteen vectors of K for V-first ones. A thread
/// holds kKeys x kValues elements; its keys come in runs of kKeyRun neighbours, its value columns
/// in runs of kValueRun.
template <int Columns>
struct KeyFirst {
  static constexpr int kValueLanes = Columns / kVector;
  static constexpr int kKeyLanes = 32 / kValueLanes;
  static constexpr int kFirstKeyLane = kValueLanes;
  static constexpr int kKeyRun = smaller(vector_bytes<DTYPE>(K) / static_cast<int>(sizeof(DTYPE)),
                                         power_of_two(ceil_div(K, kKeyLanes)));
  static constexpr int kKeys = round_up(ceil_div(K, kKeyLanes), kKeyRun);
  static constexpr int kValues = kVector;
  static constexpr int kValueRun = kVector;
  WYVERN_DEVICE static int key_lane() { return lane_index() / kValueLanes; }
  WYVERN_DEVICE static int key(int run) { return key_lane() * kKeys + run * kKeyRun; }
  WYVERN_DEVICE static int value(int) { return lane_index() % kValueLanes * kVector; }
};
template <int Columns>
struct ValueFirst {
  static constexpr int kKeyLanes = smaller(power_of_two(K / kVector), 16);
  static constexpr int kValueLanes = 32 / kKeyLanes;
  static constexpr int kFirstKeyLane = 1;
  static constexpr int kKeyRun = kVector;
  static constexpr int kKeys = ceil_div(K / kVector, kKeyLanes) * kVector;
  static constexpr int kValues = Columns / kValueLanes;
  static constexpr int kValueRun = 1;
  WYVERN_DEVICE static int key_lane() { return lane_index() % kKeyLanes; }
  WYVERN_DEVICE static int key(int run) { return (run * kKeyLanes + key_lane()) * kVector; }
  WYVERN_DEVICE static int value(int run) { return run * kValueLanes + lane_index() / kKeyLanes; }
};
template <bool ValuesFirst>
struct Choose {
  using Type = KeyFirst<kColumns>;
};
template <>
struct Choose<true> {
  using Type = ValueFirst<kColumns>;
};
using Share = Choose<STATE_V_FIRST>::Type;

constexpr int kKeys = Share::kKeys;
constexpr int kKeyRun = Share::kKeyRun;
constexpr int kKeyRuns = kKeys / kKeyRun;
constexpr int kValues = Share::kValues;
constexpr int kValueRun = Share::kValueRun;
constexpr int kValueRuns = kValues / kValueRun;

/// N neighbours in accesses of up to 16 bytes, from a multiple of N elements.
template <int N, class T>
WYVERN_DEVICE void load_run(T (&to)[N], const T* from) {
  constexpr int kPart = smaller(N, 16 / static_cast<int>(sizeof(T)));
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    const auto part = load<kPart>(from + i);
#pragma unroll
    for (int j = 0; j < kPart; ++j) to[i + j] = part.at[j];
  }
}
template <int N, class T>
WYVERN_DEVICE void store_run(T* to, const T (&from)[N]) {
  constexpr int kPart = smaller(N, 16 / static_cast<int>(sizeof(T)));
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    Vector<T, kPart> part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) part.at[j] = from[i + j];
    store_vector(to + i, part);
  }
}

/// A thread's part of a vector over K, as stored; zero where K has ended.
template <class T>
struct KeyVector {
  T run[kKeyRuns][kKeyRun];

  WYVERN_DEVICE void load(const T* from) {
#pragma unroll
    for (int r = 0; r < kKeyRuns; ++r) {
      if (Share::key(r) < K) {
        load_run(run[r], from + Share::key(r));
      } else {
#pragma unroll
        for (int i = 0; i < kKeyRun; ++i) run[r][i] = from_float<T>(0.0f);
      }
    }
  }
  WYVERN_DEVICE float operator[](int i) const { return to_float(run[i / kKeyRun][i % kKeyRun]); }
};

/// A thread's part of a state.
struct State {
  float x[kKeys][kValues];

  /// Calls visit(offset of a run in the state, its first key index, its first value index) for
  /// every run of neighbours in memory that lies inside K and V.
  template <class Visit>
  WYVERN_DEVICE static void for_runs(int column, Visit&& visit) {
    if constexpr (STATE_V_FIRST) {
#pragma unroll
      for (int j = 0; j < kValues; ++j)
#pragma unroll
        for (int r = 0; r < kKeyRuns; ++r)
          if (column + Share::value(j) < V && Share::key(r) < K)
            visit((column + Share::value(j)) * K + Share::key(r), r * kKeyRun, j);
    } else {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key = Share::key(i / kKeyRun) + i % kKeyRun;
        if (column + Share::value(0) < V && key < K)
          visit(key * V + column + Share::value(0), i, 0);
      }
    }
  }
  WYVERN_DEVICE float& element(int i, int j, int n) {
    return STATE_V_FIRST ? x[i + n][j] : x[i][j + n];
  }

  WYVERN_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int j = 0; j < kValues; ++j) x[i][j] = 0.0f;
  }
  template <class T>
  WYVERN_DEVICE void load(const T* from, int column) {
    for_runs(column, [&](int offset, int i, int j) {
      T run[kVector];
      load_run(run, from + offset);
#pragma unroll
      for (int n = 0; n < kVector; ++n) element(i, j, n) = to_float(run[n]);
    });
  }
  template <class T>
  WYVERN_DEVICE void store(T* to, int column) {
    for_runs(column, [&](int offset, int i, int j) {
      T run[kVector];
#pragma unroll
      for (int n = 0; n < kVector; ++n) run[n] = from_float<T>(element(i, j, n));
      store_run(to + offset, run);
    });
  }
};

/// What a step of a token brings, as stored: loaded one step ahead of its use. A token's first step
/// decays the state, its last one reads it with q.
struct Token {
  KeyVector<DTYPE> k, q;
  KeyVector<G_DTYPE> gates;  // VECTOR_GATE
  G_DTYPE gate;              // SCALAR_GATE
  BETA_DTYPE beta;
  DTYPE v[kValueRuns][kValueRun];
};

struct Tensors {
  const DTYPE* q;
  const DTYPE* k;
  const DTYPE* v;
  const BETA_DTYPE* beta;
  const G_DTYPE* g;
};

/// Whether row `row` of k, of which a token has STEPS, decays the state; whether it reads it.
WYVERN_DEVICE bool is_first(int64 row) { return STEPS == 1 || row % STEPS == 0; }
WYVERN_DEVICE bool is_last(int64 row) { return STEPS == 1 || row % STEPS == STEPS - 1; }

WYVERN_DEVICE void load_step(Token& to, const Tensors& in, int64 row, int head, int column) {
  const int64 keys = (row * H + head / (HV / H)) * K;
  const int64 values = row * HV + head;
  // Of one step a token the same expressions, as the compiler orders its code by them.
  const int64 queries = STEPS == 1 ? keys : (row / STEPS * H + head / (HV / H)) * K;
  const int64 gates = STEPS == 1 ? values : row / STEPS * HV + head;
  to.k.load(in.k + keys);
  if (is_last(row)) to.q.load(in.q + queries);
  if (is_first(row)) {
    if constexpr (VECTOR_GATE) to.gates.load(in.g + gates * K);
    if constexpr (SCALAR_GATE) to.gate = in.g[gates];
  }
  to.beta = in.beta[values];
#pragma unroll
  for (int r = 0; r < kValueRuns; ++r)
    if (column + Share::value(r) < V)
      load_run(to.v[r], in.v + values * V + column + Share::value(r));
}

/// The decays of a token: of every key for a vector gate, one for all else.
struct Decay {
  static constexpr int kCount = VECTOR_GATE ? kKeys : 1;
  float rate = 1.0f;  // exp(A_log)
  float bias[kCount] = {};

  WYVERN_DEVICE void load(const float* A_log, const float* dt_bias, int head) {
    if constexpr (GATE_IN_KERNEL && HAS_A_LOG) rate = exponential(A_log[head]);
    if constexpr (GATE_IN_KERNEL && HAS_DT_BIAS) {
      if constexpr (VECTOR_GATE) {
        KeyVector<float> all;
        all.load(dt_bias + head * K);
#pragma unroll
        for (int i = 0; i < kCount; ++i) bias[i] = all[i];
      } else {
        bias[0] = dt_bias[head];
      }
    }
  }
  WYVERN_DEVICE float of(float g, int i, float lower_bound) const {
    if constexpr (!GATE_IN_KERNEL) return decay(g);
    return decay(log_decay<LOWER_BOUND>(g + bias[i], rate, lower_bound));
  }
};

WYVERN_DEVICE float sum_key_lanes(float x) {
#pragma unroll
  for (int mask = 1; mask < Share::kKeyLanes; mask *= 2)
    x += shuffle_xor(x, mask * Share::kFirstKeyLane);
  return x;
}

/// The decayed state's products with k and q, and what else a token's keys sum to.
struct Products {
  float with_k[kValues] = {};
  float with_q[kValues] = {};
  float kq = 0.0f, kk = 0.0f, qq = 0.0f;

  WYVERN_DEVICE void reduce() {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      with_k[j] = sum_key_lanes(with_k[j]);
      with_q[j] = sum_key_lanes(with_q[j]);
    }
    kq = sum_key_lanes(kq);
    if constexpr (QK_L2NORM) {
      kk = sum_key_lanes(kk);
      qq = sum_key_lanes(qq);
    }
  }
};

WYVERN_DEVICE void decay_and_multiply(State& S, Products& sums, const Token& now, const Decay& gate,
                                      bool first, float lower_bound) {
  float scalar = 1.0f;
  if constexpr (SCALAR_GATE)
    if (first) scalar = gate.of(to_float(now.gate), 0, lower_bound);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float k = now.k[i];
    const float q = now.q[i];
    float factor = scalar;
    if constexpr (VECTOR_GATE)
      if (first) factor = gate.of(now.gates[i], i, lower_bound);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if constexpr (GATED) S.x[i][j] *= factor;
      sums.with_k[j] = fused_multiply_add(S.x[i][j], k, sums.with_k[j]);
      sums.with_q[j] = fused_multiply_add(S.x[i][j], q, sums.with_q[j]);
    }
    sums.kq = fused_multiply_add(k, q, sums.kq);
    if constexpr (QK_L2NORM) {
      sums.kk = fused_multiply_add(k, k, sums.kk);
      sums.qq = fused_multiply_add(q, q, sums.qq);
    }
  }
  sums.reduce();
}

/// One step: the state becomes S_t, and of a token's last one the thread's columns of o_t = scale
/// (S~^T q + u (k . q)) go to `o`. One round of sums serves both u and o.
WYVERN_DEVICE void step(State& S, const Token& now, const Decay& gate, bool first, bool last,
                        DTYPE* o, int column, const Extents& e) {
  Products sums;
  decay_and_multiply(S, sums, now, gate, first, e.lower_bound);
  const float k_rstd = QK_L2NORM ? reciprocal_sqrt(sums.kk + 1e-6f) : 1.0f;
  const float q_rstd = QK_L2NORM ? reciprocal_sqrt(sums.qq + 1e-6f) : 1.0f;
  const float beta = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(now.beta);
  float u[kValues];
  DTYPE out[kValueRuns][kValueRun];
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const float v = to_float(now.v[j / kValueRun][j % kValueRun]);
    u[j] = k_rstd * (beta * (v - k_rstd * sums.with_k[j]));
    out[j / kValueRun][j % kValueRun] =
        from_float<DTYPE>(e.scale * q_rstd * (sums.with_q[j] + u[j] * sums.kq));
  }
#pragma unroll
  for (int r = 0; r < kValueRuns; ++r)
    if (last && Share::key_lane() == 0 && column + Share::value(r) < V)
      store_run(o + column + Share::value(r), out[r]);
#pragma unroll
  for (int i = 0; i < kKeys; ++i)
#pragma unroll
    for (int j = 0; j < kValues; ++j) S.x[i][j] = fused_multiply_add(now.k[i], u[j], S.x[i][j]);
}

/// A sequence without a slot: zeros for its outputs.
WYVERN_DEVICE void clear_output(DTYPE* o, int64 begin, int64 end, int head, int column) {
  for (int64 token = begin; token < end; ++token)
    for (int c = column + lane_index(); c < smaller(column + kColumns, V); c += 32)
      o[(token * HV + head) * V + c] = from_float<DTYPE>(0.0f);
}

/// Entry i of cu_seqlens, or where sequence i of equal ones starts.
template <class T>
WYVERN_DEVICE int64 sequence_start(const T* cu_seqlens, int64 i, const Extents& e) {
  if constexpr (!VARLEN) return i * e.T;
  const int64 start = static_cast<int64>(cu_seqlens[i]);
  return start < 0 ? 0 : start > e.T ? e.T : start;
}

WYVERN_KERNEL(kThreads, 0) {
  const int column = block_index() % kTiles * BV + warp_index() * kColumns;
  if (column >= V) return;
  const int head = block_index() / kTiles % HV;
  const int64 n = block_index() / kTiles / HV;
  const int64 begin = sequence_start(cu_seqlens, n, e);
  const int64 end = sequence_start(cu_seqlens, n + 1, e);
  const int64 slot = STATE_INDEX ? static_cast<int64>(state_index[n]) : n;
  const int64 from = (slot * HV + head) * (K * V);
  const int64 to = (n * HV + head) * (K * V);

  State S;
  S.clear();
  if (STATE_INDEX && (slot < 0 || slot >= e.S)) {
    clear_output(o, begin, end, head, column);
    if constexpr (FINAL_STATE) S.store(final_state + to, column);
    return;
  }
  const Tensors in{q, k, v, beta, g};
  Token next = {};
  if (begin < end) load_step(next, in, begin * STEPS, head, column);
  if constexpr (INPLACE_STATE)
    S.load(state + from, column);
  else if constexpr (INITIAL_STATE)
    S.load(initial_state + from, column);
  Decay gate;
  gate.load(A_log, dt_bias, head);
  for (int64 row = begin * STEPS; row < end * STEPS; ++row) {
    const Token now = next;
    if (row + 1 < end * STEPS) load_step(next, in, row + 1, head, column);
    step(S, now, gate, is_first(row), is_last(row), o + (row / STEPS * HV + head) * V, column, e);
  }
  if constexpr (INPLACE_STATE) S.store(state + from, column);
  if constexpr (FINAL_STATE) S.store(final_state + to, column);
}
