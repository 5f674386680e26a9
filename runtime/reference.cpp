#include <wyvern/error.hpp>
#include <wyvern/reference.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <thread>

#include "runtime/reference_inputs.hpp"
#include "runtime/reference_step.hpp"
#include "templates/template.hpp"

namespace wyvern {
namespace {

using Doubles = std::vector<double>;

Doubles zeros(std::int64_t count) { return Doubles(static_cast<std::size_t>(count)); }

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Where K-first element i of a state lies in storage.
class StateLayout {
 public:
  explicit StateLayout(const Problem& p) : K_(p.K), V_(p.V), v_first_(p.state_v_first) {}
  std::int64_t size() const { return K_ * V_; }

  /// State number `which` (sequence or slot, times HV, plus head) of a tensor, as [K,V].
  Doubles read(const TensorView& states, std::int64_t which) const {
    Doubles stored = zeros(size());
    load_row(states, which * size(), stored);
    return reorder(stored, v_first_ ? V_ : K_, v_first_ ? K_ : V_);
  }

  void write(Doubles& states, std::int64_t which, const Doubles& S) const {
    const Doubles stored = reorder(S, K_, V_);
    std::copy(stored.begin(), stored.end(), states.begin() + which * size());
  }

 private:
  /// [rows,columns] transposed where storage is V first, else as it is.
  Doubles reorder(const Doubles& x, std::int64_t rows, std::int64_t columns) const {
    if (!v_first_) return x;
    Doubles y(x.size());
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) y[index(j * rows + i)] = x[index(i * columns + j)];
    return y;
  }

  std::int64_t K_, V_;
  bool v_first_;
};

/// What all tasks of one call share.
struct Context {
  const Problem& p;
  const Arguments& host;
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> chunk_offsets;  ///< first chunk slot of each sequence
  StateLayout layout;
  double scale;

  std::int64_t chunk() const { return kept_chunk_size(p); }

  Context(const Problem& problem, const Arguments& arguments)
      : p(problem),
        host(arguments),
        offsets(sequence_offsets(problem, arguments)),
        layout(problem),
        scale(scale_of(problem)) {
    chunk_offsets.push_back(0);
    for (std::size_t n = 0; n + 1 < offsets.size(); ++n)
      chunk_offsets.push_back(chunk_offsets.back() +
                              (offsets[n + 1] - offsets[n] + chunk() - 1) / chunk());
  }
};

/// Every (sequence, value head).
struct Task {
  std::int64_t n, head;
};

template <class Work>
void for_each_task(const Problem& p, unsigned threads, const Work& work) {
  if (threads == 0) threads = std::max(1U, std::thread::hardware_concurrency());
  const std::int64_t count = p.N * p.HV;
  std::atomic<std::int64_t> next{0};
  const auto run = [&] {
    for (std::int64_t i = next++; i < count; i = next++) work(Task{i / p.HV, i % p.HV});
  };
  std::vector<std::jthread> pool;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(threads, count); ++i) pool.emplace_back(run);
  run();
}

/// The recurrence of one value head.
class Scan {
 public:
  Scan(const Context& c, std::int64_t head, Doubles state)
      : reader_(c.p, c.host, head),
        S(std::move(state)),
        token(c.p.K, c.p.V),
        u(zeros(c.p.V)),
        residual(u),
        out(u) {}

  /// One step; `at` counts tokens over the flattened batch. `decayed` receives the state after
  /// decay and before the write; it may be S.
  void step(std::int64_t at, Doubles& decayed) {
    reader_.load(at, token);
    decay_and_read(S.data(), decayed.data(), token.decay, token.k, residual);
    for (std::size_t j = 0; j < u.size(); ++j) {
      residual[j] = token.v[j] - residual[j];
      u[j] = token.beta * residual[j];
    }
    write_and_read(decayed.data(), S.data(), token.k, u, token.q, out);
  }
  void step(std::int64_t at) { step(at, S); }

  const HeadReader& reader() const { return reader_; }

 private:
  HeadReader reader_;

 public:
  Doubles S;                 ///< [K,V] after the last step
  Token token;               ///< of the last step
  Doubles u, residual, out;  ///< [V] of the last step; out is not scaled
};

// --- Forward and recurrent -----------------------------------------------------------------------

/// Slot of sequence n's state, or -1 for one that is skipped.
std::int64_t state_slot(const Context& c, std::int64_t n) {
  const Problem& p = c.p;
  if (p.pass != Pass::recurrent || !p.state_index) return n;
  const auto slot = static_cast<std::int64_t>(load(c.host.state_index, n));
  return slot < 0 || slot >= p.state_slots ? -1 : slot;
}

void run_forward(const Context& c, Task task, Reference& result) {
  const Problem& p = c.p;
  const bool recurrent = p.pass == Pass::recurrent, inplace = recurrent && p.inplace_state;
  const std::int64_t slot = state_slot(c, task.n);
  if (slot < 0) return;
  Doubles initial = zeros(c.layout.size());
  if (inplace)
    initial = c.layout.read(c.host.state, slot * p.HV + task.head);
  else if (p.initial_state)
    initial = c.layout.read(c.host.initial_state, slot * p.HV + task.head);
  Scan scan(c, task.head, std::move(initial));
  const bool every_chunk = !recurrent && p.return_intermediate_states;
  Doubles& o = result.at("o");
  const std::int64_t first = c.offsets[index(task.n)], last = c.offsets[index(task.n) + 1];
  for (std::int64_t at = first; at < last; ++at) {
    if (every_chunk && (at - first) % c.chunk() == 0) {
      const std::int64_t chunk = c.chunk_offsets[index(task.n)] + (at - first) / c.chunk();
      c.layout.write(result.at("intermediate_states"), chunk * p.HV + task.head, scan.S);
    }
    scan.step(at);
    double* const row = o.data() + (at * p.HV + task.head) * p.V;
    for (std::size_t j = 0; j < scan.out.size(); ++j) row[j] = c.scale * scan.out[j];
  }
  if (p.output_final_state)
    c.layout.write(result.at("final_state"), task.n * p.HV + task.head, scan.S);
  if (inplace) c.layout.write(result.at("state"), slot * p.HV + task.head, scan.S);
}

Reference forward(const Context& c, unsigned threads) {
  const Problem& p = c.p;
  const std::int64_t one = p.HV * p.K * p.V;
  Reference result;
  result["o"] = zeros(p.B * p.T * p.HV * p.V);
  if (p.output_final_state) result["final_state"] = zeros(p.N * one);
  if (p.pass == Pass::forward && p.return_intermediate_states)
    result["intermediate_states"] = zeros(chunk_slots(p.B, p.T, p.N, p.packed, c.chunk()) * one);
  if (p.pass == Pass::recurrent && p.inplace_state) {
    Doubles& pool = result["state"];
    pool = zeros((p.state_index ? p.state_slots : p.N) * one);
    load_row(c.host.state, 0, pool);
  }
  for_each_task(p, threads, [&](Task task) { run_forward(c, task, result); });
  return result;
}

// --- Backward ------------------------------------------------------------------------------------

/// Gradients that tasks write apart and that are summed in a fixed order afterwards.
struct Partial {
  Doubles dq, dk;    ///< [B,T,HV,K], of normalized rows
  Doubles dA_log;    ///< [N,HV]
  Doubles ddt_bias;  ///< [N,HV,gate_width]
};

/// One step of the scan kept for the walk back.
struct Kept {
  explicit Kept(const Problem& p)
      : token(p.K, p.V), u(zeros(p.V)), residual(u), decayed(zeros(p.K * p.V)) {}
  Token token;
  Doubles u, residual, decayed;
};

/// The adjoint of one value head of one sequence. States are checkpointed every sqrt(tokens) and
/// rebuilt a segment at a time.
class Adjoint {
 public:
  Adjoint(const Context& c, Task task, Reference& result, Partial& partial)
      : c_(c),
        p_(c.p),
        task_(task),
        result_(result),
        partial_(partial),
        scan_(c, task.head, initial()),
        dS_(zeros(c.layout.size())),
        du_(zeros(p_.V)),
        d_o_(du_),
        dlog_(zeros(p_.K)),
        gate_(zeros(gate_width(p_))) {
    if (p_.output_final_state) dS_ = c.layout.read(c.host.dht, which());
  }

  void run() {
    const std::int64_t first = c_.offsets[index(task_.n)], last = c_.offsets[index(task_.n) + 1];
    const auto segment = std::max<std::int64_t>(
        1, static_cast<std::int64_t>(std::sqrt(static_cast<double>(last - first))));
    std::vector<Doubles> checkpoints;
    for (std::int64_t begin = first; begin < last; begin += segment) {
      checkpoints.push_back(scan_.S);
      for (std::int64_t at = begin; at < begin + segment && begin + segment < last; ++at)
        scan_.step(at);
    }
    std::vector<Kept> kept(index(std::min(segment, last - first)), Kept(p_));
    for (std::int64_t s = std::ssize(checkpoints) - 1; s >= 0; --s) {
      const std::int64_t begin = first + s * segment, end = std::min(begin + segment, last);
      scan_.S = std::move(checkpoints[index(s)]);
      for (std::int64_t at = begin; at < end; ++at) keep(at, kept[index(at - begin)]);
      for (std::int64_t at = end - 1; at >= begin; --at) step_back(at, kept[index(at - begin)]);
    }
    if (p_.initial_state) c_.layout.write(result_.at("dinitial_state"), which(), dS_);
  }

 private:
  std::int64_t which() const { return task_.n * p_.HV + task_.head; }

  Doubles initial() const {
    return p_.initial_state ? c_.layout.read(c_.host.initial_state, which())
                            : zeros(c_.layout.size());
  }

  void keep(std::int64_t at, Kept& kept) {
    scan_.step(at, kept.decayed);
    kept.token = scan_.token;
    kept.u = scan_.u;
    kept.residual = scan_.residual;
  }

  void step_back(std::int64_t at, const Kept& kept) {
    const Token& t = kept.token;
    const std::int64_t row = at * p_.HV + task_.head;
    load_row(c_.host.do_, row * p_.V, d_o_);
    for (double& x : d_o_) x *= c_.scale;
    write_and_read(dS_.data(), dS_.data(), t.q, d_o_, t.k, du_);
    const std::span dq(partial_.dq.data() + row * p_.K, t.q.size());
    const std::span dk(partial_.dk.data() + row * p_.K, t.k.size());
    adjoint_rows(kept.decayed.data(), dS_.data(), t.beta, t.k, t.decay, kept.u, du_, d_o_, dq, dk,
                 dlog_);
    const double written = std::inner_product(kept.u.begin(), kept.u.end(), d_o_.begin(), 0.0);
    for (std::size_t i = 0; i < dq.size(); ++i) dq[i] += t.k[i] * written;
    const double dbeta = std::inner_product(du_.begin(), du_.end(), kept.residual.begin(), 0.0);
    result_.at("dbeta")[index(row)] = dbeta * beta_slope(p_, load(c_.host.beta, row));
    double* const dv = result_.at("dv").data() + row * p_.V;
    for (std::size_t j = 0; j < du_.size(); ++j) dv[j] = t.beta * du_[j];
    gate_back(at);
  }

  /// From the gradient of the log decay, row by row of the state, to those of the gate's inputs.
  void gate_back(std::int64_t at) {
    if (gate_.empty()) return;
    if (gate_.size() == 1) dlog_[0] = std::accumulate(dlog_.begin(), dlog_.end(), 0.0);
    scan_.reader().load_gate(at, gate_);
    const GateForm& form = scan_.reader().gate();
    const auto width = std::ssize(gate_);
    double* const dg = result_.at("dg").data() + (at * p_.HV + task_.head) * width;
    double* const bias = partial_.ddt_bias.data() + which() * width;
    for (std::int64_t i = 0; i < width; ++i) {
      const double x = gate_[index(i)], dlog = dlog_[index(i)];
      dg[i] = dlog * form.slope(x);
      bias[i] += dg[i];
      partial_.dA_log[index(which())] += dlog * form.rate_slope(x);
    }
  }

  const Context& c_;
  const Problem& p_;
  Task task_;
  Reference& result_;
  Partial& partial_;
  Scan scan_;
  Doubles dS_, du_, d_o_, dlog_, gate_;
};

/// Sums value heads' gradients over each key head's group, and takes them through the norm.
Doubles sum_groups(const Problem& p, const TensorView& x, const Doubles& heads) {
  const std::int64_t group = p.HV / p.H;
  Doubles sums = zeros(p.B * p.T * p.H * p.K), input = zeros(p.K);
  for (std::int64_t row = 0; row < p.B * p.T * p.H; ++row) {
    const std::span sum(sums.data() + row * p.K, input.size());
    for (std::int64_t part = row * group; part < (row + 1) * group; ++part)
      for (std::int64_t i = 0; i < p.K; ++i) sum[index(i)] += heads[index(part * p.K + i)];
    load_row(x, row * p.K, input);
    normalize_backward(p, input, sum);
  }
  return sums;
}

/// [N,width] summed over N.
Doubles sum_sequences(const Doubles& parts, std::int64_t width) {
  Doubles sums = zeros(width);
  for (std::size_t i = 0; i < parts.size(); ++i) sums[i % sums.size()] += parts[i];
  return sums;
}

Reference backward(const Context& c, unsigned threads) {
  const Problem& p = c.p;
  const std::int64_t rows = p.B * p.T * p.HV, width = gate_width(p);
  Partial partial{zeros(rows * p.K), zeros(rows * p.K), zeros(p.N * p.HV),
                  zeros(p.N * p.HV * width)};
  Reference result;
  result["dv"] = zeros(rows * p.V);
  result["dbeta"] = zeros(rows);
  if (width > 0) result["dg"] = zeros(rows * width);
  if (p.initial_state) result["dinitial_state"] = zeros(p.N * p.HV * p.K * p.V);
  for_each_task(p, threads, [&](Task task) { Adjoint(c, task, result, partial).run(); });
  result["dq"] = sum_groups(p, c.host.q, partial.dq);
  result["dk"] = sum_groups(p, c.host.k, partial.dk);
  if (p.use_gate_in_kernel && p.has_A_log) result["dA_log"] = sum_sequences(partial.dA_log, p.HV);
  if (p.has_dt_bias) result["ddt_bias"] = sum_sequences(partial.ddt_bias, p.HV * width);
  return result;
}

}  // namespace

Reference reference(const Problem& problem, const Arguments& host, unsigned threads) {
  validate(problem);
  require_inputs(problem, host);
  const Context context(problem, host);
  return problem.pass == Pass::backward ? backward(context, threads) : forward(context, threads);
}

namespace {

/// What rounding to the nearest can cost a value next to zero: half the least positive one.
double least_resolution(DType dtype) {
  switch (dtype) {
    case DType::fp32: return std::ldexp(1.0, -150);
    case DType::fp16: return std::ldexp(1.0, -25);
    case DType::bf16: return std::ldexp(1.0, -134);
    default: return 0;
  }
}

}  // namespace

double relative_error(const TensorView& x, const std::vector<double>& reference) {
  if (reference.empty()) return 0;
  if (!x.present() || x.elements() != std::ssize(reference))
    throw Error(ErrorKind::kBadInput,
                fmt::format("x has {} elements; it must have {}", x.present() ? x.elements() : 0,
                            reference.size()));
  Doubles values(reference.size());
  load_row(x, 0, values);
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    if (!std::isfinite(values[i])) return std::numeric_limits<double>::infinity();
    difference += (values[i] - reference[i]) * (values[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  const auto count = static_cast<double>(reference.size());
  const double rms = std::sqrt(difference / count);
  if (norm == 0) return rms;
  return std::max(0.0, rms - least_resolution(x.dtype)) / std::sqrt(norm / count);
}

double error_bound(const Problem& problem, std::string_view name) {
  struct Row {
    std::array<std::string_view, 4> names;
    double bits16, fp32, tf32;
  };
  constexpr Row kRows[] = {
      {{"o", "final_state", "intermediate_states", "state"}, 5e-3, 1e-5, 1e-3},
      {{"dq", "dk", "dv", "dinitial_state"}, 8e-3, 2e-5, 2e-3},
      {{"dbeta", "dg", "dA_log", "ddt_bias"}, 2e-2, 5e-5, 4e-3},
  };
  // What is stored in 16 bits is held to their bound, whatever the inputs are.
  const bool bits16 = problem.dtype != DType::fp32 ||
                      (name == "state" && problem.state_dtype != DType::fp32) ||
                      (name == "dg" && problem.g_dtype != DType::fp32);
  for (const Row& row : kRows) {
    if (std::find(row.names.begin(), row.names.end(), name) == row.names.end()) continue;
    if (bits16) return row.bits16;
    return precision_floor(problem) == Precision::tf32 ? row.tf32 : row.fp32;
  }
  throw Error(ErrorKind::kBadInput,
              fmt::format("quantity is '{}'; it must be an output of an operator", name));
}

}  // namespace wyvern
