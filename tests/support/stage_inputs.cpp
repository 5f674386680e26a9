#include "tests/support/stage_inputs.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

namespace wyvern::testing {
namespace {

Vector scaled_rows(const Vector& x, const Vector& scale) {
  Vector y = x;
  const std::size_t width = scale.empty() ? 1 : x.size() / scale.size();
  for (std::size_t i = 0; i < x.size() && !scale.empty(); ++i) y[i] *= scale[i / width];
  return y;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

std::size_t state_index(const StageContext& c, std::int64_t n, std::int64_t head, std::int64_t i,
                        std::int64_t j) {
  const auto [H, HV, K, V] = c.dims;
  return static_cast<std::size_t>((n * HV + head) * K * V +
                                  (c.state_v_first ? j * K + i : i * V + j));
}

}  // namespace

const Vector& optional(const TensorMap& tensors, std::string_view name) {
  static const Vector none;
  const auto found = tensors.find(name);
  return found == tensors.end() ? none : found->second;
}

const Vector& either(const TensorMap& tensors, std::string_view name, std::string_view other) {
  const auto found = tensors.find(name);
  if (found != tensors.end()) return found->second;
  return tensors.at(std::string(other));
}

Vector queries(const TensorMap& t) { return scaled_rows(t.at("q"), optional(t, "q_rstd")); }
Vector keys(const TensorMap& t) { return scaled_rows(t.at("k"), optional(t, "k_rstd")); }

Vector beta_factors(const StageContext& c, const TensorMap& t) {
  Vector beta = t.at("beta");
  if (c.beta_sigmoid)
    for (double& x : beta) x = (c.neg_eigval ? 2 : 1) * sigmoid(x);
  return beta;
}

Vector beta_slopes(const StageContext& c, const TensorMap& t) {
  Vector slopes = t.at("beta");
  for (double& x : slopes)
    x = c.beta_sigmoid ? (c.neg_eigval ? 2 : 1) * sigmoid(x) * sigmoid(-x) : 1;
  return slopes;
}

const Vector& decays(const TensorMap& t) {
  return t.contains("Gk") ? t.at("Gk") : optional(t, "G");
}

Vector zeros(const StageContext& c, std::int64_t width) {
  return Vector(static_cast<std::size_t>(c.layout.tokens() * c.dims.HV * width));
}

Vector zero_states(const StageContext& c, std::size_t count) {
  return Vector(count * static_cast<std::size_t>(c.dims.HV * c.dims.K * c.dims.V));
}

Matrix read_state(const StageContext& c, const Vector& tensor, std::int64_t n, std::int64_t head) {
  Matrix state(c.dims.K, c.dims.V);
  for (std::int64_t i = 0; i < c.dims.K && !tensor.empty(); ++i)
    for (std::int64_t j = 0; j < c.dims.V; ++j) state[i][j] = tensor[state_index(c, n, head, i, j)];
  return state;
}

void write_state(const StageContext& c, Vector& tensor, std::int64_t n, std::int64_t head,
                 const Matrix& state) {
  for (std::int64_t i = 0; i < c.dims.K; ++i)
    for (std::int64_t j = 0; j < c.dims.V; ++j) tensor[state_index(c, n, head, i, j)] = state[i][j];
}

GateValue gate_value(double x, double A_log, const std::optional<double>& lower_bound) {
  const double a = std::exp(A_log);
  if (lower_bound) {
    const double s = sigmoid(a * x), slope = *lower_bound * s * sigmoid(-a * x);
    return {*lower_bound * s, slope * a, slope * a * x};
  }
  const double g_log = -a * (std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))));
  return {g_log, -a * sigmoid(x), g_log};
}

}  // namespace wyvern::testing
