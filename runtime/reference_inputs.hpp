// Reads an operator's host tensors as float64 for the recurrence.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/operators/recurrence.hpp"

namespace wyvern {

/// Element `index` of a contiguous host tensor.
double load(const TensorView& view, std::int64_t index);
/// Elements [index, index + row.size()).
void load_row(const TensorView& view, std::int64_t index, std::span<double> row);

/// Throws Error(kBadInput) unless every input of the recurrence or its adjoint is present and has
/// its size.
void require_inputs(const Problem& problem, const Arguments& host);

/// The first token of each sequence in the flattened [B*T] order, and the end of the last one.
std::vector<std::int64_t> sequence_offsets(const Problem& problem, const Arguments& host);

/// The slots of a sequence's states and windows; without state_index they are `n`.
struct SequenceSlots {
  std::int64_t from, to;
};
/// Of sequence n; nothing for a null sequence.
std::optional<SequenceSlots> slots_of(const Problem& problem, const Arguments& host,
                                      std::int64_t n);
/// Element i of an index tensor, if it is a slot's index.
std::optional<std::int64_t> slot_at(const Problem& problem, const TensorView& index,
                                    std::int64_t i);
/// The row of intermediate_states that the states of sequence n's tokens go to, if there is one.
std::optional<std::int64_t> intermediate_row(const Problem& problem, const Arguments& host,
                                             std::int64_t n);
/// Whether sequence n starts from what is given in its slot, not from zeros.
bool starts_from_slot(const Problem& problem, const Arguments& host, std::int64_t n);

double sigmoid(double x);
/// sigmoid(x) or 2 sigmoid(x) where the tensor beta holds logits, else x; and the derivative.
double beta_of(const Problem& problem, double x);
double beta_slope(const Problem& problem, double x);

/// Replaces a row x of q or k by x / sqrt(sum x^2 + 1e-6); and the gradient of the result by the
/// gradient of x. Both do nothing unless the problem normalizes.
void normalize(const Problem& problem, std::span<double> x);
void normalize_backward(const Problem& problem, std::span<const double> x, std::span<double> dx);

/// The width of a token's gate: K for a gate per channel, 1 for one per head, 0 without a gate.
std::int64_t gate_width(const Problem& problem);

/// The gate of one value head: log decay as a function of x = g + dt_bias, and its derivatives.
class GateForm {
 public:
  GateForm(const Problem& problem, const Arguments& host, std::int64_t head);
  double log_decay(double x) const;
  /// d log_decay / dx and d log_decay / dA_log.
  double slope(double x) const;
  double rate_slope(double x) const;

 private:
  bool in_kernel_;
  std::optional<double> lower_bound_;
  double rate_ = 1;  ///< exp(A_log)
};

/// Reads the inputs of one value head token by token. `at` counts tokens over the flattened batch;
/// `row` is `at`, or the row of a tensor with several rows per token.
class HeadReader {
 public:
  /// Keeps references to `problem` and `host`.
  HeadReader(const Problem& problem, const Arguments& host, std::int64_t head);

  // Rows of q and k [K], normalized where the problem says so, and of v [V].
  void load_query(std::int64_t at, std::span<double> q) const;
  void load_key(std::int64_t row, std::span<double> k) const;
  void load_value(std::int64_t row, std::span<double> v) const;
  /// beta, and its derivative with respect to the tensor's element.
  double beta(std::int64_t row) const;
  double beta_slope(std::int64_t row) const;
  /// The decay of every row of the state [K]; 1 without a gate.
  void load_decay(std::int64_t at, std::span<double> decay) const;

  /// Computes dg of the token, and its summand of dA_log and ddt_bias at `parameter_row`, from the
  /// gradient `dlog` [K] of the log decay of each row of the state. Overwrites `dlog`; `x` is
  /// scratch of [gate_width].
  void gate_back(std::int64_t at, std::int64_t parameter_row, std::span<double> dlog,
                 std::span<double> x, GradientRows& gradients) const;

 private:
  /// x = g + dt_bias of a token, [gate_width].
  void load_gate(std::int64_t at, std::span<double> x) const;

  const Problem& problem_;
  const Arguments& host_;
  std::int64_t head_, key_head_;
  GateForm gate_;
  std::vector<double> bias_;
};

}  // namespace wyvern
