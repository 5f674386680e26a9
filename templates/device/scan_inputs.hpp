// What scans of chunks read. For kernels of every device. S is the kernel's Spec.
#pragma once

#include "device/token_rows.hpp"

namespace wyvern {

/// Rows of keys of a scan, or of queries: those `given`, or with a vector gate `decayed`, kg or qg.
template <class S, class T>
TokenRows<const T> scanned_rows(const T* given, int64 stride, const T* decayed, const Extents& e) {
  if constexpr (S::VECTOR_GATE) return {decayed, int64{e.HV} * S::K};
  return {given, stride};
}

/// Tensors that a scan of states reads, whole or from its first token, head and column of V on;
/// `k` is kg with a vector gate. `own_k` is k, for checkpoints inside chunks with a vector gate.
template <class S>
struct ForwardScanInputs {
  using T = Element<S::DTYPE>;
  using U = Element<S::U_DTYPE>;

  TokenRows<const T> k;
  const T* w;
  const U* u;
  const float* G;
  const float* Gk;
  const float* k_rstd;
  const Extents& e;
  TokenRows<const T> own_k{};
  float u_factor = 1.0F;  ///< of elements of u, in the unit of the scan's states

  /// Of whole tensors: where a scan that starts at `token` finds its own.
  ForwardScanInputs at(int64 token, int64 hv, int first_column) const {
    const int64 row = token * e.HV + hv;
    const int64 key_head = e.key_head(hv);
    return {.k = k.at(token, (S::VECTOR_GATE ? hv : key_head) * S::K),
            .w = w + row * S::K,
            .u = u + row * S::V + first_column,
            .G = G + row,
            .Gk = Gk + row * S::K,
            .k_rstd = k_rstd + token * e.H + key_head,
            .e = e,
            .own_k = own_k.at(token, key_head * S::K),
            .u_factor = u_factor};
  }
};

/// The same of a scan of states' gradients; `q` and `k` are qg and kg with a vector gate.
template <class S>
struct ReverseScanInputs {
  using T = Element<S::DTYPE>;

  TokenRows<const T> q;
  TokenRows<const T> k;
  const T* w;
  TokenRows<const T> dO;
  const T* dv_local;
  const float* G;
  const float* Gk;
  const float* q_rstd;
  const float* k_rstd;
  const Extents& e;
  float scale;             ///< factor on o, by the unit of the scan's gradients
  float dv_factor = 1.0F;  ///< of elements of dv_local, in that unit

  /// Of whole tensors: where a scan that starts at `token` finds its own.
  ReverseScanInputs at(int64 token, int64 hv, int first_column) const {
    const int64 row = token * e.HV + hv;
    const int64 key = S::VECTOR_GATE ? hv : e.key_head(hv);
    const int64 key_row = token * e.H + key;
    return {.q = q.at(token, key * S::K),
            .k = k.at(token, key * S::K),
            .w = w + row * S::K,
            .dO = dO.at(token, hv * S::V + first_column),
            .dv_local = dv_local + row * S::V + first_column,
            .G = G + row,
            .Gk = Gk + row * S::K,
            .q_rstd = q_rstd + key_row,
            .k_rstd = k_rstd + key_row,
            .e = e,
            .scale = scale,
            .dv_factor = dv_factor};
  }
};

}  // namespace wyvern
