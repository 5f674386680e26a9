// References of the decode stage, the recurrence of runtime/SPECIFICATION.md, section 2, by tokens,
// and of the norm of o.
#include <cmath>

#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

Vector normalized(const Vector& x, std::int64_t K, bool wanted) {
  Vector y = x;
  for (std::size_t start = 0; start < x.size() && wanted; start += size(K)) {
    const double length = std::sqrt(dot(&x[start], &x[start], K) + 1e-6);
    for (std::size_t i = start; i < start + size(K); ++i) y[i] /= length;
  }
  return y;
}

/// The log decays [tokens, HV] or [tokens, HV, K]; empty: none.
Vector log_decays(const StageContext& c, const TensorMap& t) {
  Vector g = optional(t, "g");
  if (g.empty() || !c.gate_in_kernel) return g;
  const Vector &A_log = optional(t, "A_log"), &bias = optional(t, "dt_bias");
  const std::size_t columns = g.size() / size(c.layout.tokens());
  for (std::size_t i = 0; i < g.size(); ++i) {
    const std::size_t column = i % columns;
    g[i] =
        gate_value(g[i] + (bias.empty() ? 0 : bias[column]),
                   A_log.empty() ? 0 : A_log[column / (columns / size(c.dims.HV))], c.lower_bound)
            .g_log;
  }
  return g;
}

/// One value head of one sequence.
class Recurrence {
 public:
  Recurrence(const StageContext& c, const TensorMap& t)
      : c_(c),
        q_(normalized(t.at("q"), c.dims.K, c.qk_l2norm)),
        k_(normalized(t.at("k"), c.dims.K, c.qk_l2norm)),
        beta_(t.contains("beta") ? beta_factors(c, t) : Vector{}),
        erase_(optional(t, "erase")),
        write_(optional(t, "write")),
        g_(log_decays(c, t)),
        v_(t.at("v")) {}

  /// Updates the state by one token and writes its row of o.
  void token(std::int64_t token, std::int64_t head, Matrix& S, double* o) const {
    const auto [H, HV, K, V] = c_.dims;
    const std::int64_t row = token * HV + head, query_row = (token * H + head / (HV / H)) * K;
    const std::int64_t width =
        g_.empty() ? 0 : static_cast<std::int64_t>(g_.size()) / (c_.layout.tokens() * HV);
    for (std::int64_t i = 0; i < K && width > 0; ++i) {
      const double decay = std::exp(g_[size(row * width + (width == 1 ? 0 : i))]);
      for (std::int64_t j = 0; j < V; ++j) S[i][j] *= decay;
    }
    for (std::int64_t n = token * c_.steps; n < (token + 1) * c_.steps; ++n) step(n, head, S);
    for (std::int64_t i = 0; i < K; ++i)
      add(o + row * V, c_.scale * q_[size(query_row + i)], S[i], V);
  }

 private:
  /// Updates the state by row `at` of k.
  void step(std::int64_t at, std::int64_t head, Matrix& S) const {
    const auto [H, HV, K, V] = c_.dims;
    const std::int64_t row = at * HV + head, key_row = (at * H + head / (HV / H)) * K;
    // beta is the erase gate of every key channel and the write gate of every value channel.
    Vector u(v_.begin() + row * V, v_.begin() + (row + 1) * V);
    for (std::int64_t j = 0; j < V; ++j)
      u[size(j)] *= write_.empty() ? beta_[size(row)] : write_[size(row * V + j)];
    for (std::int64_t i = 0; i < K; ++i) {
      const double erase = erase_.empty() ? beta_[size(row)] : erase_[size(row * K + i)];
      add(u.data(), -erase * k_[size(key_row + i)], S[i], V);
    }
    for (std::int64_t i = 0; i < K; ++i) add(S[i], k_[size(key_row + i)], u.data(), V);
  }

  const StageContext& c_;
  Vector q_, k_, beta_;
  const Vector &erase_, &write_;
  Vector g_;
  const Vector& v_;
};

/// The norm of rows of o, with norm_weight and the gate of norm_gate. What is 0 stays 0.
void normalize_output(const StageContext& c, const TensorMap& t, Vector& o) {
  const Vector &weight = t.at("norm_weight"), &gate = t.at("norm_gate");
  const std::size_t V = weight.size();
  for (std::size_t start = 0; start < o.size(); start += V) {
    const double mean = dot(&o[start], &o[start], c.dims.V) / static_cast<double>(V);
    for (std::size_t j = 0; j < V; ++j) {
      const double z = gate[start + j];
      if (o[start + j] == 0) continue;
      o[start + j] *=
          weight[j] * (c.norm_silu ? z : 1) / (1 + std::exp(-z)) / std::sqrt(mean + c.norm_eps);
    }
  }
}

void recurrent(const StageContext& c, TensorMap& t) {
  const Recurrence recurrence(c, t);
  const bool in_place = t.contains("state");
  Vector pool = in_place ? t.at("state") : optional(t, "initial_state");
  Vector o = zeros(c, c.dims.V);
  Vector final_state = zero_states(c, size(c.layout.sequences()));
  const Vector &index = optional(t, "state_index"), &outputs = optional(t, "output_state_index");
  const Vector& given = optional(t, "has_initial_state");
  const auto is_slot = [&](std::int64_t slot) {
    return slot >= c.first_slot && slot < c.state_slots;
  };
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n) {
    const std::int64_t from = index.empty() ? n : static_cast<std::int64_t>(index[size(n)]);
    const std::int64_t to = outputs.empty() ? from : static_cast<std::int64_t>(outputs[size(n)]);
    if (!index.empty() && !(is_slot(from) && is_slot(to))) continue;
    const bool starts = given.empty() || given[size(n)] != 0;
    for (std::int64_t head = 0; head < c.dims.HV; ++head) {
      Matrix S = starts ? read_state(c, pool, from, head) : Matrix(c.dims.K, c.dims.V);
      for (std::int64_t token = c.layout.offsets[size(n)]; token < c.layout.offsets[size(n) + 1];
           ++token)
        recurrence.token(token, head, S, o.data());
      write_state(c, final_state, n, head, S);
      if (in_place) write_state(c, pool, to, head, S);
    }
  }
  if (t.contains("norm_gate")) normalize_output(c, t, o);
  t["o"] = o;
  t["final_state"] = final_state;
  if (in_place) t["state"] = pool;
}

void output_norm(const StageContext& c, TensorMap& t) {
  Vector o = t.at("o_raw");
  normalize_output(c, t, o);
  t["o"] = o;
}

/// Groups of 128 columns of o_norm divided by their scales.
void output_quantize(const StageContext& c, TensorMap& t) {
  Vector o = t.at("o_norm");
  const std::size_t width = 128, groups = o.size() / width,
                    of_token = size(c.dims.HV * c.dims.V) / width;
  const std::size_t tokens = of_token == 0 ? 0 : groups / of_token;
  const std::size_t columns = c.scale_tokens_last ? (tokens + 3) / 4 * 4 : of_token;
  Vector scales(c.scale_tokens_last ? of_token * columns : groups);
  for (std::size_t i = 0; i < groups; ++i) {
    double most = 1e-10;
    for (std::size_t j = 0; j < width; ++j) most = std::max(most, std::abs(o[i * width + j]));
    for (std::size_t j = 0; j < width; ++j) o[i * width + j] *= 448 / most;
    scales[c.scale_tokens_last ? i % of_token * columns + i / of_token : i] = most / 448;
  }
  t["o"] = o;
  t["o_scale"] = scales;
}

/// The gradients of rows o_raw, of their gates, and of the weight by parts of 256 rows.
void output_norm_bwd(const StageContext& c, TensorMap& t) {
  const Vector &dy = t.at("do"), &o = t.at("o_raw"), &gate = t.at("norm_gate");
  const Vector& weight = t.at("norm_weight");
  const std::size_t V = weight.size(), rows = o.size() / V;
  Vector d_o(o.size()), d_gate(o.size()), parts((rows + 255) / 256 * V);
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t start = row * V;
    const double mean = dot(&o[start], &o[start], c.dims.V) / static_cast<double>(V);
    const double rstd = 1 / std::sqrt(mean + c.norm_eps);
    double along = 0;
    for (std::size_t j = 0; j < V; ++j) {
      const double z = gate[start + j], open = 1 / (1 + std::exp(-z));
      const double x = rstd * o[start + j], d = dy[start + j] * (c.norm_silu ? z : 1) * open;
      const double slope = open * (1 - open) * (c.norm_silu ? z : 1) + (c.norm_silu ? open : 0);
      d_gate[start + j] = dy[start + j] * weight[j] * x * slope;
      parts[row / 256 * V + j] += d * x;
      d_o[start + j] = d * weight[j];
      along += d_o[start + j] * x / static_cast<double>(V);
    }
    for (std::size_t j = 0; j < V; ++j)
      d_o[start + j] = rstd * (d_o[start + j] - rstd * o[start + j] * along);
  }
  t["do_raw"] = d_o;
  t["dnorm_gate"] = d_gate;
  t["dnorm_weight_part"] = parts;
}

}  // namespace

const StageReferences& recurrent_references() {
  static const StageReferences references{{"recurrent", recurrent},
                                          {"output_norm", output_norm},
                                          {"output_norm_bwd", output_norm_bwd},
                                          {"output_quantize", output_quantize}};
  return references;
}

}  // namespace wyvern::testing
