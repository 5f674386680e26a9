#include "tools/wyvern/example.hpp"

#include <wyvern/runtime.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/operators/operator.hpp"

namespace wyvern::cli {
namespace {

/// SplitMix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : state_(seed) {
    state_ = next() ^ (stream * 0xD1342543DE82EF95U);
  }

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }

  /// In (0, 1), a multiple of 2^-33.
  double uniform() { return (static_cast<double>(next() >> 32) + 0.5) * 0x1p-32; }

  /// About normal, mean 0 and variance 1: the sum of eight 16-bit uniform numbers, scaled. A sum of
  /// integers is the same on every machine; log and cos of different libraries are not.
  double normal() {
    const std::uint64_t a = next();
    const std::uint64_t b = next();
    std::int64_t sum = 0;
    for (int shift = 0; shift < 64; shift += 16)
      sum += static_cast<std::int64_t>((a >> shift) & 0xFFFF) +
             static_cast<std::int64_t>((b >> shift) & 0xFFFF);
    constexpr double kMean = 8 * 65535 / 2.0;
    return (static_cast<double>(sum) - kMean) * kInverseDeviation;
  }

 private:
  // 1 / sqrt(8 (2^32 - 1) / 12)
  static constexpr double kInverseDeviation = 0x1.3988e1412ed76p-16;
  std::uint64_t state_;
};

/// The random stream of an input, by its name alone, so that none depends on another. A state
/// updated in place has the stream of an initial state.
std::uint64_t stream_of(std::string_view name) {
  if (name == "state") name = "initial_state";
  std::uint64_t hash = 0xCBF29CE484222325U;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
  return hash;
}

using Shape = std::vector<std::int64_t>;

/// A tensor of int32 or int64.
HostTensor integer_tensor(DType dtype, Shape shape, const std::vector<std::int64_t>& values) {
  HostTensor tensor = HostTensor::make(dtype, std::move(shape));
  if (dtype == DType::int64)
    std::copy(values.begin(), values.end(), static_cast<std::int64_t*>(tensor.data.get()));
  else
    std::transform(values.begin(), values.end(), static_cast<std::int32_t*>(tensor.data.get()),
                   [](std::int64_t value) { return static_cast<std::int32_t>(value); });
  return tensor;
}

HostTensor integer_tensor(DType dtype, const std::vector<std::int64_t>& values) {
  return integer_tensor(dtype, {static_cast<std::int64_t>(values.size())}, values);
}

template <class Draw>
HostTensor filled(DType dtype, Shape shape, std::uint64_t seed, std::string_view name,
                  const Draw& draw) {
  HostTensor tensor = HostTensor::make(dtype, std::move(shape));
  Random random(seed, stream_of(name));
  const std::int64_t count = tensor.elements();
  for (std::int64_t i = 0; i < count; ++i) store(tensor, i, draw(random, i));
  return tensor;
}

/// Rows of unit length: k so that the recurrence is stable without use_qk_l2norm.
HostTensor unit_rows(DType dtype, Shape shape, std::uint64_t seed, std::string_view name) {
  HostTensor tensor = HostTensor::make(dtype, std::move(shape));
  Random random(seed, stream_of(name));
  const std::int64_t width = tensor.shape.back();
  std::vector<double> row(static_cast<std::size_t>(width));
  const std::int64_t count = tensor.elements();
  for (std::int64_t start = 0; start < count; start += width) {
    double sum = 0;
    for (double& x : row) {
      x = random.normal();
      const double square = x * x;
      sum += square;
    }
    const double norm = std::sqrt(sum);
    for (std::int64_t i = 0; i < width; ++i)
      store(tensor, start + i, row[static_cast<std::size_t>(i)] / norm);
  }
  return tensor;
}

/// Log decay: every head, or key channel of a head, has a lowest decay of its own, at most log 2
/// below 0, and most tokens are far above it. A promised bound holds.
HostTensor log_decay(const Problem& p, const Shape& shape, std::uint64_t seed) {
  constexpr double kLeast = 0.0010005;  // exp(-kLeast) is 0.999
  constexpr double kMost = 0.6931;
  const std::int64_t gates = gate_kind(p) == GateKind::vector ? p.HV * p.K : p.HV;
  const double bound = p.safe_gate && !p.use_gate_in_kernel ? *p.lower_bound : -1.0;
  std::vector<double> depth(static_cast<std::size_t>(gates));
  Random heads(seed ^ 0x6865616473U, stream_of("g"));
  for (double& d : depth) {
    const double u = heads.uniform();
    d = (kMost - kLeast) * (0.05 + 0.95 * u);
  }
  return filled(p.g_dtype, shape, seed, "g", [&](Random& random, std::int64_t i) {
    const double u = random.uniform();
    const double g = -(kLeast + depth[static_cast<std::size_t>(i % gates)] * (u * u));
    return std::max(g, bound);
  });
}

/// Distinct slots of a pool of states in random order, one for each sequence or for each of its
/// columns; with three sequences or more the second is padding, and so are sequences for which no
/// slot is left.
HostTensor slots(const Problem& p, const Shape& shape, std::uint64_t seed) {
  Random random(seed, stream_of("state_index"));
  std::vector<std::int64_t> all(static_cast<std::size_t>(p.state_slots));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::int64_t>(i);
    std::swap(all[i], all[random.next() % (i + 1)]);
  }
  const std::size_t columns = shape.size() == 2 ? static_cast<std::size_t>(shape[1]) : 1;
  all.resize(static_cast<std::size_t>(p.N) * columns, -1);
  if (p.N >= 3)
    std::fill_n(all.begin() + static_cast<std::ptrdiff_t>(columns), columns, std::int64_t{-1});
  return integer_tensor(p.index_dtype, shape, all);
}

/// After how many tokens of each sequence: a multiple of 16, 0 and all of them among these.
HostTensor offsets(const Selection& selection, std::uint64_t seed) {
  const Problem& p = selection.problem;
  Random random(seed, stream_of("checkpoint_offsets"));
  std::vector<std::int64_t> all(static_cast<std::size_t>(p.N));
  for (std::size_t n = 0; n < all.size(); ++n) {
    const std::int64_t length =
        p.packed ? selection.cu_seqlens[n + 1] - selection.cu_seqlens[n] : p.T;
    all[n] = static_cast<std::int64_t>(random.next() % (length / 16 + 1)) * 16;
  }
  return integer_tensor(p.index_dtype, all);
}

/// A column of state_index for each sequence.
HostTensor accepted(const Problem& p, const Shape& shape, std::uint64_t seed) {
  return filled(p.index_dtype, shape, seed, "num_accepted", [&](Random& random, std::int64_t) {
    return static_cast<double>(1 + random.next() % p.index_columns);
  });
}

/// A row of intermediate_states for each sequence: its number, where there are as many.
HostTensor rows(const Problem& p) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(p.N));
  std::iota(all.begin(), all.end(), 0);
  return integer_tensor(p.index_dtype, all);
}

/// Trees: each token's parent is the token before it or, one in three times, any other before it.
HostTensor parents(const Problem& p, const Shape& shape, std::uint64_t seed) {
  return filled(p.index_dtype, shape, seed, "parent", [&](Random& random, std::int64_t i) {
    const std::int64_t t = i % shape[1];
    const auto any = static_cast<std::int64_t>(random.next() % (t + 1)) - 1;
    return static_cast<double>(random.next() % 3 == 0 ? any : t - 1);
  });
}

/// Two in three are true.
HostTensor choices(const Shape& shape, std::uint64_t seed) {
  HostTensor tensor = HostTensor::make(DType::boolean, shape);
  Random random(seed, stream_of("has_initial_state"));
  const std::int64_t count = tensor.elements();
  for (std::int64_t i = 0; i < count; ++i)
    static_cast<std::uint8_t*>(tensor.data.get())[i] = random.next() % 3 != 0 ? 1 : 0;
  return tensor;
}

/// One input.
HostTensor make_input(const TensorRule& rule, DType dtype, const Shape& shape,
                      const Selection& selection, std::uint64_t seed) {
  const Problem& p = selection.problem;
  if (rule.holds == Quantity::seqlens) return integer_tensor(dtype, selection.cu_seqlens);
  const std::string_view name = rule.name;
  const auto normal = [&](double deviation) {
    return filled(dtype, shape, seed, name, [deviation](Random& random, std::int64_t) {
      return deviation * random.normal();
    });
  };
  const auto uniform = [&](double least, double width) {
    return filled(dtype, shape, seed, name, [least, width](Random& random, std::int64_t) {
      const double scaled = width * random.uniform();
      return least + scaled;
    });
  };
  switch (rule.holds) {
    case Quantity::directions: return unit_rows(dtype, shape, seed, name);
    case Quantity::rates: return uniform(0.02, 0.96);
    case Quantity::gates: return log_decay(p, shape, seed);
    case Quantity::gate_rates: return uniform(-1.0, 3.5);
    case Quantity::gate_biases: return uniform(-6.0, 4.0);
    case Quantity::state_scales: return uniform(0.5, 1.5);
    case Quantity::states:
    case Quantity::state_gradient: return normal(0.25);
    case Quantity::taps: return normal(0.125);
    case Quantity::state_slots: return slots(p, shape, seed);
    case Quantity::accepted: return accepted(p, shape, seed);
    case Quantity::rows: return rows(p);
    case Quantity::parents: return parents(p, shape, seed);
    case Quantity::choices: return choices(shape, seed);
    case Quantity::offsets: return offsets(selection, seed);
    default: return normal(1);
  }
}

}  // namespace

Tensors make_example(const Selection& selection, std::uint64_t seed) {
  // The parameters of a gate in the kernel are there for whoever runs the file with that option.
  Problem problem = selection.problem;
  problem.disable_recompute = false;  // a user's file has no intermediates of a forward pass
  if (gate_kind(problem) != GateKind::none && !problem.use_gate_in_kernel)
    problem.use_gate_in_kernel = problem.has_dt_bias = true;
  const OperatorDefinition& definition = definition_of(problem);
  Tensors tensors;
  for (const TensorSpec& spec : tensor_specs(problem))
    if (spec.present && spec.access != TensorAccess::out)
      tensors[std::string(spec.name)] =
          make_input(definition.rule(spec.name), spec.dtype,
                     {spec.shape.begin(), spec.shape.begin() + spec.rank}, selection, seed);
  return tensors;
}

}  // namespace wyvern::cli
