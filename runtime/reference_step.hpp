// The inner loops of the oracle: passes over a [K,V] matrix of doubles, V contiguous.
#pragma once

#include <cstddef>
#include <span>

namespace wyvern {

/// to = diag(decay) from; out = to^T k. `to` may be `from`.
void decay_and_read(const double* from, double* to, std::span<const double> decay,
                    std::span<const double> k, std::span<double> out);

/// to = from + k u^T; out = to^T q. `to` may be `from`.
void write_and_read(const double* from, double* to, std::span<const double> k,
                    std::span<const double> u, std::span<const double> q, std::span<double> out);

/// The rows of the adjoint's step: S is the state after decay and before the write, dS the gradient
/// of the state after the write. Gives S do and dS u - beta S du, and, with dS~ = dS - beta k du^T,
/// rowsum(dS~ * S); leaves diag(decay) dS~ in dS.
void adjoint_rows(const double* S, double* dS, double beta, std::span<const double> k,
                  std::span<const double> decay, std::span<const double> u,
                  std::span<const double> du, std::span<const double> d_o, std::span<double> dq,
                  std::span<double> dk, std::span<double> dg);

}  // namespace wyvern
