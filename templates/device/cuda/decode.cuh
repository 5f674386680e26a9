// A state that one warp keeps in registers while tokens pass: how its lanes share it, and the
// vectors over K that they multiply it with. S is the kernel's Spec: BV value columns a block,
// num_warps warps that each have as many of them.
#pragma once

#include "device/cuda/gate.cuh"
#include "device/cuda/tile.cuh"
#include "device/cuda/token_rows.cuh"
#include "device/cuda/warp.cuh"

namespace wyvern::cuda::decode {

/// Value columns of a warp.
template <class S>
inline constexpr int kColumns = S::BV / S::num_warps;

/// Elements of a state's row in memory that move in one access.
template <class S>
inline constexpr int kVector =
    smaller(vector_bytes<Element<S::STATE_DTYPE>>(S::STATE_V_FIRST ? S::K : S::V) /
                static_cast<int>(size_of(S::STATE_DTYPE)),
            8);

/// How 32 lanes share a warp's part of the state. Lanes are laid out along the state's rows in
/// whole vectors first: along V for K-first states, along up to sixteen vectors of K for V-first
/// ones. A thread holds kKeys x kValues elements; its keys come in runs of kKeyRun neighbours, its
/// value columns in runs of kValueRun.
template <class S, bool ValuesFirst>
struct Lanes {
  static constexpr int kValueLanes = kColumns<S> / kVector<S>;
  static constexpr int kKeyLanes = 32 / kValueLanes;
  static constexpr int kFirstKeyLane = kValueLanes;
  static constexpr int kKeyRun =
      smaller(vector_bytes<Element<S::DTYPE>>(S::K) / static_cast<int>(size_of(S::DTYPE)),
              power_of_two(ceil_div(S::K, kKeyLanes)));
  static constexpr int kKeys = round_up(ceil_div(S::K, kKeyLanes), kKeyRun);
  static constexpr int kValues = kVector<S>;
  static constexpr int kValueRun = kVector<S>;
  WYVERN_DEVICE static int key_lane() { return lane_index() / kValueLanes; }
  WYVERN_DEVICE static int key(int run) { return key_lane() * kKeys + run * kKeyRun; }
  WYVERN_DEVICE static int value(int) { return lane_index() % kValueLanes * kVector<S>; }
};
template <class S>
struct Lanes<S, true> {
  static constexpr int kKeyLanes = smaller(power_of_two(S::K / kVector<S>), 16);
  static constexpr int kValueLanes = 32 / kKeyLanes;
  static constexpr int kFirstKeyLane = 1;
  static constexpr int kKeyRun = kVector<S>;
  static constexpr int kKeys = ceil_div(S::K / kVector<S>, kKeyLanes) * kVector<S>;
  static constexpr int kValues = kColumns<S> / kValueLanes;
  static constexpr int kValueRun = 1;
  WYVERN_DEVICE static int key_lane() { return lane_index() % kKeyLanes; }
  WYVERN_DEVICE static int key(int run) { return (run * kKeyLanes + key_lane()) * kVector<S>; }
  WYVERN_DEVICE static int value(int run) { return run * kValueLanes + lane_index() / kKeyLanes; }
};
template <class S>
struct Share : Lanes<S, S::STATE_V_FIRST> {
  using Base = Lanes<S, S::STATE_V_FIRST>;
  static constexpr int kKeyRuns = Base::kKeys / Base::kKeyRun;
  static constexpr int kValueRuns = Base::kValues / Base::kValueRun;

  /// The sum over the lanes that share a value column.
  WYVERN_DEVICE static float sum_key_lanes(float x) {
#pragma unroll
    for (int mask = 1; mask < Base::kKeyLanes; mask *= 2)
      x += shuffle_xor(x, mask * Base::kFirstKeyLane);
    return x;
  }
  /// The same of N sums, a power of two, bit for bit. Lanes that hold two halves of the sums give
  /// one away in each round, so that each sum ends in few lanes, of which all lanes then take it.
  template <int N>
  WYVERN_DEVICE static void sum_key_lanes(float (&x)[N]) {
    add_halves<N, 1>(x);
    const int first = lane_index() - Base::key_lane() * Base::kFirstKeyLane;
    float sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      sums[i] = shuffle(x[i % larger(N / Base::kKeyLanes, 1)],
                        first + sum_lane<N>(i) * Base::kFirstKeyLane);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = sums[i];
  }

 private:
  /// The rounds from lanes `Mask` apart on, of the first Count of x.
  template <int Count, int Mask, int N>
  WYVERN_DEVICE static void add_halves(float (&x)[N]) {
    if constexpr (Mask < Base::kKeyLanes) {
      constexpr int kHalf = larger(Count / 2, 1);
      const bool upper = (Base::key_lane() & Mask) != 0;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float other = x[Count - kHalf + i];
        const float given = upper ? x[i] : other;
        x[i] = (upper ? other : x[i]) + shuffle_xor(given, Mask * Base::kFirstKeyLane);
      }
      add_halves<kHalf, 2 * Mask>(x);
    }
  }
  /// The first key lane where sum i of N ends.
  template <int N>
  WYVERN_DEVICE static constexpr int sum_lane(int i) {
    int lane = 0;
    for (int mask = 1, half = N / 2; mask < Base::kKeyLanes && half > 0; mask *= 2, half /= 2)
      if ((i & half) != 0) lane |= mask;
    return lane;
  }
};

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
template <bool Shared = false, int N, class T>
WYVERN_DEVICE void store_run(T* to, const T (&from)[N]) {
  constexpr int kPart = smaller(N, 16 / static_cast<int>(sizeof(T)));
#pragma unroll
  for (int i = 0; i < N; i += kPart) {
    Vector<T, kPart> part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) part.at[j] = from[i + j];
    store_vector<Shared>(to + i, part);
  }
}

/// A thread's part of a vector over K, as stored; zero where K has ended.
template <class S, class T>
struct KeyVector {
  T run[Share<S>::kKeyRuns][Share<S>::kKeyRun];

  WYVERN_DEVICE void load(const T* from) {
#pragma unroll
    for (int r = 0; r < Share<S>::kKeyRuns; ++r) {
      if (Share<S>::key(r) < S::K) {
        load_run(run[r], from + Share<S>::key(r));
      } else {
#pragma unroll
        for (int i = 0; i < Share<S>::kKeyRun; ++i) run[r][i] = from_float<T>(0.0f);
      }
    }
  }
  WYVERN_DEVICE float operator[](int i) const {
    return to_float(run[i / Share<S>::kKeyRun][i % Share<S>::kKeyRun]);
  }
};

/// A thread's part of a vector over V, as stored; elements past V are not read.
template <class S, class T>
struct ValueVector {
  T run[Share<S>::kValueRuns][Share<S>::kValueRun];

  WYVERN_DEVICE void load(const T* from, int column) {
#pragma unroll
    for (int r = 0; r < Share<S>::kValueRuns; ++r)
      if (column + Share<S>::value(r) < S::V) load_run(run[r], from + column + Share<S>::value(r));
  }
  /// Of the lanes that hold the same values one writes them.
  WYVERN_DEVICE void store(T* to, int column) const {
#pragma unroll
    for (int r = 0; r < Share<S>::kValueRuns; ++r)
      if (Share<S>::key_lane() == 0 && column + Share<S>::value(r) < S::V)
        store_run(to + column + Share<S>::value(r), run[r]);
  }
  WYVERN_DEVICE T& operator[](int j) {
    return run[j / Share<S>::kValueRun][j % Share<S>::kValueRun];
  }
  WYVERN_DEVICE float operator[](int j) const {
    return to_float(run[j / Share<S>::kValueRun][j % Share<S>::kValueRun]);
  }
};

/// A thread's part of a state.
template <class S>
struct State {
  float x[Share<S>::kKeys][Share<S>::kValues];

  /// Calls visit(offset of a run in the state, its first key index, its first value index) for
  /// every run of neighbours in memory inside K and V.
  template <class Visit>
  WYVERN_DEVICE static void for_runs(int column, Visit&& visit) {
    using At = Share<S>;
    if constexpr (S::STATE_V_FIRST) {
#pragma unroll
      for (int j = 0; j < At::kValues; ++j)
#pragma unroll
        for (int r = 0; r < At::kKeyRuns; ++r)
          if (column + At::value(j) < S::V && At::key(r) < S::K)
            visit((column + At::value(j)) * S::K + At::key(r), r * At::kKeyRun, j);
    } else {
#pragma unroll
      for (int i = 0; i < At::kKeys; ++i) {
        const int key = At::key(i / At::kKeyRun) + i % At::kKeyRun;
        if (column + At::value(0) < S::V && key < S::K)
          visit(key * S::V + column + At::value(0), i, 0);
      }
    }
  }
  WYVERN_DEVICE float& element(int i, int j, int n) {
    return S::STATE_V_FIRST ? x[i + n][j] : x[i][j + n];
  }

  WYVERN_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < Share<S>::kKeys; ++i)
#pragma unroll
      for (int j = 0; j < Share<S>::kValues; ++j) x[i][j] = 0.0f;
  }
  /// Elements count times `scale`.
  template <class T>
  WYVERN_DEVICE void load(const T* from, int column, float scale = 1.0f) {
    for_runs(column, [&](int offset, int i, int j) {
      T run[kVector<S>];
      load_run(run, from + offset);
#pragma unroll
      for (int n = 0; n < kVector<S>; ++n) element(i, j, n) = to_float(run[n]) * scale;
    });
  }
  /// To global memory, or to shared memory.
  template <bool Shared = false, class T>
  WYVERN_DEVICE void store(T* to, int column, float scale = 1.0f) {
    const float factor = 1.0f / scale;
    for_runs(column, [&](int offset, int i, int j) {
      T run[kVector<S>];
#pragma unroll
      for (int n = 0; n < kVector<S>; ++n) run[n] = from_float<T>(element(i, j, n) * factor);
      store_run<Shared>(to + offset, run);
    });
  }
};

/// The decay that a gate stands for; with the gate in the kernel g is its raw input, and `rate`
/// exp(A_log).
template <class S>
WYVERN_DEVICE float decay_of(float g, float bias, float rate, float lower_bound) {
  if constexpr (!S::GATE_IN_KERNEL) return decay(g);
  return decay(log_decay<S::LOWER_BOUND>(g + bias, rate, lower_bound));
}

/// The decays of a token: of every key where `PerKey`, else one for all.
template <class S, bool PerKey>
struct Decay {
  static constexpr int kCount = PerKey ? Share<S>::kKeys : 1;
  float rate = 1.0f;  // exp(A_log)
  float bias[kCount] = {};

  WYVERN_DEVICE void load(const float* A_log, const float* dt_bias, int head) {
    if constexpr (S::GATE_IN_KERNEL && S::HAS_A_LOG) rate = gate_rate<S::LOWER_BOUND>(A_log[head]);
    if constexpr (S::GATE_IN_KERNEL && S::HAS_DT_BIAS) {
      if constexpr (PerKey) {
        KeyVector<S, float> all;
        all.load(dt_bias + head * S::K);
#pragma unroll
        for (int i = 0; i < kCount; ++i) bias[i] = all[i];
      } else {
        bias[0] = dt_bias[head];
      }
    }
  }
  WYVERN_DEVICE float of(float g, int i, float lower_bound) const {
    return decay_of<S>(g, bias[i], rate, lower_bound);
  }
};

/// The decayed state's products with k (or what erases in its place) and q, and what else a
/// token's keys sum to.
template <class S>
struct Products {
  float with_k[Share<S>::kValues] = {};
  float with_q[Share<S>::kValues] = {};
  float kq = 0.0f, kk = 0.0f, qq = 0.0f;

  /// Adds key i of k and q to the sums of the keys.
  WYVERN_DEVICE void add_keys(float k, float q) {
    kq = fused_multiply_add(k, q, kq);
    if constexpr (S::QK_L2NORM) {
      kk = fused_multiply_add(k, k, kk);
      qq = fused_multiply_add(q, q, qq);
    }
  }
  WYVERN_DEVICE void reduce() {
#pragma unroll
    for (int j = 0; j < Share<S>::kValues; ++j) {
      with_k[j] = Share<S>::sum_key_lanes(with_k[j]);
      with_q[j] = Share<S>::sum_key_lanes(with_q[j]);
    }
    kq = Share<S>::sum_key_lanes(kq);
    if constexpr (S::QK_L2NORM) {
      kk = Share<S>::sum_key_lanes(kk);
      qq = Share<S>::sum_key_lanes(qq);
    }
  }
};

/// S~ + k u^T, which ends a step.
template <class S, class Keys>
WYVERN_DEVICE void add_update(State<S>& state, const Keys& k, const float (&u)[Share<S>::kValues]) {
#pragma unroll
  for (int i = 0; i < Share<S>::kKeys; ++i)
#pragma unroll
    for (int j = 0; j < Share<S>::kValues; ++j)
      state.x[i][j] = fused_multiply_add(k[i], u[j], state.x[i][j]);
}

/// What an element of o is multiplied with for its input z of the gate.
template <class S>
WYVERN_DEVICE float output_gate(float z) {
  return S::NORM_SILU ? z * sigmoid(z) : sigmoid(z);
}

/// A sequence without a slot: zeros in the warp's columns of its rows of o.
template <class S>
WYVERN_DEVICE void clear_output(const TokenRows<Element<S::DTYPE>>& o, int64 begin, int64 end,
                                int head, int column) {
  for (int64 token = begin; token < end; ++token)
    for (int c = column + lane_index(); c < smaller(column + kColumns<S>, S::V); c += 32)
      o.row(token)[head * S::V + c] = from_float<Element<S::DTYPE>>(0.0f);
}

/// Entry i of cu_seqlens, or where sequence i of equal ones starts.
template <bool Packed, class T>
WYVERN_DEVICE int64 sequence_start(const T* cu_seqlens, int64 i, const Extents& e) {
  if constexpr (!Packed) return i * e.T;
  const int64 start = static_cast<int64>(cu_seqlens[i]);
  return start < 0 ? 0 : start > e.T ? e.T : start;
}

}  // namespace wyvern::cuda::decode
