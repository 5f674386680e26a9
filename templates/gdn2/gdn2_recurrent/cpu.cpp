// gdn2's recurrence token by token for one sequence, value head and BV columns of the state, which
// stays in scratch as its tensor has it: rows of K, or of V.
#include "device/cpu/gate.hpp"
#include "gdn2/gdn2_recurrent/cpu_layout.hpp"

constexpr gdn2_recurrent::ScratchLayout kScratch{Spec{}};
using StateTile = TileAt<kScratch.state>;
constexpr int kRow = StateTile::kStride;
constexpr int kKeys = round_up(K, kLanes);

/// What a token brings to the step, as fp32; 0 from K to the next whole vector.
struct Token {
  float* k;
  float* erasing;  // erase k, as k without its norm's scale
  float* q;
  float* decay;
  float* u;  // write v, then u
  float kq;  // k . q
  float k_rstd, q_rstd;
};

template <class T>
static void load_vector(const T* from, int count, float* to) {
  const int whole = count / kLanes * kLanes;
  for (int c = 0; c < whole; c += kLanes) store(to + c, load(from + c));
  if (whole < count) store(to + whole, load_part(from + whole, count - whole));
}

/// to *= from.
template <class T>
static void multiply_vector(const T* from, int count, float* to) {
  const int whole = count / kLanes * kLanes;
  for (int c = 0; c < whole; c += kLanes) store(to + c, load(to + c) * load(from + c));
  if (whole < count) store(to + whole, load(to + whole) * load_part(from + whole, count - whole));
}

static float dot(const float* a, const float* b) {
  f32 total{};
  for (int c = 0; c < kKeys; c += kLanes) total += load(a + c) * load(b + c);
  return sum(total);
}

/// exp of the log decay of every key.
static void load_decay(const G_DTYPE* g, const float* A_log, const float* dt_bias, int64 head,
                       float lower_bound, float* decay) {
  f32 rate = splat(1.0F);
  if constexpr (GATE_IN_KERNEL && HAS_A_LOG) rate = exp(splat(A_log[head]));
  for (int c = 0; c < K; c += kLanes) {
    const int count = K - c < kLanes ? K - c : kLanes;
    f32 x = load_heads(g + c, count);
    if constexpr (GATE_IN_KERNEL) {
      if constexpr (HAS_DT_BIAS) x += load_heads(dt_bias + head * K + c, count);
      x = log_decay<LOWER_BOUND>(x, rate, lower_bound);
    }
    store(decay + c, exp(x));
  }
}

/// u = k_rstd (w v - k_rstd S~^T (b k)), to be added times k as it is; o_t = scale (S~^T q + u
/// k.q). `with_k` and `with_q` are the decayed state's products with the erasing key and q as they
/// are.
static inline f32 solve(const Token& t, f32 v, f32 with_k, f32 with_q, float scale, f32& o) {
  const f32 u = (v - with_k * t.k_rstd) * t.k_rstd;
  o = (with_q + u * t.kq) * (scale * t.q_rstd);
  return u;
}

/// One step of N vectors of value columns of a state with rows of V. `to` gets o.
template <int N>
static void step_columns(float* state, const Token& t, float* u, float scale, float* to) {
  f32 with_k[N] = {}, with_q[N] = {};
  for (int r = 0; r < K; ++r) {
#pragma clang loop unroll(full)
    for (int i = 0; i < N; ++i) {
      const f32 x = load(state + r * kRow + i * kLanes) * t.decay[r];
      with_k[i] += x * t.erasing[r];
      with_q[i] += x * t.q[r];
    }
  }
  f32 solved[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; ++i) {
    f32 o;
    solved[i] = solve(t, load(u + i * kLanes), with_k[i], with_q[i], scale, o);
    store(to + i * kLanes, o);
  }
  for (int r = 0; r < K; ++r) {
#pragma clang loop unroll(full)
    for (int i = 0; i < N; ++i) {
      float* at = state + r * kRow + i * kLanes;
      store(at, load(at) * t.decay[r] + solved[i] * t.k[r]);
    }
  }
}

/// One step of `columns` rows of K; with_k and with_q are room for as many.
static void step_rows(float* state, const Token& t, int columns, float* with_k, float* with_q,
                      float scale, float* o) {
  for (int v = 0; v < columns; ++v) {
    float* row = state + v * kRow;
    f32 k_sum{}, q_sum{};
    for (int c = 0; c < kKeys; c += kLanes) {
      const f32 x = load(row + c) * load(t.decay + c);
      store(row + c, x);
      k_sum += x * load(t.erasing + c);
      q_sum += x * load(t.q + c);
    }
    with_k[v] = sum(k_sum);
    with_q[v] = sum(q_sum);
  }
  for (int v = 0; v < columns; v += kLanes) {
    f32 out;
    store(t.u + v, solve(t, load(t.u + v), load(with_k + v), load(with_q + v), scale, out));
    store(o + v, out);
  }
  for (int v = 0; v < columns; ++v)
    for (int c = 0; c < kKeys; c += kLanes) {
      float* at = state + v * kRow + c;
      store(at, load(at) + load(t.k + c) * t.u[v]);
    }
}

static void step(float* state, const Token& t, int columns, float* with_k, float* with_q,
                 float scale, float* o) {
  if constexpr (STATE_V_FIRST) return step_rows(state, t, columns, with_k, with_q, scale, o);
  int c = 0;
  for (; c + 4 * kLanes <= columns; c += 4 * kLanes)
    step_columns<4>(state + c, t, t.u + c, scale, o + c);
  for (; c < columns; c += kLanes) step_columns<1>(state + c, t, t.u + c, scale, o + c);
}

/// Zeros in o, for the tokens of a sequence without a slot.
static void clear_output(DTYPE* o, int64 tokens, int columns) {
  for (int64 t = 0; t < tokens; ++t)
    for (int c = 0; c < columns; c += kLanes)
      store_heads(o + t * HV * V + c, f32{}, columns - c < kLanes ? columns - c : kLanes);
}

template <class T>
static void load_state(const T* from, int columns, StateTile state) {
  if constexpr (STATE_V_FIRST)
    load_tile(from, K, columns, K, state);
  else
    load_tile(from, V, K, columns, state);
}
template <class T>
static void store_state(StateTile state, int columns, T* to) {
  if constexpr (STATE_V_FIRST)
    store_tile(state, columns, K, to, K);
  else
    store_tile(state, K, columns, to, V);
}

/// Entry i of cu_seqlens, or where sequence i of equal ones starts.
static int64 sequence_start(const SEQLENS_DTYPE* cu_seqlens, int64 i, const Extents& e) {
  if constexpr (!VARLEN) return i * e.T;
  const auto start = static_cast<int64>(cu_seqlens[i]);
  return start < 0 ? 0 : start > e.T ? e.T : start;
}

WYVERN_BLOCK {
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 head = block[1], n = block[2];
  const int64 begin = sequence_start(cu_seqlens, n, e);
  const int64 end = sequence_start(cu_seqlens, n + 1, e);
  const int64 slot = STATE_INDEX ? static_cast<int64>(state_index[n]) : n;
  const int64 tile_at = int64{first_column} * (STATE_V_FIRST ? K : 1);
  const int64 from = (slot * HV + head) * (K * V) + tile_at;
  const int64 to = (n * HV + head) * (K * V) + tile_at;
  constexpr int kStateRows = STATE_V_FIRST ? BV : K;

  const StateTile tile = cpu::tile_at<kScratch.state>(memory);
  Token t{.k = vector_at<kScratch.k>(memory),
          .erasing = vector_at<kScratch.erasing>(memory),
          .q = vector_at<kScratch.q>(memory),
          .decay = vector_at<kScratch.decay>(memory),
          .u = vector_at<kScratch.u>(memory)};
  float* out = vector_at<kScratch.out>(memory);
  float* with_k = vector_at<kScratch.with_k>(memory);
  float* with_q = vector_at<kScratch.with_q>(memory);

  const bool skipped = STATE_INDEX && (slot < 0 || slot >= e.S);
  if (INPLACE_STATE && !skipped)
    load_state(state + from, columns, tile);
  else if (INITIAL_STATE && !skipped)
    load_state(initial_state + from, columns, tile);
  else
    clear_rows(tile, 0, kStateRows, STATE_V_FIRST ? K : columns);
  if (skipped) {
    clear_output(o + (begin * HV + head) * V + first_column, end - begin, columns);
    if constexpr (FINAL_STATE) store_state(tile, columns, final_state + to);
    return;
  }
  for (int64 token = begin; token < end; ++token) {
    const int64 row = token * HV + head, key_row = token * H + head / (HV / H);
    load_vector(k + key_row * K, K, t.k);
    load_vector(k + key_row * K, K, t.erasing);
    multiply_vector(erase + row * K, K, t.erasing);
    load_vector(q + key_row * K, K, t.q);
    load_vector(v + row * V + first_column, columns, t.u);
    multiply_vector(write + row * V + first_column, columns, t.u);
    t.kq = dot(t.k, t.q);
    t.k_rstd = QK_L2NORM ? 1.0F / __builtin_sqrtf(dot(t.k, t.k) + 1e-6F) : 1.0F;
    t.q_rstd = QK_L2NORM ? 1.0F / __builtin_sqrtf(dot(t.q, t.q) + 1e-6F) : 1.0F;
    load_decay(g + row * K, A_log, dt_bias, head, e.lower_bound, t.decay);
    step(tile.data, t, columns, with_k, with_q, e.scale, out);
    for (int c = 0; c < columns; c += kLanes)
      store_heads(o + row * V + first_column + c, load(out + c),
                  columns - c < kLanes ? columns - c : kLanes);
  }
  if constexpr (INPLACE_STATE) store_state(tile, columns, state + from);
  if constexpr (FINAL_STATE) store_state(tile, columns, final_state + to);
}
