#include "tests/support/operator_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "runtime/operators/operator.hpp"

namespace wyvern::testing {
namespace {

Shape shape_of(const TensorSpec& spec) {
  return {spec.shape.begin(), spec.shape.begin() + spec.rank};
}

/// Makes the inputs of one problem.
class Maker {
 public:
  Maker(OperatorData& data, Gate gate, std::uint64_t seed)
      : p_(data.problem), data_(data), gate_(gate), engine_(seed) {}

  HostTensor make(const TensorSpec& spec, Quantity holds) {
    const Shape shape = shape_of(spec);
    switch (holds) {
      case Quantity::directions:
        return p_.use_qk_l2norm ? normal(engine_, spec.dtype, shape)
                                : unit_rows(engine_, spec.dtype, shape);
      case Quantity::rates:
        return p_.use_beta_sigmoid ? normal(engine_, spec.dtype, shape)
                                   : uniform(engine_, spec.dtype, shape, 0, 1);
      case Quantity::gates: return p_.use_gate_in_kernel ? raw_gates(spec) : bounded_gates(spec);
      case Quantity::gate_rates: return uniform(engine_, spec.dtype, shape, 0, std::log(16.0));
      case Quantity::gate_biases: return uniform(engine_, spec.dtype, shape, -2, 0);
      case Quantity::states: return normal(engine_, spec.dtype, shape, 0.5);
      case Quantity::taps: return normal(engine_, spec.dtype, shape, 0.125);
      case Quantity::state_scales: return uniform(engine_, spec.dtype, shape, 0.5, 2);
      case Quantity::seqlens:
        return HostTensor(spec.dtype, shape, {data_.cu_seqlens.begin(), data_.cu_seqlens.end()});
      case Quantity::state_slots: return slots(spec);
      case Quantity::choices: return choices(spec);
      case Quantity::offsets: return offsets(spec);
      case Quantity::accepted: return accepted(spec);
      case Quantity::rows: return rows(spec);
      case Quantity::parents: return parents(spec);
      default: return normal(engine_, spec.dtype, shape);
    }
  }

 private:
  /// Raw gate inputs that give the decays of gate_ after -exp(A_log) softplus(g + dt_bias); with a
  /// lower bound, decays of -1000 lie at the bound instead.
  HostTensor raw_gates(const TensorSpec& spec) {
    std::normal_distribution<double> typical(-3, 1);
    std::uniform_int_distribution<int> eighth(0, 7);
    HostTensor tensor(spec.dtype, shape_of(spec));
    tensor.fill([&]() -> double {
      if (gate_ == Gate::zero) return -200;
      if (gate_ == Gate::very_negative) return 1000;
      if (gate_ == Gate::mixed && eighth(engine_) == 0) return 1000;
      return typical(engine_);
    });
    return tensor;
  }

  HostTensor bounded_gates(const TensorSpec& spec) {
    HostTensor tensor = gates(engine_, spec.dtype, shape_of(spec), gate_);
    if (!p_.safe_gate || !p_.lower_bound) return tensor;
    // Rounding the bound itself to 16 bits could break the promise.
    const double bound = static_cast<double>(*p_.lower_bound);
    HostTensor least(spec.dtype, {1}, {bound});
    if (least.at(0) < bound) least.set(0, bound * (1 - 1.0 / 128));
    for (std::int64_t i = 0; i < tensor.elements(); ++i)
      tensor.set(i, std::max(tensor.at(i), least.at(0)));
    return tensor;
  }

  /// Slots in random order, none of two sequences; a quarter of the sequences, and sequences past
  /// the pool's size, get an index that is not a slot's. Most final states are written to the slot
  /// that their sequence starts from.
  HostTensor slots(const TensorSpec& spec) {
    if (spec.name == "state_index") {
      free_slots_.resize(static_cast<std::size_t>(p_.state_slots));
      std::iota(free_slots_.begin(), free_slots_.end(), 0);
      std::shuffle(free_slots_.begin(), free_slots_.end(), engine_);
    }
    const bool outputs = spec.name == "output_state_index";
    std::uniform_int_distribution<int> quarter(0, 3);
    HostTensor tensor(spec.dtype, shape_of(spec));
    for (std::int64_t n = 0; n < tensor.elements(); ++n) {
      if (outputs && quarter(engine_) != 0)
        tensor.set(n, data_.tensors.at("state_index").at(n));
      else
        tensor.set(n, quarter(engine_) == 0 ? no_slot(spec.dtype) : free_slot(spec.dtype));
    }
    return tensor;
  }

  double free_slot(DType dtype) {
    if (free_slots_.empty()) return no_slot(dtype);
    const std::int64_t slot = free_slots_.back();
    free_slots_.pop_back();
    return static_cast<double>(slot);
  }

  /// An index that is not a slot's, next to the pool's or at the limits of its type.
  double no_slot(DType dtype) {
    constexpr double kFar32 = 2147483647, kFar64 = 1LL << 52;
    const double far = dtype == DType::int64 ? kFar64 : kFar32;
    const double all[] = {-1, static_cast<double>(p_.state_slots), -far, far};
    return all[std::uniform_int_distribution<int>(0, 3)(engine_)];
  }

  HostTensor choices(const TensorSpec& spec) {
    std::uniform_int_distribution<int> third(0, 2);
    HostTensor tensor(spec.dtype, shape_of(spec));
    tensor.fill([&] { return third(engine_) == 0 ? 0.0 : 1.0; });
    return tensor;
  }

  /// Mostly multiples of 16 inside their sequences; else 0, or what makes no checkpoint.
  HostTensor offsets(const TensorSpec& spec) {
    std::uniform_int_distribution<int> sixth(0, 5);
    HostTensor tensor(spec.dtype, shape_of(spec));
    const double far = spec.dtype == DType::int64 ? 1LL << 52 : 2147483632;
    for (std::int64_t n = 0; n < tensor.elements(); ++n) {
      const auto at = static_cast<std::size_t>(n);
      const std::int64_t length =
          p_.packed ? data_.cu_seqlens[at + 1] - data_.cu_seqlens[at] : p_.T;
      const std::int64_t past = length / 16 * 16 + 16;
      const double none[] = {0, -16, 8, static_cast<double>(past), far, -far};
      const double inside = static_cast<double>(
          std::uniform_int_distribution<std::int64_t>(0, length / 16)(engine_) * 16);
      tensor.set(n, sixth(engine_) == 0 ? none[sixth(engine_)] : inside);
    }
    return tensor;
  }

  /// Mostly columns of state_index; else none, near them or far.
  HostTensor accepted(const TensorSpec& spec) {
    std::uniform_int_distribution<int> sixth(0, 5);
    HostTensor tensor(spec.dtype, shape_of(spec));
    const double far = spec.dtype == DType::int64 ? 1LL << 52 : 2147483647;
    tensor.fill([&]() -> double {
      const double none[] = {0, -1, static_cast<double>(p_.index_columns + 1), far, -far, 0};
      if (sixth(engine_) == 0) return none[sixth(engine_)];
      return static_cast<double>(
          std::uniform_int_distribution<std::int64_t>(1, p_.index_columns)(engine_));
    });
    return tensor;
  }

  /// Rows in no order, each of one sequence alone; a quarter of the sequences has none.
  HostTensor rows(const TensorSpec& spec) {
    std::vector<std::int64_t> free(static_cast<std::size_t>(*p_.intermediate_rows));
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), engine_);
    std::uniform_int_distribution<int> quarter(0, 3);
    const double far = spec.dtype == DType::int64 ? 1LL << 52 : 2147483647;
    const double none[] = {-1, static_cast<double>(*p_.intermediate_rows), far, -far};
    HostTensor tensor(spec.dtype, shape_of(spec));
    tensor.fill([&]() -> double {
      if (free.empty() || quarter(engine_) == 0) return none[quarter(engine_)];
      const std::int64_t row = free.back();
      free.pop_back();
      return static_cast<double>(row);
    });
    return tensor;
  }

  /// Chains and branches; one in ten is no earlier token.
  HostTensor parents(const TensorSpec& spec) {
    std::uniform_int_distribution<int> tenth(0, 9);
    const double far = spec.dtype == DType::int64 ? 1LL << 52 : 2147483647;
    HostTensor tensor(spec.dtype, shape_of(spec));
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      const std::int64_t t = i % spec.shape[1];
      const double none[] = {-2, static_cast<double>(t), static_cast<double>(t + 1), far, -far};
      const int kind = tenth(engine_);
      const auto earlier = std::uniform_int_distribution<std::int64_t>(-1, t - 1)(engine_);
      tensor.set(i, kind == 0  ? none[tenth(engine_) / 2]
                    : kind < 5 ? static_cast<double>(t - 1)
                               : static_cast<double>(earlier));
    }
    return tensor;
  }

  const Problem& p_;
  const OperatorData& data_;
  Gate gate_;
  Engine engine_;
  std::vector<std::int64_t> free_slots_;
};

}  // namespace

Arguments OperatorData::arguments() const {
  Arguments a;
  for (const auto& [name, tensor] : tensors) a.tensor(name) = tensor.view();
  return a;
}

Problem packed(Problem problem, const std::vector<std::int64_t>& lengths) {
  problem.packed = true;
  problem.B = 1;
  problem.N = static_cast<std::int64_t>(lengths.size());
  problem.T = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  return problem;
}

bool is_kept(const Problem& problem, std::string_view name) {
  const TensorRule& rule = definition_of(problem).rule(name);
  const bool handed_over = rule.role == TensorRole::kept || rule.role == TensorRole::shared;
  return handed_over && rule.holds == Quantity::computed;
}

HostTensor host_tensor(const TensorSpec& spec) { return HostTensor(spec.dtype, shape_of(spec)); }

OperatorData make_data(const Problem& problem, Gate gate, std::uint64_t seed,
                       const std::vector<std::int64_t>& lengths) {
  OperatorData data;
  data.problem = problem.packed ? packed(problem, lengths) : problem;
  if (data.problem.packed) {
    data.cu_seqlens = {0};
    for (const std::int64_t length : lengths)
      data.cu_seqlens.push_back(data.cu_seqlens.back() + length);
  }
  Maker maker(data, gate, seed);
  for (const TensorSpec& spec : tensor_specs(data.problem))
    if (spec.present && spec.access != TensorAccess::out && !is_kept(data.problem, spec.name))
      data.tensors[std::string(spec.name)] =
          maker.make(spec, definition_of(data.problem).rule(spec.name).holds);
  return data;
}

namespace {

std::int64_t length_of(const OperatorData& data, std::int64_t n) {
  const auto at = static_cast<std::size_t>(n);
  return data.problem.packed ? data.cu_seqlens[at + 1] - data.cu_seqlens[at] : data.problem.T;
}

/// The row of intermediate_states that sequence n has, if any.
std::optional<std::int64_t> intermediate_row(const OperatorData& data, std::int64_t n) {
  if (!data.problem.intermediate_rows) return {};
  const auto row = static_cast<std::int64_t>(data.tensors.at("intermediate_index").at(n));
  if (row < 0 || row >= *data.problem.intermediate_rows) return {};
  return row;
}

/// Which tokens of sequence n, not a null one, have a state.
std::vector<bool> live_tokens(const OperatorData& data, std::int64_t n) {
  const std::int64_t length = length_of(data, n), D = draft_tokens_of(data.problem);
  std::vector<bool> live(static_cast<std::size_t>(length), true);
  for (std::int64_t t = 0; t < length && data.problem.parent; ++t) {
    const auto parent =
        t < D ? static_cast<std::int64_t>(data.tensors.at("parent").at(n * D + t)) : t;
    live[static_cast<std::size_t>(t)] =
        parent == -1 || (parent >= 0 && parent < t && live[static_cast<std::size_t>(parent)]);
  }
  return live;
}

}  // namespace

std::vector<std::optional<Slots>> slots_of(const OperatorData& data) {
  const Problem& p = data.problem;
  std::vector<std::optional<Slots>> all;
  const auto index = [&](const char* name, std::int64_t n) {
    return static_cast<std::int64_t>(data.tensors.at(name).at(n));
  };
  const auto is_slot = [&](std::int64_t slot) {
    return slot >= (p.null_slot_zero ? 1 : 0) && slot < p.state_slots;
  };
  for (std::int64_t n = 0; n < p.N; ++n) {
    Slots slots{n, n};
    bool null = p.parent && !intermediate_row(data, n);
    std::int64_t column = 0;
    if (p.index_columns != 0) {
      column = index("num_accepted", n) - 1;
      null = null || column < 0 || column >= p.index_columns;
    }
    if (p.state_index && !null)
      slots.from = slots.to =
          index("state_index", n * std::max<std::int64_t>(p.index_columns, 1) + column);
    if (p.output_state_index) slots.to = index("output_state_index", n);
    null = null || (p.state_index && !(is_slot(slots.from) && is_slot(slots.to)));
    slots.reads = !p.has_initial_state || data.tensors.at("has_initial_state").at(n) != 0;
    all.push_back(null ? std::nullopt : std::optional(slots));
  }
  return all;
}

namespace {

std::vector<bool> written_checkpoints(const OperatorData& data) {
  const Problem& p = data.problem;
  std::vector<bool> written(static_cast<std::size_t>(checkpoint_rows(p)));
  const auto sequences = slots_of(data);
  std::size_t row = 0;
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const std::int64_t length = length_of(data, static_cast<std::int64_t>(n));
    if (p.checkpoint_offsets) {
      const double offset = data.tensors.at("checkpoint_offsets").at(static_cast<std::int64_t>(n));
      const bool legal = offset > 0 && offset <= static_cast<double>(length);
      written[n] = legal && std::fmod(offset, 16) == 0 && sequences[n].has_value();
    } else {
      for (std::int64_t i = length / p.checkpoint_every; i > 0; --i, ++row)
        if (row < written.size()) written[row] = sequences[n].has_value();
    }
  }
  return written;
}

/// Which states of `name`, a pool, or which places of intermediate_states are written.
std::vector<bool> written_by_tokens(const OperatorData& data, std::string_view name) {
  const Problem& p = data.problem;
  const bool pool = name == "state";
  const std::int64_t D = draft_tokens_of(p);
  std::vector<bool> written(static_cast<std::size_t>(!pool           ? *p.intermediate_rows * D
                                                     : p.state_index ? p.state_slots
                                                                     : p.N));
  const auto sequences = slots_of(data);
  for (std::int64_t n = 0; n < p.N; ++n) {
    const auto& slots = sequences[static_cast<std::size_t>(n)];
    if (!slots || (pool && p.disable_state_update)) continue;
    if (pool && p.index_columns == 0) {
      written[static_cast<std::size_t>(slots->to)] = true;
      continue;
    }
    const auto row = intermediate_row(data, n);
    const std::vector<bool> live = live_tokens(data, n);
    for (std::int64_t t = 0; t < std::ssize(live); ++t) {
      if (!live[static_cast<std::size_t>(t)] || t >= (pool ? p.index_columns : D)) continue;
      if (!pool && !row) continue;
      const std::int64_t to = pool ? static_cast<std::int64_t>(
                                         data.tensors.at("state_index").at(n * p.index_columns + t))
                                   : *row * D + t;
      if (!pool || (to >= (p.null_slot_zero ? 1 : 0) && to < p.state_slots))
        written[static_cast<std::size_t>(to)] = true;
    }
  }
  return written;
}

}  // namespace

std::vector<bool> written_states(const OperatorData& data, std::string_view name) {
  return name == "checkpoints" ? written_checkpoints(data) : written_by_tokens(data, name);
}

WindowColumns window_columns(const OperatorData& data) {
  const Problem& p = data.problem;
  const std::int64_t columns = conv_columns_of(p), before = *p.short_conv - 1;
  WindowColumns of;
  of.read.resize(static_cast<std::size_t>((p.state_index ? p.state_slots : p.N) * columns));
  of.written.resize(of.read.size());
  const auto set = [&](std::vector<bool>& which, std::int64_t slot, std::int64_t first,
                       std::int64_t count) {
    std::fill_n(which.begin() + slot * columns + first, count, true);
  };
  const auto sequences = slots_of(data);
  for (std::int64_t n = 0; n < p.N; ++n) {
    const auto& slots = sequences[static_cast<std::size_t>(n)];
    if (!slots) continue;
    if (p.index_columns == 0) {
      if (slots->reads) set(of.read, slots->from, 0, before);
      if (!p.disable_state_update) set(of.written, slots->to, 0, before);
      continue;
    }
    const auto slot =
        static_cast<std::int64_t>(data.tensors.at("state_index").at(n * p.index_columns));
    if (slot < (p.null_slot_zero ? 1 : 0) || slot >= p.state_slots || length_of(data, n) == 0)
      continue;
    const auto first = static_cast<std::int64_t>(data.tensors.at("num_accepted").at(n)) - 1;
    if (slots->reads) set(of.read, slot, first, before);
    if (!p.disable_state_update)
      set(of.written, slot, 0, before - 1 + std::min(length_of(data, n), p.index_columns));
  }
  return of;
}

std::int64_t column_of(const Problem& p, std::int64_t element) {
  const std::int64_t columns = conv_columns_of(p), channels = conv_channels(p);
  const std::int64_t slot = element / (columns * channels), place = element % (columns * channels);
  return slot * columns + (p.conv_tokens_first ? place / channels : place % columns);
}

void poison_unread(OperatorData& data) {
  const Problem& p = data.problem;
  const auto poison = [](HostTensor& tensor, std::int64_t unit, std::int64_t units) {
    const std::size_t bytes = tensor.bytes() / static_cast<std::size_t>(units);
    std::fill_n(tensor.data() + static_cast<std::size_t>(unit) * bytes, bytes, kNanPoison);
  };
  for (const char* name : {"checkpoints", "intermediate_states", "intermediate_conv_states"}) {
    const auto tensor = data.tensors.find(name);
    if (tensor == data.tensors.end()) continue;
    const std::vector<bool> written = written_states(data, name);
    for (std::size_t row = 0; row < written.size(); ++row)
      if (written[row]) poison(tensor->second, static_cast<std::int64_t>(row), std::ssize(written));
  }
  const auto poison_tokens = [&](std::int64_t first, std::int64_t count) {
    for (const char* name : {"q", "k", "v", "beta", "erase", "write", "g", "norm_gate"})
      if (const auto tensor = data.tensors.find(name); tensor != data.tensors.end())
        for (std::int64_t t = first; t < first + count; ++t) poison(tensor->second, t, p.B * p.T);
  };
  const auto start_of = [&](std::int64_t n) {
    return p.packed ? data.cu_seqlens[static_cast<std::size_t>(n)] : n * p.T;
  };
  if (p.parent) {
    const auto alive = slots_of(data);
    for (std::int64_t n = 0; n < p.N; ++n) {
      const std::vector<bool> live = live_tokens(data, n);
      for (std::int64_t t = 0; t < std::ssize(live); ++t)
        if (!alive[static_cast<std::size_t>(n)] || !live[static_cast<std::size_t>(t)])
          poison_tokens(start_of(n) + t, 1);
    }
  }
  if (!p.inplace_state) return;
  const std::int64_t count = p.state_index ? p.state_slots : p.N;
  std::vector<bool> read(static_cast<std::size_t>(count));
  const auto sequences = slots_of(data);
  for (const auto& slots : sequences)
    if (slots && slots->reads) read[static_cast<std::size_t>(slots->from)] = true;
  for (std::int64_t slot = 0; slot < count; ++slot)
    if (!read[static_cast<std::size_t>(slot)]) poison(data.tensors.at("state"), slot, count);
  if (p.inplace_conv_state) {
    HostTensor& windows = data.tensors.at("conv_state");
    const std::vector<bool> columns = window_columns(data).read;
    for (std::int64_t i = 0; i < windows.elements(); ++i)
      if (!columns[static_cast<std::size_t>(column_of(p, i))])
        poison(windows, i, windows.elements());
  }
  for (std::int64_t n = 0; n < p.N; ++n)
    if (!sequences[static_cast<std::size_t>(n)]) poison_tokens(start_of(n), length_of(data, n));
}

OperatorData tokens_of(const OperatorData& whole, std::int64_t first, std::int64_t count) {
  OperatorData part = whole;
  part.problem.T = count;
  for (const char* name : {"q", "k", "v", "beta", "erase", "write", "g", "norm_gate", "do"}) {
    if (!whole.tensors.contains(name)) continue;
    const HostTensor& tensor = whole.tensors.at(name);
    Shape shape = tensor.shape();
    const std::int64_t width = tensor.elements() / whole.problem.T;
    shape[1] = shape[1] / whole.problem.T * count;
    HostTensor slice(tensor.dtype(), shape);
    for (std::int64_t i = 0; i < slice.elements(); ++i) slice.set(i, tensor.at(first * width + i));
    part.tensors[name] = slice;
  }
  return part;
}

std::string describe(const Problem& p) {
  return fmt::format("{} B={} T={} N={}{}", problem_key(p).family, p.B, p.T, p.N,
                     p.scale ? fmt::format(" scale={}", *p.scale) : "");
}

}  // namespace wyvern::testing
