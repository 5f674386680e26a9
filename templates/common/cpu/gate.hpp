// Per-token work on [B,T,HV] tensors: the heads of a token lie side by side, a vector of them at a
// time.
#pragma once

#include "common/cpu/chunk.hpp"

/// Calls body(first head, number of heads <= kLanes) until all heads are covered.
template <class Body>
inline void for_heads(int heads, Body body) {
  for (int head = 0; head < heads; head += kLanes)
    body(head, heads - head < kLanes ? heads - head : kLanes);
}

template <class T>
inline f32 load_heads(const T* p, int count) {
  return count == kLanes ? load(p) : load_part(p, count);
}
template <class T>
inline void store_heads(T* p, f32 v, int count) {
  if (count == kLanes)
    store(p, v);
  else
    store_part(p, v, count);
}

/// The gate's parameters of a vector of heads.
struct HeadGate {
  f32 factor;  ///< -exp(A_log)
  f32 bias;
};

template <bool Bias>
inline HeadGate load_gate(const float* A_log, const float* dt_bias, int head, int count) {
  HeadGate gate{-exp(load_heads(A_log + head, count)), f32{}};
  if constexpr (Bias) gate.bias = load_heads(dt_bias + head, count);
  return gate;
}

inline f32 apply(const HeadGate& gate, f32 g) { return gate.factor * softplus(g + gate.bias); }
