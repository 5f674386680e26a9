// The recurrence of an operator in float64, one value head of one sequence at a time: the oracle
// runs it forward and backward.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace wyvern {

/// Receives the gradients of the backward recurrence. Rows of different tokens, sequences and value
/// heads are separate, so that several threads may write at once.
class GradientRows {
 public:
  virtual ~GradientRows() = default;
  /// Row `row` of the gradient `name`, empty where the problem has no such output. A gradient of a
  /// tensor with tokens has a row for each row of the tensor and value head, number (flattened row)
  /// HV + head, also where the tensor is one of key heads: the sum over a group's value heads and
  /// the row norm's backward pass come afterwards. The gradient of a parameter (A_log) has a row
  /// for each sequence and value head, sequence HV + head, and starts at zero.
  virtual std::span<double> row(std::string_view name, std::int64_t row) = 0;
};

/// The recurrence of one value head of one sequence, row by row of k: a token has num_householder
/// of them, its steps. `at` counts rows over the flattened batch; S is [K,V], row-major. Not
/// thread-safe.
class Recurrence {
 public:
  virtual ~Recurrence() = default;
  /// S becomes the state after the step; after a token's last step out [V] = S^T q, without the
  /// scale.
  virtual void step(std::int64_t at, std::span<double> S, std::span<double> out) = 0;
  /// The same, and stores under `slot` (0, 1, ... in any order) the intermediates that step_back()
  /// needs.
  virtual void record(std::int64_t at, std::size_t slot, std::span<double> S) = 0;
  /// The adjoint of the step recorded under `slot`: dS is the gradient of the state after the step
  /// and becomes the gradient of the state before it. d_o [V] is the gradient of S^T q, zero but
  /// for a token's last step.
  virtual void step_back(std::int64_t at, std::size_t slot, std::span<const double> d_o,
                         std::span<double> dS, GradientRows& gradients) = 0;
};

/// The delta rule with beta, and a decay as the problem's gate has it (none, scalar, vector): S~ =
/// a S; u = beta (v - S~^T k); S = S~ + k u^T. With several steps a token only the first one
/// decays.
std::unique_ptr<Recurrence> delta_recurrence(const Problem& problem, const Arguments& host,
                                             std::int64_t sequence, std::int64_t head);

}  // namespace wyvern
