// Host tensors of an operator as float64, as the recurrence reads them.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace wyvern {

/// Element `index` of a contiguous host tensor.
double load(const TensorView& view, std::int64_t index);
/// Elements [index, index + row.size()).
void load_row(const TensorView& view, std::int64_t index, std::span<double> row);

/// Throws Error(kBadInput) unless every input that the recurrence or its adjoint reads is there
/// with its size.
void require_inputs(const Problem& problem, const Arguments& host);

/// First token of each sequence in the flattened [B*T] order, and the end of the last.
std::vector<std::int64_t> sequence_offsets(const Problem& problem, const Arguments& host);

double sigmoid(double x);
/// sigmoid(x) or 2 sigmoid(x) where beta are logits, else x; and its derivative.
double beta_of(const Problem& problem, double x);
double beta_slope(const Problem& problem, double x);

/// Replaces q or k row x by x / sqrt(sum x^2 + 1e-6); and turns the gradient of the result into
/// that of x. Both leave the row alone unless the problem normalizes.
void normalize(const Problem& problem, std::span<double> x);
void normalize_backward(const Problem& problem, std::span<const double> x, std::span<double> dx);

/// Widths of a token's gate: K for a gate per channel, 1 per head, 0 without a gate.
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

/// One token of one value head.
struct Token {
  Token(std::int64_t K, std::int64_t V);
  std::vector<double> q, k, decay;  ///< [K]; a scalar decay repeated
  std::vector<double> v;            ///< [V]
  double beta = 0;
};

class HeadReader {
 public:
  HeadReader(const Problem& problem, const Arguments& host, std::int64_t head);
  /// `at` counts tokens over the flattened batch.
  void load(std::int64_t at, Token& token) const;
  /// x = g + dt_bias of a token, [gate_width]; and the form that makes it a decay.
  void load_gate(std::int64_t at, std::span<double> x) const;
  const GateForm& gate() const { return gate_; }

 private:
  const Problem& problem_;
  const Arguments& host_;
  std::int64_t head_;
  GateForm gate_;
  std::vector<double> bias_;
};

}  // namespace wyvern
