#include <wyvern/error.hpp>
#include <wyvern/reference.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "runtime/base/parallel.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/reference_conv.hpp"
#include "runtime/reference_inputs.hpp"
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

/// Shared by all tasks of one call.
struct Context {
  const Problem& p;
  const Arguments& host;
  const OperatorDefinition& definition;
  std::int64_t steps;                       ///< rows of k a token
  std::vector<std::int64_t> offsets;        ///< first row of each sequence, and the end
  std::vector<std::int64_t> chunk_offsets;  ///< first chunk slot of each sequence
  StateLayout layout;
  double scale;

  std::int64_t chunk() const { return kept_chunk_size(p); }

  Context(const Problem& problem, const Arguments& arguments)
      : p(problem),
        host(arguments),
        definition(definition_of(problem)),
        steps(problem.num_householder),
        offsets(sequence_offsets(problem, arguments)),
        layout(problem),
        scale(scale_of(problem)) {
    for (std::int64_t& offset : offsets) offset *= steps;
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
  in_parallel(static_cast<std::size_t>(p.N * p.HV), threads, [&](std::size_t index) {
    const auto i = static_cast<std::int64_t>(index);
    work(Task{i / p.HV, i % p.HV});
  });
}

// --- Forward and recurrent -----------------------------------------------------------------------

/// The state that sequence n starts from, of one head.
Doubles starting_state(const Context& c, Task task, std::int64_t slot) {
  const Problem& p = c.p;
  const bool given = starts_from_slot(p, c.host, task.n);
  if (given && p.inplace_state) {
    Doubles S = c.layout.read(c.host.state, slot * p.HV + task.head);
    if (has_state_scale(p))
      for (double& x : S) x *= load(c.host.state_scale, slot * p.HV + task.head);
    return S;
  }
  if (given && p.initial_state) return c.layout.read(c.host.initial_state, slot * p.HV + task.head);
  return zeros(c.layout.size());
}

/// Writes one head's state to a slot of the pool.
void write_slot(const Context& c, Reference& result, std::int64_t slot, std::int64_t head,
                Doubles S) {
  const std::int64_t which = slot * c.p.HV + head;
  if (has_state_scale(c.p)) {
    const double scale = load(c.host.state_scale, which);
    const double most = c.p.state_dtype == DType::float8_e4m3 ? 448 : 57344;
    for (double& x : S) x = std::clamp(x / scale, -most, most);
  }
  c.layout.write(result.at("state"), which, S);
}

/// The rows of `checkpoints` that sequence n's states go to, by the tokens before each.
std::map<std::int64_t, std::int64_t> checkpoints_of(const Context& c, std::int64_t n) {
  const Problem& p = c.p;
  const auto length = [&](std::int64_t m) { return c.offsets[index(m) + 1] - c.offsets[index(m)]; };
  std::map<std::int64_t, std::int64_t> rows;
  if (p.checkpoint_offsets) {
    const auto offset = static_cast<std::int64_t>(load(c.host.checkpoint_offsets, n));
    if (offset > 0 && offset <= length(n) && offset % 16 == 0) rows[offset] = n;
  } else if (p.checkpoint_every != 0) {
    std::int64_t row = 0;
    for (std::int64_t m = 0; m < n; ++m) row += length(m) / p.checkpoint_every;
    for (std::int64_t at = p.checkpoint_every; at <= length(n) && row < checkpoint_rows(p);
         at += p.checkpoint_every)
      rows[at] = row++;
  }
  return rows;
}

/// The states of one head of a sequence's tokens in the recurrent pass: which state each token of a
/// tree of drafts starts from, and where each state is written.
class Drafts {
 public:
  Drafts(const Context& c, Task task, const Doubles& start)
      : c_(c), task_(task), row_(intermediate_row(c.p, c.host, task.n)), start_(start) {}

  /// Sets S to the state that token t starts from; false: it is a null token.
  bool enter(std::int64_t t, Doubles& S) {
    if (!c_.p.parent) return true;
    after_.emplace_back();
    if (t >= draft_tokens_of(c_.p)) return false;
    const auto from =
        static_cast<std::int64_t>(load(c_.host.parent, task_.n * draft_tokens_of(c_.p) + t));
    if (from < -1 || from >= t) return false;
    if (from >= 0 && after_[index(from)].empty()) return false;
    S = from < 0 ? start_ : after_[index(from)];
    return true;
  }

  /// Writes the state after token t to its tensor.
  void leave(std::int64_t t, const Doubles& S, Reference& result) {
    const Problem& p = c_.p;
    if (p.parent) after_.back() = S;
    if (t < p.index_columns && !p.disable_state_update)
      if (const auto slot = slot_at(c_.p, c_.host.state_index, task_.n * p.index_columns + t))
        write_slot(c_, result, *slot, task_.head, S);
    if (row_ && t < draft_tokens_of(p))
      c_.layout.write(result.at("intermediate_states"),
                      (*row_ * draft_tokens_of(p) + t) * p.HV + task_.head, S);
  }

 private:
  const Context& c_;
  Task task_;
  std::optional<std::int64_t> row_;
  Doubles start_;
  std::vector<Doubles> after_;  ///< with parent: of each token; empty of a null one
};

/// 1 / sqrt(mean(o^2) + norm_eps) of a row of o.
double output_rstd(const Problem& p, std::span<const double> o) {
  double squares = 0;
  for (const double x : o) squares += x * x;
  return 1 / std::sqrt(squares / static_cast<double>(p.V) + static_cast<double>(norm_eps_of(p)));
}

/// What the gate's input z multiplies a normalized element by.
double output_gate(const Problem& p, double z) {
  return p.output_norm == Activation::silu ? z * sigmoid(z) : sigmoid(z);
}

/// Its derivative.
double output_gate_slope(const Problem& p, double z) {
  const double open = sigmoid(z), closed = sigmoid(-z);
  return p.output_norm == Activation::silu ? open * (1 + z * closed) : open * closed;
}

/// Normalizes and gates row `at` of o, counted over tokens and heads.
void normalize_output(const Context& c, std::int64_t at, std::span<double> o) {
  const double rstd = output_rstd(c.p, o);
  for (std::int64_t j = 0; j < c.p.V; ++j)
    o[index(j)] *= rstd * load(c.host.norm_weight, j) *
                   output_gate(c.p, load(c.host.norm_gate, at * c.p.V + j));
}

void run_forward(const Context& c, Task task, Reference& result) {
  const Problem& p = c.p;
  const std::optional<SequenceSlots> slots = slots_of(c.p, c.host, task.n);
  if (!slots) return;
  Doubles S = starting_state(c, task, slots->from), out = zeros(p.V);
  const auto recurrence = c.definition.recurrence(p, c.host, task.n, task.head);
  const bool every_chunk = p.pass == Pass::forward && p.return_intermediate_states;
  const auto checkpoints = checkpoints_of(c, task.n);
  Drafts drafts(c, task, S);
  Doubles& o = result.at("o");
  const std::int64_t first = c.offsets[index(task.n)], last = c.offsets[index(task.n) + 1];
  for (std::int64_t at = first; at < last; ++at) {
    if (every_chunk && (at - first) % c.chunk() == 0) {
      const std::int64_t chunk = c.chunk_offsets[index(task.n)] + (at - first) / c.chunk();
      c.layout.write(result.at("intermediate_states"), chunk * p.HV + task.head, S);
    }
    if (p.pass == Pass::recurrent && !drafts.enter(at - first, S)) continue;
    recurrence->step(at, S, out);
    if (p.pass == Pass::recurrent) drafts.leave(at - first, S, result);
    if (const auto row = checkpoints.find(at + 1 - first); row != checkpoints.end())
      c.layout.write(result.at("checkpoints"), row->second * p.HV + task.head, S);
    if (at % c.steps != c.steps - 1) continue;
    const std::int64_t place = at / c.steps * p.HV + task.head;
    const std::span row(o.data() + place * p.V, out.size());
    for (std::size_t j = 0; j < out.size(); ++j) row[j] = c.scale * out[j];
    if (p.keep_output) std::ranges::copy(row, result.at("o_raw").begin() + place * p.V);
    if (p.output_norm) normalize_output(c, place, row);
  }
  if (p.output_final_state) c.layout.write(result.at("final_state"), task.n * p.HV + task.head, S);
  if (p.inplace_state && p.index_columns == 0 && !p.disable_state_update)
    write_slot(c, result, slots->to, task.head, S);
}

/// S [K, p.V] becomes the state after the tokens of one head.
void apply_tokens(const Context& c, const Problem& p, const Arguments& host, Task task,
                  Doubles& S) {
  const auto recurrence = c.definition.recurrence(p, host, task.n, task.head);
  Doubles out = zeros(p.V);
  for (std::int64_t at = c.offsets[index(task.n)]; at < c.offsets[index(task.n) + 1]; ++at)
    recurrence->step(at, S, out);
}

/// One head's map of states: R from the initial state, M from the identity without values.
void run_summary(const Context& c, Task task, Reference& result) {
  const Problem& p = c.p;
  Doubles R = starting_state(c, task, task.n), M;
  apply_tokens(c, p, c.host, task, R);
  if (p.transition) {
    Problem keys = p;
    keys.V = p.K;
    Arguments no_values = c.host;
    no_values.v = no_values.write = {};
    M = zeros(p.K * p.K);
    for (std::int64_t k = 0; k < p.K; ++k) M[index(k * p.K + k)] = 1;
    apply_tokens(c, keys, no_values, task, M);
  }
  const std::int64_t columns = p.V + (p.transition ? p.K : 0);
  auto to = result.at("summary").begin() + (task.n * p.HV + task.head) * p.K * columns;
  for (std::int64_t k = 0; k < p.K; ++k) {
    to = std::copy_n(R.begin() + k * p.V, p.V, to);
    if (p.transition) to = std::copy_n(M.begin() + k * p.K, p.K, to);
  }
}

Reference summary(const Context& c, unsigned threads) {
  const Problem& p = c.p;
  Reference result;
  result["summary"] = zeros(p.N * p.HV * p.K * (p.V + (p.transition ? p.K : 0)));
  for_each_task(p, threads, [&](Task task) { run_summary(c, task, result); });
  return result;
}

Reference forward(const Context& c, unsigned threads) {
  const Problem& p = c.p;
  if (p.summary) return summary(c, threads);
  const std::int64_t one = p.HV * p.K * p.V;
  Reference result;
  result["o"] = zeros(p.B * p.T * p.HV * p.V);
  if (p.keep_output) result["o_raw"] = result["o"];
  if (p.output_final_state) result["final_state"] = zeros(p.N * one);
  if (p.pass == Pass::forward && p.return_intermediate_states)
    result["intermediate_states"] =
        zeros(chunk_slots(p.B, p.T * c.steps, p.N, p.packed, c.chunk()) * one);
  const auto updated = [&](const char* name, std::int64_t states, const TensorView& before) {
    Doubles& values = result[name] = zeros(states * one);
    load_row(before, 0, values);
  };
  if (p.inplace_state) updated("state", p.state_index ? p.state_slots : p.N, c.host.state);
  if (has_checkpoints(p)) updated("checkpoints", checkpoint_rows(p), c.host.checkpoints);
  if (p.intermediate_rows)
    updated("intermediate_states", *p.intermediate_rows * draft_tokens_of(p),
            c.host.intermediate_states);
  for_each_task(p, threads, [&](Task task) { run_forward(c, task, result); });
  return result;
}

// --- Backward ------------------------------------------------------------------------------------

/// Sums value heads' gradients of x [rows,H,K] over each key head's group, and computes the norm's
/// backward pass.
Doubles sum_groups(const Problem& p, const TensorView& x, const Doubles& heads) {
  const std::int64_t group = p.HV / p.H, rows = std::ssize(heads) / (group * p.K);
  Doubles sums = zeros(rows * p.K), input = zeros(p.K);
  for (std::int64_t row = 0; row < rows; ++row) {
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

/// The gradients of a pass while tasks write them: a row for every token and value head, and of a
/// parameter for every sequence and value head.
class Gradients final : public GradientRows {
 public:
  explicit Gradients(const Context& c) : c_(c) {
    Problem whole = c.p;
    whole.summary = false;  // the recurrence writes the gradients that no one asked for too
    const std::vector<TensorSpec> specs = tensor_specs(whole);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const TensorRule* rule = c.definition.rule(i);
      if (rule == nullptr || rule->role != TensorRole::output || !specs[i].present) continue;
      if (rule->dims.at[0] == TensorDim::N || rule->dims.at[0] == TensorDim::conv_channels)
        continue;  // a state, which the loop itself writes at the end, or of the convolution
      add(specs[i], rule->dims);
    }
  }

  std::span<double> row(std::string_view name, std::int64_t row) override {
    const auto found = buffers_.find(name);
    if (found == buffers_.end()) return {};
    Buffer& buffer = found->second;
    return {buffer.rows.data() + row * buffer.width, index(buffer.width)};
  }

  /// Sums the separate rows, in a fixed order, into the shapes of Arguments.
  void finish(Reference& result) {
    for (auto& [name, buffer] : buffers_) {
      if (buffer.kind == Kind::parameter)
        result[name] = sum_sequences(buffer.rows, c_.p.HV * buffer.width);
      else if (buffer.kind == Kind::shared)
        result[name] = sum_sequences(buffer.rows, buffer.width);
      else if (buffer.kind == Kind::key_heads)
        result[name] = sum_groups(c_.p, c_.host.tensor(name.substr(1)), buffer.rows);
      else
        result[name] = std::move(buffer.rows);
    }
  }

 private:
  enum class Kind : std::uint8_t { value_heads, key_heads, parameter, shared };
  struct Buffer {
    Kind kind;
    std::int64_t width;  ///< elements after the head
    Doubles rows;
  };

  /// [B, tokens, H or HV, width...] or, of a parameter, [HV, width...], or [V], which all value
  /// heads share.
  void add(const TensorSpec& spec, const Dims& dims) {
    const auto extent = [&](int first, int last) {
      std::int64_t product = 1;
      for (int i = first; i < last; ++i) product *= spec.shape[index(i)];
      return product;
    };
    const Kind kind = dims.at[0] == TensorDim::HV  ? Kind::parameter
                      : dims.at[0] == TensorDim::V ? Kind::shared
                      : dims.has(TensorDim::H)     ? Kind::key_heads
                                                   : Kind::value_heads;
    const bool of_tokens = kind == Kind::value_heads || kind == Kind::key_heads;
    const std::int64_t width = extent(of_tokens ? 3 : kind == Kind::parameter ? 1 : 0, spec.rank);
    const std::int64_t rows = (of_tokens ? extent(0, 2) : c_.p.N) * c_.p.HV;
    buffers_.emplace(spec.name, Buffer{kind, width, zeros(rows * width)});
  }

  const Context& c_;
  std::map<std::string, Buffer, std::less<>> buffers_;
};

/// The adjoint of one value head of one sequence. States are checkpointed every sqrt(rows) and
/// rebuilt a segment at a time.
class Adjoint {
 public:
  Adjoint(const Context& c, Task task, Reference& result, Gradients& gradients)
      : c_(c),
        p_(c.p),
        task_(task),
        result_(result),
        gradients_(gradients),
        recurrence_(c.definition.recurrence(c.p, c.host, task.n, task.head)),
        S_(initial()),
        dS_(zeros(c.layout.size())),
        out_(zeros(p_.V)),
        d_o_(out_),
        o_(out_) {
    if (p_.output_final_state) dS_ = c.layout.read(c.host.dht, which());
  }

  void run() {
    const std::int64_t first = c_.offsets[index(task_.n)], last = c_.offsets[index(task_.n) + 1];
    const auto segment = std::max<std::int64_t>(
        1, static_cast<std::int64_t>(std::sqrt(static_cast<double>(last - first))));
    std::vector<Doubles> checkpoints;
    for (std::int64_t begin = first; begin < last; begin += segment) {
      checkpoints.push_back(S_);
      for (std::int64_t at = begin; at < begin + segment && begin + segment < last; ++at)
        recurrence_->step(at, S_, out_);
    }
    for (std::int64_t s = std::ssize(checkpoints) - 1; s >= 0; --s) {
      const std::int64_t begin = first + s * segment, end = std::min(begin + segment, last);
      S_ = std::move(checkpoints[index(s)]);
      for (std::int64_t at = begin; at < end; ++at) recurrence_->record(at, index(at - begin), S_);
      for (std::int64_t at = end - 1; at >= begin; --at) step_back(at, index(at - begin));
    }
    if (p_.initial_state) c_.layout.write(result_.at("dinitial_state"), which(), dS_);
    if (p_.summary)
      std::ranges::copy(dS_, result_.at("dsummary").begin() + which() * c_.layout.size());
  }

 private:
  std::int64_t which() const { return task_.n * p_.HV + task_.head; }

  Doubles initial() const {
    return p_.initial_state ? c_.layout.read(c_.host.initial_state, which())
                            : zeros(c_.layout.size());
  }

  void step_back(std::int64_t at, std::size_t slot) {
    if (at % c_.steps == c_.steps - 1) {
      const std::int64_t place = at / c_.steps * p_.HV + task_.head;
      load_row(c_.host.do_, place * p_.V, d_o_);
      if (p_.output_norm) norm_back(place);
    } else {
      std::ranges::fill(d_o_, 0.0);
    }
    for (double& x : d_o_) x *= c_.scale;
    recurrence_->step_back(at, slot, d_o_, dS_, gradients_);
  }

  /// d_o_, the gradient of row `at` of o behind the norm, becomes that of the row before it.
  void norm_back(std::int64_t at) {
    const std::span<double> d_gate = gradients_.row("dnorm_gate", at);
    const std::span<double> d_weight = gradients_.row("dnorm_weight", which());
    load_row(c_.host.o_raw, at * p_.V, o_);
    const double rstd = output_rstd(p_, o_);
    double along = 0;
    for (std::int64_t j = 0; j < p_.V; ++j) {
      const double z = load(c_.host.norm_gate, at * p_.V + j), x = rstd * o_[index(j)];
      const double weight = load(c_.host.norm_weight, j), gate = output_gate(p_, z);
      double& d = d_o_[index(j)];
      d_gate[index(j)] = d * x * weight * output_gate_slope(p_, z);
      d_weight[index(j)] += d * x * gate;
      d *= weight * gate;
      along += d * x;
    }
    along /= static_cast<double>(p_.V);
    for (std::size_t j = 0; j < o_.size(); ++j) d_o_[j] = rstd * (d_o_[j] - rstd * o_[j] * along);
  }

  const Context& c_;
  const Problem& p_;
  Task task_;
  Reference& result_;
  Gradients& gradients_;
  std::unique_ptr<Recurrence> recurrence_;
  Doubles S_, dS_, out_, d_o_, o_;
};

Reference backward(const Context& c, unsigned threads) {
  const Problem& p = c.p;
  Gradients gradients(c);
  Reference result;
  if (p.initial_state) result["dinitial_state"] = zeros(p.N * p.HV * p.K * p.V);
  if (p.summary) result["dsummary"] = zeros(p.N * p.HV * p.K * p.V);
  for_each_task(p, threads, [&](Task task) { Adjoint(c, task, result, gradients).run(); });
  if (!p.summary) gradients.finish(result);
  return result;
}

/// Divides o by the scales of its groups of columns, which become o_scale.
void scale_output(const Problem& p, Reference& result) {
  const ScaleShape shape = output_scale_shape(p);
  const std::int64_t groups = p.HV * (p.V / kScaledColumns), tokens = p.B * p.T;
  Doubles &o = result.at("o"), &scales = result["o_scale"];
  scales = zeros(shape.rows * shape.columns);
  for (std::int64_t i = 0; i < tokens * groups; ++i) {
    const std::span columns(o.data() + i * kScaledColumns, index(kScaledColumns));
    double most = 1e-10;
    for (const double x : columns) most = std::max(most, std::fabs(x));
    const std::int64_t token = i / groups, group = i % groups;
    const std::int64_t at = p.output_scale_tokens_last ? group * shape.columns + token : i;
    scales[index(at)] = most / 448;
    for (double& x : columns) x /= most / 448;
  }
}

}  // namespace

Reference reference(const Problem& problem, const Arguments& host, unsigned threads) {
  validate(problem);
  require_inputs(problem, host);
  const auto carry_out = [&](const Arguments& inputs) {
    const Context context(problem, inputs);
    Reference result =
        problem.pass == Pass::backward ? backward(context, threads) : forward(context, threads);
    if (problem.output_dtype) scale_output(problem, result);
    return result;
  };
  if (!problem.short_conv) return carry_out(host);
  const ConvolvedRows rows(problem, host);
  Reference result = carry_out(rows.arguments());
  rows.finish(result);
  return result;
}

namespace {

/// The largest error of rounding a value next to zero: half the least positive one.
double least_resolution(DType dtype) {
  switch (dtype) {
    case DType::fp32: return std::ldexp(1.0, -150);
    case DType::fp16: return std::ldexp(1.0, -25);
    case DType::bf16: return std::ldexp(1.0, -134);
    case DType::float8_e4m3: return std::ldexp(1.0, -10);
    case DType::float8_e5m2: return std::ldexp(1.0, -17);
    default: return 0;
  }
}

/// The largest relative error, root mean square, of rounding numbers to a float8 type: for numbers
/// a little above a power of two, uniformly distributed around the type's numbers there.
double float8_rounding(DType dtype) {
  return std::ldexp(1.0, dtype == DType::float8_e4m3 ? -3 : -2) / std::sqrt(12.0);
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
  for (const char* const rows : {"final_conv_state", "conv_state", "intermediate_conv_states"})
    if (name == rows) return 0;  // as they were given
  struct Row {
    std::array<std::string_view, 10> names;
    double bits16, fp32, tf32;
  };
  constexpr Row kRows[] = {
      {{"o", "o_raw", "o_scale", "final_state", "intermediate_states", "state", "checkpoints",
        "summary"},
       5e-3,
       1e-5,
       1e-3},
      {{"dq", "dk", "dv", "dinitial_state", "dsummary", "dinitial_conv_state"}, 8e-3, 2e-5, 2e-3},
      {{"dbeta", "derase", "dwrite", "dg", "dA_log", "ddt_bias", "dnorm_weight", "dnorm_gate",
        "dconv_weight", "dconv_bias"},
       2e-2,
       5e-5,
       4e-3},
  };
  for (const Row& row : kRows) {
    if (name.empty() || std::find(row.names.begin(), row.names.end(), name) == row.names.end())
      continue;
    const TensorRule& rule = definition_of(problem).rule(name);
    if (name == "state" && is_float8(rule.dtype(problem)))
      return row.bits16 + float8_rounding(rule.dtype(problem));
    if (name == "o" && is_float8(rule.dtype(problem))) return float8_rounding(rule.dtype(problem));
    // An output stored in 16 bits has the bound of 16-bit problems, for any dtype of inputs.
    if (problem.dtype != DType::fp32 || size_of(rule.dtype(problem)) == 2) return row.bits16;
    return precision_floor(problem) == Precision::tf32 ? row.tf32 : row.fp32;
  }
  throw Error(ErrorKind::kBadInput,
              fmt::format("quantity is '{}'; it must be an output of an operator", name));
}

}  // namespace wyvern
