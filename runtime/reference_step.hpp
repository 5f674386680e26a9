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

/// The adjoint of a step: S is the state after decay and before the write, dS the gradient of the
/// state after the write, `erasing_key` the key that reads the state (beta k), du the gradient of
/// u. Computes dq = S do, dk = dS u, d_erasing_key = -S du and, with dS~ = dS - erasing_key du^T,
/// dg = rowsum(dS~ * S); replaces dS by diag(decay) dS~.
void adjoint_rows(const double* S, double* dS, std::span<const double> erasing_key,
                  std::span<const double> decay, std::span<const double> u,
                  std::span<const double> du, std::span<const double> d_o, std::span<double> dq,
                  std::span<double> dk, std::span<double> d_erasing_key, std::span<double> dg);

}  // namespace wyvern
