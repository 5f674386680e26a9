// The stages' references by name, in groups, and inputs that several of them share.
#pragma once

#include <map>
#include <string_view>

#include "tests/support/stage_matrix.hpp"
#include "tests/support/stage_reference.hpp"

namespace wyvern::testing {

/// Adds one stage's outputs to the tensors.
using StageReference = void (*)(const StageContext&, TensorMap&);
using StageReferences = std::map<std::string_view, StageReference>;

const StageReferences& row_references();  ///< work on rows and gates alone
const StageReferences& forward_references();
const StageReferences& backward_references();
const StageReferences& pass_references();  ///< a backward pass in two kernels
const StageReferences& kda_references();
const StageReferences& recurrent_references();
const StageReferences& segment_references();  ///< of split scans
const StageReferences& step_references();     ///< between rows of tokens and of steps

/// The tensor of this name, empty where it is missing.
const Vector& optional(const TensorMap& tensors, std::string_view name);
/// The first of the two that is there; throws std::out_of_range where neither is.
const Vector& either(const TensorMap& tensors, std::string_view name, std::string_view other);

/// Queries and keys with the scales of their rows, [tokens, H, K].
Vector queries(const TensorMap& tensors);
Vector keys(const TensorMap& tensors);
/// Each beta's activation, [tokens, HV], and its derivative by beta as given.
Vector beta_factors(const StageContext& context, const TensorMap& tensors);
Vector beta_slopes(const StageContext& context, const TensorMap& tensors);
/// Gradients of the gates per key channel from K and from the state that leave the chunk, given
/// their own; the last row's own term cancels and is left out.
Matrix leaving_gates(const Matrix& K, const Matrix& dK_leaving, const Matrix& dS,
                     const Matrix& S_through);
/// Gk, or G, or empty: no decay.
const Vector& decays(const TensorMap& tensors);

/// A tensor [tokens, HV, width] of zeros.
Vector zeros(const StageContext& context, std::int64_t width);
/// States [count, HV, K, V] of zeros.
Vector zero_states(const StageContext& context, std::size_t count);

/// State n [K, V] of one value head in a tensor [N, HV, K, V], or [N, HV, V, K] with state_v_first;
/// zero where the tensor is empty.
Matrix read_state(const StageContext& context, const Vector& tensor, std::int64_t n,
                  std::int64_t head);
void write_state(const StageContext& context, Vector& tensor, std::int64_t n, std::int64_t head,
                 const Matrix& state);

/// The log decay of a raw gate input x = g + dt_bias, and its derivatives by x and A_log.
struct GateValue {
  double g_log, by_x, by_A_log;
};
GateValue gate_value(double x, double A_log, const std::optional<double>& lower_bound);

}  // namespace wyvern::testing
