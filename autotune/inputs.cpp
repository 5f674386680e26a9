#include "autotune/inputs.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>

#include "runtime/devices/cpu/memory.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operator_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

using Bytes = std::vector<unsigned char>;

/// Rows past this many repeat. Odd, so that chunks do not repeat in step with them.
constexpr std::int64_t kDistinctRows = 8191;

void put(Bytes& bytes, DType dtype, std::size_t index, float value) {
  const auto store = [&](auto bits) {
    std::memcpy(bytes.data() + index * sizeof(bits), &bits, sizeof(bits));
  };
  if (dtype == DType::fp32) store(value);
  if (dtype == DType::bf16) store(float_to_bf16(value));
  if (dtype == DType::fp16) store(float_to_fp16(value));
  if (dtype == DType::float8_e4m3) store(float_to_e4m3(value));
  if (dtype == DType::float8_e5m2) store(float_to_e5m2(value));
}

/// `rows` rows of `width` values; `fill_row` writes one.
Bytes rows_of(std::int64_t rows, std::int64_t width, DType dtype,
              const std::function<void(std::span<float>)>& fill_row) {
  const auto row_bytes = static_cast<std::size_t>(width) * size_of(dtype);
  Bytes bytes(static_cast<std::size_t>(rows) * row_bytes);
  std::vector<float> row(static_cast<std::size_t>(width));
  const std::int64_t distinct = std::min(rows, kDistinctRows);
  for (std::int64_t r = 0; r < distinct; ++r) {
    fill_row(row);
    for (std::size_t i = 0; i < row.size(); ++i)
      put(bytes, dtype, static_cast<std::size_t>(r) * row.size() + i, row[i]);
  }
  for (std::int64_t r = distinct; r < rows; r += distinct)
    std::memcpy(bytes.data() + static_cast<std::size_t>(r) * row_bytes, bytes.data(),
                static_cast<std::size_t>(std::min(distinct, rows - r)) * row_bytes);
  return bytes;
}

}  // namespace

/// Sources of values, each from its own place in the seed's stream.
class ProblemTensors::Source {
 public:
  explicit Source(std::uint64_t seed) : random_(seed) {}
  std::mt19937_64& engine() { return random_; }

  std::function<void(std::span<float>)> normal(float deviation, float mean = 0) {
    return [this, deviation, mean](std::span<float> row) {
      for (float& value : row) value = mean + deviation * normal_(random_);
    };
  }
  std::function<void(std::span<float>)> unit() {
    return [this](std::span<float> row) {
      double sum = 0;
      for (float& value : row) {
        value = normal_(random_);
        sum += static_cast<double>(value) * value;
      }
      const auto inverse = static_cast<float>(1 / std::sqrt(sum + 1e-12));
      for (float& value : row) value *= inverse;
    };
  }
  std::function<void(std::span<float>)> uniform(float low, float high) {
    return [this, low, high](std::span<float> row) {
      std::uniform_real_distribution<float> draw(low, high);
      for (float& value : row) value = draw(random_);
    };
  }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

namespace {

/// Tokens of a sequence that a recurrent pass is checked on.
constexpr std::int64_t kDecodedTokens = 3;

constexpr float kLeastLogRate = -3;

/// How the values of an input are drawn; integers are not.
template <class Source>
std::function<void(std::span<float>)> values_of(Quantity holds, const Problem& p, float gates,
                                                Source& source) {
  switch (holds) {
    case Quantity::directions: return p.use_qk_l2norm ? source.normal(1) : source.unit();
    case Quantity::rates:
      return p.use_beta_sigmoid ? source.normal(1) : source.uniform(0.05F, 0.95F);
    case Quantity::gates: {
      // One channel of many may decay faster than a head with a single gate.
      const float fastest = gate_kind(p) == GateKind::vector ? -5.0F : -0.5F;
      if (!p.use_gate_in_kernel) return source.uniform(fastest * gates, 0.0F);
      // Softplus and sigmoid are nearly exp where they are small. A sigmoid's argument is
      // multiplied by a rate first, by the least here in the worst case.
      const float power = p.lower_bound ? std::exp(-kLeastLogRate) : 1.0F;
      return source.normal(1, power * std::log(gates));
    }
    case Quantity::gate_rates: return source.uniform(kLeastLogRate, 0);
    case Quantity::state_scales: return source.uniform(0.5F, 2);
    case Quantity::states:
    case Quantity::state_gradient: return source.normal(0.1F);
    case Quantity::taps: return source.normal(0.125F);
    default: return source.normal(1);
  }
}

Bytes integer_bytes(const std::vector<std::int64_t>& values, DType dtype) {
  Bytes bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto narrow = static_cast<std::int32_t>(values[i]);
    if (dtype == DType::int32)
      std::memcpy(bytes.data() + i * 4, &narrow, 4);
    else
      std::memcpy(bytes.data() + i * 8, &values[i], 8);
  }
  return bytes;
}

/// Distinct slots in random order for N sequences; one sequence in a few is padding. The same for
/// every index tensor: final states go to the slots that sequences start from.
std::vector<std::int64_t> slots(const Problem& p) {
  std::mt19937_64 random(static_cast<std::uint64_t>(p.N));
  std::vector<std::int64_t> all(static_cast<std::size_t>(std::max(p.N, p.state_slots)));
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = static_cast<std::int64_t>(i) < p.state_slots ? static_cast<std::int64_t>(i) : -1;
  std::shuffle(all.begin(), all.end(), random);
  all.resize(static_cast<std::size_t>(p.N));
  if (all.size() >= 3) all[1] = -1;
  return all;
}

/// A token in the middle of each sequence.
std::vector<std::int64_t> checkpoint_offsets(const Problem& p,
                                             const std::vector<std::int64_t>& cu_seqlens) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(p.N));
  for (std::size_t n = 0; n < all.size(); ++n)
    all[n] = (p.packed ? cu_seqlens[n + 1] - cu_seqlens[n] : p.T) / 32 * 16;
  return all;
}

/// The slot of each sequence in every column of state_index: each token's state overwrites the
/// previous one.
std::vector<std::int64_t> in_columns(const std::vector<std::int64_t>& slots, std::int64_t columns) {
  std::vector<std::int64_t> all;
  for (const std::int64_t slot : slots)
    all.insert(all.end(), static_cast<std::size_t>(columns), slot);
  return all;
}

/// Two chains of drafts: every token's parent is two tokens before it.
std::vector<std::int64_t> parents(const Problem& p) {
  std::vector<std::int64_t> all;
  for (std::int64_t n = 0; n < p.N; ++n)
    for (std::int64_t t = 0; t < draft_tokens_of(p); ++t)
      all.push_back(std::max<std::int64_t>(t - 2, -1));
  return all;
}

std::size_t bytes_of(const TensorView& view) {
  return static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
}

/// A contiguous tensor of the spec's shape, without memory.
TensorView shaped(const TensorSpec& spec) {
  TensorView view;
  view.dtype = spec.dtype;
  view.rank = spec.rank;
  view.shape = spec.shape;
  std::int64_t stride = 1;
  for (int i = spec.rank - 1; i >= 0; --i) {
    view.strides[static_cast<std::size_t>(i)] = stride;
    stride *= spec.shape[static_cast<std::size_t>(i)];
  }
  return view;
}

}  // namespace

std::vector<std::int64_t> uneven_offsets(const Problem& problem, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> weight(0.5, 1.5);
  std::vector<double> weights(static_cast<std::size_t>(problem.N));
  const std::int64_t first = problem.seqlens_hint && problem.N >= 2 ? longest_sequence(problem) : 0;
  double sum = 0;
  for (std::size_t n = 0; n < weights.size(); ++n) {
    const bool none = (n == 0 && first > 0) || (n == 1 && problem.N >= 3);
    weights[n] = none ? 0.0 : weight(random);
    sum += weights[n];
  }
  std::vector<std::int64_t> offsets{0};
  double passed = 0;
  for (const double w : weights) {
    passed += w;
    offsets.push_back(first + std::llround(passed / sum * static_cast<double>(problem.T - first)));
  }
  offsets.back() = problem.T;
  return offsets;
}

bool gates_matter(const Problem& problem) {
  return gate_kind(problem) != GateKind::none && problem.pass != Pass::recurrent;
}

Problem reduced(const Problem& problem, std::int64_t segment) {
  Problem small = problem;
  small.B = 1;
  small.N = problem.packed ? 3 : 1;
  small.seqlens_hint.reset();
  if (problem.pass == Pass::recurrent) {
    small.B = problem.packed ? 1 : 3;
    small.N = 3;
    small.T = problem.packed ? 3 * kDecodedTokens : kDecodedTokens;
    small.state_slots = problem.state_index ? 5 : 0;
    if (problem.index_columns != 0) small.index_columns = small.T;
    if (problem.intermediate_rows) small.intermediate_rows = small.N;
    if (problem.draft_tokens) small.draft_tokens = problem.packed ? 2 * kDecodedTokens : small.T;
    return small;
  }
  const auto sizes = chunk_sizes(problem, DeviceKind::cuda);  // in any order
  small.state_slots = problem.state_index ? 5 : 0;
  small.T = 2 * std::max(*std::max_element(sizes.begin(), sizes.end()), segment) + 17;
  small.checkpoint_rows.reset();
  constexpr std::int64_t kMostChecked = 4096;  // tokens, which the reference computes one by one
  small.T = std::max(small.T, std::min(problem.checkpoint_every, kMostChecked) + 17);
  return small;
}

TensorBytes tensor_bytes(const Problem& problem) {
  TensorBytes bytes;
  for (const TensorSpec& spec : tensor_specs(problem)) {
    if (!spec.present) continue;
    const std::uint64_t own = bytes_of(spec);
    bytes.all += own;
    bytes.largest = std::max(bytes.largest, own);
    if (spec.access == TensorAccess::out) bytes.outputs += own;
  }
  return bytes;
}

void check_memory(const Device& device, const Problem& p, std::uint64_t on_host,
                  std::uint64_t on_device) {
  const auto check = [&](std::uint64_t needed, std::uint64_t most, std::string_view whose,
                         std::string_view is) {
    if (needed <= most) return;
    constexpr std::uint64_t kMega = 1'000'000;
    throw Error(
        ErrorKind::kUnavailable,
        fmt::format("B = {}, T = {}, N = {}, H = {}, HV = {}, K = {}, V = {} needs {} MB of "
                    "{} memory, and {} MB are {}; give it fewer sequences, tokens or heads",
                    p.B, p.T, p.N, p.H, p.HV, p.K, p.V, needed / kMega, whose, most / kMega, is));
  };
  const bool host_only = device.impl().host_memory();
  // Linux overcommits and kills a process that touches too much, and std::bad_alloc does not say
  // which problem was too large.
  check(on_host + (host_only ? on_device : 0), available_memory(), "host", "free");
  if (!host_only)
    check(on_device, static_cast<std::uint64_t>(device.info().memory_bytes), device.info().name,
          "there");
}

ProblemTensors::ProblemTensors(const Device& device, const Problem& problem, std::uint64_t seed,
                               bool keep_host, float gates, std::vector<std::int64_t> cu_seqlens)
    : on_(device),
      problem_(problem),
      keep_host_(keep_host),
      specs_(tensor_specs(problem)),
      cu_seqlens_(std::move(cu_seqlens)) {
  const TensorBytes bytes = tensor_bytes(problem);
  const auto offsets =
      problem.packed ? (static_cast<std::uint64_t>(problem.N) + 1) * sizeof(std::int64_t) : 0;
  // Inputs are generated in host memory for every device.
  check_memory(device, problem, (keep_host ? bytes.all : bytes.largest) + offsets, bytes.all);
  if (problem.packed && cu_seqlens_.empty()) cu_seqlens_ = uneven_offsets(problem, seed);
  std::erase_if(specs_, [](const TensorSpec& spec) { return !spec.present; });
  Source source(seed);
  for (const TensorSpec& spec : specs_) add(spec, content_of(spec, gates, source));
  device_arguments_.cu_seqlens_host = host_arguments_.cu_seqlens_host = cu_seqlens_;
}

/// The bytes of an input; none for an output.
Bytes ProblemTensors::content_of(const TensorSpec& spec, float gates, Source& source) const {
  const TensorRule& rule = definition_of(problem_).rule(spec.name);
  if (spec.access == TensorAccess::out || rule.holds == Quantity::computed) return {};
  if (rule.holds == Quantity::seqlens) return integer_bytes(cu_seqlens_, spec.dtype);
  if (rule.holds == Quantity::state_slots)
    return integer_bytes(in_columns(slots(problem_), spec.rank == 2 ? spec.shape[1] : 1),
                         spec.dtype);
  if (rule.holds == Quantity::accepted)
    return integer_bytes(std::vector<std::int64_t>(static_cast<std::size_t>(problem_.N), 1),
                         spec.dtype);
  if (rule.holds == Quantity::rows) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(problem_.N));
    std::iota(rows.begin(), rows.end(), 0);
    return integer_bytes(rows, spec.dtype);
  }
  if (rule.holds == Quantity::parents) return integer_bytes(parents(problem_), spec.dtype);
  if (rule.holds == Quantity::offsets)
    return integer_bytes(checkpoint_offsets(problem_, cu_seqlens_), spec.dtype);
  // In a server most sequences continue from a state.
  if (rule.holds == Quantity::choices) return Bytes(bytes_of(spec), Bytes::value_type{1});
  const std::int64_t elements = shaped(spec).elements();
  const std::int64_t width = spec.shape[static_cast<std::size_t>(spec.rank - 1)];
  return rows_of(width == 0 ? 0 : elements / width, width, spec.dtype,
                 values_of(rule.holds, problem_, gates, source));
}

/// A tensor in new memory on the device.
TensorView ProblemTensors::placed(const TensorSpec& spec, const Bytes& content) {
  TensorView view = shaped(spec);
  device_memory_.push_back(on_.allocate(bytes_of(view)));
  view.data = device_memory_.back().get();
  on_.copy_in(view.data, content.data(), content.size());
  return view;
}

Arguments ProblemTensors::with_gates(float gates, std::uint64_t seed) {
  Arguments changed = device_arguments_;
  Source source(seed);
  for (const TensorSpec& spec : specs_)
    if (definition_of(problem_).rule(spec.name).holds == Quantity::gates)
      changed.tensor(spec.name) = placed(spec, content_of(spec, gates, source));
  return changed;
}

void ProblemTensors::add(const TensorSpec& spec, Bytes content) {
  TensorView view = placed(spec, content);
  device_arguments_.tensor(spec.name) = view;
  if (!keep_host_) return;
  if (spec.access == TensorAccess::inout) originals_[spec.name] = content;
  content.resize(bytes_of(view));
  host_memory_.push_back(std::move(content));
  view.data = host_memory_.back().data();
  host_arguments_.tensor(spec.name) = view;
}

void ProblemTensors::keep(Runtime& runtime) {
  if (problem_.segment_chunks && !problem_.summary) {
    run_before(runtime, summary_of(problem_), "summary");
    return;
  }
  if (problem_.pass != Pass::backward || !problem_.disable_recompute) return;
  Problem forward = problem_;
  forward.pass = Pass::forward;
  forward.output_final_state = forward.output_conv_state = false;
  run_before(runtime, forward, "o");
}

void ProblemTensors::run_before(Runtime& runtime, const Problem& problem, std::string_view output) {
  const Operator op = runtime.prepare(on_, problem);
  Arguments arguments = device_arguments_;
  std::shared_ptr<void> memory;
  for (const TensorSpec& spec : tensor_specs(problem)) {
    TensorView& view = arguments.tensor(spec.name);
    if (!spec.present) view = {};
    if (spec.name != output) continue;
    view = shaped(spec);
    memory = on_.allocate(bytes_of(view));
    view.data = memory.get();
  }
  const std::shared_ptr<void> workspace = on_.allocate(op.workspace_bytes());
  op.launch(arguments, workspace.get());
  on_.synchronize();
}

void ProblemTensors::poison() const {
  for (const TensorSpec& spec : specs_) {
    const TensorView& view = device_arguments_.tensor(spec.name);
    if (spec.access == TensorAccess::out) on_.fill(view.data, 0xFF, bytes_of(view));
    if (const auto original = originals_.find(spec.name); original != originals_.end())
      on_.copy_in(view.data, original->second.data(), original->second.size());
  }
}

void ProblemTensors::fetch() const {
  for (const TensorSpec& spec : specs_)
    if (spec.access != TensorAccess::in)
      on_.copy_out(host_arguments_.tensor(spec.name).data, device_arguments_.tensor(spec.name).data,
                   bytes_of(host_arguments_.tensor(spec.name)));
}

}  // namespace wyvern
