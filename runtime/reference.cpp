#include <wyvern/error.hpp>
#include <wyvern/reference.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

namespace wyvern {
namespace {

double load(const TensorView& view, std::int64_t index) {
  const char* at = static_cast<const char*>(view.data) +
                   static_cast<std::size_t>(index) * size_of(view.dtype);
  const auto read = [at]<class T>(T value) {
    std::memcpy(&value, at, sizeof(T));
    return value;
  };
  switch (view.dtype) {
    case DType::fp32: return read(float{});
    case DType::fp16: return fp16_to_float(read(std::uint16_t{}));
    case DType::bf16: return bf16_to_float(read(std::uint16_t{}));
    case DType::int32: return read(std::int32_t{});
    case DType::int64: return static_cast<double>(read(std::int64_t{}));
  }
  return 0;
}

void require(const TensorView& view, std::string_view name, std::int64_t elements) {
  if (elements == 0) return;
  if (!view.present())
    throw Error(ErrorKind::kBadInput,
                fmt::format("{} is absent; it must be given with {} elements", name, elements));
  if (view.elements() != elements)
    throw Error(ErrorKind::kBadInput, fmt::format("{} has {} elements; it must have {}", name,
                                                  view.elements(), elements));
}

void require_all(const Problem& p, const Arguments& a) {
  const std::int64_t tokens = p.B * p.T;
  require(a.q, "q", tokens * p.H * p.K);
  require(a.k, "k", tokens * p.H * p.K);
  require(a.v, "v", tokens * p.HV * p.V);
  require(a.beta, "beta", tokens * p.HV);
  require(a.g, "g", tokens * p.HV);
  if (p.initial_state) require(a.initial_state, "initial_state", p.N * p.HV * p.K * p.V);
  if (p.packed) require(a.cu_seqlens, "cu_seqlens", p.N + 1);
  if (p.use_gate_in_kernel) require(a.A_log, "A_log", p.HV);
  if (p.has_dt_bias) require(a.dt_bias, "dt_bias", p.HV);
}

double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

/// First token of each sequence in the flattened [B*T] order, and the end of the last.
std::vector<std::int64_t> sequence_offsets(const Problem& p, const Arguments& a) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(p.N) + 1);
  for (std::int64_t n = 0; n <= p.N; ++n)
    offsets[static_cast<std::size_t>(n)] =
        p.packed ? static_cast<std::int64_t>(load(a.cu_seqlens, n)) : n * p.T;
  if (p.packed) validate_seqlens(p, offsets);
  return offsets;
}

/// The state of one value head of one sequence, [K,V] with V contiguous, and its scratch rows.
/// The loops over V are what the compiler vectorizes; rank-1 updates go row by row.
class Scan {
 public:
  Scan(const Problem& p, const Arguments& a, std::int64_t sequence, std::int64_t head)
      : p_(p), a_(a), sequence_(sequence), head_(head),
        S_(static_cast<std::size_t>(p.K * p.V)), q_(static_cast<std::size_t>(p.K)),
        k_(q_.size()), u_(static_cast<std::size_t>(p.V)), o_(u_.size()) {
    if (!p.initial_state) return;
    for (std::int64_t i = 0; i < p.K; ++i)
      for (std::int64_t j = 0; j < p.V; ++j)
        S_[static_cast<std::size_t>(i * p.V + j)] = load(a.initial_state, state_index(i, j));
  }

  /// One step of the recurrence; `token` counts over the flattened batch.
  void step(std::int64_t token, double* o) {
    load_row(a_.q, token, q_);
    load_row(a_.k, token, k_);
    const std::int64_t at = token * p_.HV + head_;
    const double decay = std::exp(gate(at));
    const double beta = beta_value(at);
    const auto V = static_cast<std::size_t>(p_.V);
    double* const u = u_.data();
    std::fill(u_.begin(), u_.end(), 0.0);
    for (std::size_t i = 0; i < k_.size(); ++i) {
      double* const row = S_.data() + i * V;
      const double key = k_[i];
      for (std::size_t j = 0; j < V; ++j) {
        row[j] *= decay;
        u[j] += key * row[j];
      }
    }
    for (std::size_t j = 0; j < V; ++j)
      u[j] = beta * (load(a_.v, at * p_.V + static_cast<std::int64_t>(j)) - u[j]);
    double* const out = o_.data();
    std::fill(o_.begin(), o_.end(), 0.0);
    for (std::size_t i = 0; i < k_.size(); ++i) {
      double* const row = S_.data() + i * V;
      const double key = k_[i], query = q_[i];
      for (std::size_t j = 0; j < V; ++j) {
        row[j] += key * u[j];
        out[j] += query * row[j];
      }
    }
    const double scale = scale_of(p_);
    for (std::size_t j = 0; j < V; ++j) o[j] = scale * out[j];
  }

  void store_state(std::vector<double>& states) const {
    for (std::int64_t i = 0; i < p_.K; ++i)
      for (std::int64_t j = 0; j < p_.V; ++j)
        states[static_cast<std::size_t>(state_index(i, j))] =
            S_[static_cast<std::size_t>(i * p_.V + j)];
  }

 private:
  std::int64_t state_index(std::int64_t i, std::int64_t j) const {
    const std::int64_t base = (sequence_ * p_.HV + head_) * p_.K * p_.V;
    return base + (p_.state_v_first ? j * p_.K + i : i * p_.V + j);
  }

  void load_row(const TensorView& x, std::int64_t token, std::vector<double>& row) const {
    const std::int64_t base = (token * p_.H + head_ / (p_.HV / p_.H)) * p_.K;
    double squares = 0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = load(x, base + static_cast<std::int64_t>(i));
      squares += row[i] * row[i];
    }
    if (!p_.use_qk_l2norm) return;
    for (double& value : row) value /= std::sqrt(squares + 1e-6);
  }

  double gate(std::int64_t at) const {
    const double g = load(a_.g, at);
    if (!p_.use_gate_in_kernel) return g;
    const double bias = p_.has_dt_bias ? load(a_.dt_bias, head_) : 0.0;
    return -std::exp(load(a_.A_log, head_)) * softplus(g + bias);
  }

  double beta_value(std::int64_t at) const {
    const double beta = load(a_.beta, at);
    if (!p_.use_beta_sigmoid) return beta;
    return (p_.allow_neg_eigval ? 2 : 1) * sigmoid(beta);
  }

  const Problem& p_;
  const Arguments& a_;
  std::int64_t sequence_, head_;
  std::vector<double> S_, q_, k_, u_, o_;
};

/// Calls task(i) for every i below count, on several threads.
template <class Task>
void parallel_for(std::int64_t count, unsigned threads, const Task& task) {
  if (threads == 0) threads = std::max(1U, std::thread::hardware_concurrency());
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t i = next++; i < count; i = next++) task(i);
  };
  std::vector<std::jthread> pool;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(threads, count); ++i) pool.emplace_back(work);
  work();
}

}  // namespace

Reference reference_forward(const Problem& problem, const Arguments& host, unsigned threads) {
  validate(problem);
  require_all(problem, host);
  const std::vector<std::int64_t> offsets = sequence_offsets(problem, host);
  Reference result;
  result.o.resize(static_cast<std::size_t>(problem.B * problem.T * problem.HV * problem.V));
  if (problem.output_final_state)
    result.final_state.resize(
        static_cast<std::size_t>(problem.N * problem.HV * problem.K * problem.V));
  parallel_for(problem.N * problem.HV, threads, [&](std::int64_t task) {
    const std::int64_t sequence = task / problem.HV, head = task % problem.HV;
    Scan scan(problem, host, sequence, head);
    const auto n = static_cast<std::size_t>(sequence);
    for (std::int64_t token = offsets[n]; token < offsets[n + 1]; ++token)
      scan.step(token, result.o.data() + (token * problem.HV + head) * problem.V);
    if (problem.output_final_state) scan.store_state(result.final_state);
  });
  return result;
}

double relative_error(const TensorView& x, const std::vector<double>& reference) {
  if (reference.empty()) return 0;
  require(x, "x", static_cast<std::int64_t>(reference.size()));
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double value = load(x, static_cast<std::int64_t>(i));
    if (!std::isfinite(value)) return std::numeric_limits<double>::infinity();
    difference += (value - reference[i]) * (value - reference[i]);
    norm += reference[i] * reference[i];
  }
  return std::sqrt(norm == 0 ? difference / static_cast<double>(reference.size())
                             : difference / norm);
}

double error_bound(const Problem& problem, std::string_view quantity) {
  if (quantity != "o" && quantity != "final_state")
    throw Error(ErrorKind::kBadInput,
                fmt::format("quantity is '{}'; it must be o or final_state", quantity));
  if (problem.dtype != DType::fp32) return 5e-3;
  return precision_floor(problem) == Precision::tf32 ? 1e-3 : 1e-5;
}

}  // namespace wyvern
