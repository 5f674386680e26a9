#include "autotune/inputs.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

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

/// Offsets of N sequences over T tokens, uneven, the second empty when there are three or more.
std::vector<std::int64_t> offsets(std::int64_t N, std::int64_t T, std::mt19937_64& random) {
  std::vector<double> weights(static_cast<std::size_t>(N));
  std::uniform_real_distribution<double> weight(0.5, 1.5);
  double sum = 0;
  for (std::size_t n = 0; n < weights.size(); ++n) {
    weights[n] = n == 1 && N >= 3 ? 0.0 : weight(random);
    sum += weights[n];
  }
  std::vector<std::int64_t> result{0};
  double passed = 0;
  for (const double w : weights) {
    passed += w;
    result.push_back(static_cast<std::int64_t>(passed / sum * static_cast<double>(T) + 0.5));
  }
  result.back() = T;
  return result;
}

/// Sources of values, each from its own place in the seed's stream.
class Source {
 public:
  explicit Source(std::uint64_t seed) : random_(seed) {}
  std::mt19937_64& engine() { return random_; }

  std::function<void(std::span<float>)> normal(float deviation) {
    return [this, deviation](std::span<float> row) {
      for (float& value : row) value = deviation * normal_(random_);
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

Bytes seqlens_bytes(const std::vector<std::int64_t>& values, DType dtype) {
  Bytes bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto narrow = static_cast<std::int32_t>(values[i]);
    if (dtype == DType::int32) std::memcpy(bytes.data() + i * 4, &narrow, 4);
    else std::memcpy(bytes.data() + i * 8, &values[i], 8);
  }
  return bytes;
}

}  // namespace

Problem reduced(const Problem& problem) {
  const auto sizes = chunk_sizes();
  const std::int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  Problem small = problem;
  small.B = 1;
  small.N = problem.packed ? 3 : 1;
  small.T = 2 * largest + 17;
  return small;
}

ProblemTensors::ProblemTensors(const Device& device, const Problem& problem, std::uint64_t seed,
                               bool keep_host)
    : on_(device), problem_(problem), keep_host_(keep_host) {
  const Problem& p = problem_;
  Source source(seed);
  Arguments& d = device_arguments_;
  Arguments& h = host_arguments_;
  const std::int64_t tokens = p.B * p.T;
  const auto qk = p.use_qk_l2norm ? source.normal(1) : source.unit();
  d.q = add(p.dtype, {p.B, p.T, p.H, p.K}, rows_of(tokens * p.H, p.K, p.dtype, qk), h.q);
  d.k = add(p.dtype, {p.B, p.T, p.H, p.K}, rows_of(tokens * p.H, p.K, p.dtype, qk), h.k);
  d.v = add(p.dtype, {p.B, p.T, p.HV, p.V},
            rows_of(tokens * p.HV, p.V, p.dtype, source.normal(1)), h.v);
  d.beta = add(p.beta_dtype, {p.B, p.T, p.HV},
               rows_of(tokens, p.HV, p.beta_dtype,
                       p.use_beta_sigmoid ? source.normal(1) : source.uniform(0.05F, 0.95F)),
               h.beta);
  d.g = add(p.g_dtype, {p.B, p.T, p.HV},
            rows_of(tokens, p.HV, p.g_dtype,
                    p.use_gate_in_kernel ? source.normal(1) : source.uniform(-0.5F, 0.0F)),
            h.g);
  if (p.use_gate_in_kernel) {
    d.A_log = add(DType::fp32, {p.HV}, rows_of(1, p.HV, DType::fp32, source.uniform(-3, 0)),
                  h.A_log);
    if (p.has_dt_bias)
      d.dt_bias = add(DType::fp32, {p.HV}, rows_of(1, p.HV, DType::fp32, source.normal(1)),
                      h.dt_bias);
  }
  const std::int64_t rows = p.state_v_first ? p.V : p.K;
  const std::int64_t columns = p.state_v_first ? p.K : p.V;
  if (p.initial_state)
    d.initial_state =
        add(p.state_dtype, {p.N, p.HV, rows, columns},
            rows_of(p.N * p.HV * rows, columns, p.state_dtype, source.normal(0.1F)),
            h.initial_state);
  if (p.packed) {
    cu_seqlens_ = offsets(p.N, p.T, source.engine());
    d.cu_seqlens = add(p.seqlens_dtype, {p.N + 1}, seqlens_bytes(cu_seqlens_, p.seqlens_dtype),
                       h.cu_seqlens);
    d.cu_seqlens_host = h.cu_seqlens_host = cu_seqlens_;
  }
  d.o = add(p.dtype, {p.B, p.T, p.HV, p.V}, {}, h.o);
  if (p.output_final_state)
    d.final_state = add(DType::fp32, {p.N, p.HV, rows, columns}, {}, h.final_state);
}

TensorView ProblemTensors::add(DType dtype, std::initializer_list<std::int64_t> shape,
                               Bytes content, TensorView& host) {
  const TensorView sized(nullptr, dtype, shape);
  const std::size_t bytes = static_cast<std::size_t>(sized.elements()) * size_of(dtype);
  device_memory_.push_back(on_.allocate(bytes));
  on_.copy_in(device_memory_.back().get(), content.data(), content.size());
  if (keep_host_) {
    content.resize(bytes);
    host_memory_.push_back(std::move(content));
    host = TensorView(host_memory_.back().data(), dtype, shape);
  }
  return TensorView(device_memory_.back().get(), dtype, shape);
}

void ProblemTensors::poison() const {
  for (const TensorView& out : {device_arguments_.o, device_arguments_.final_state})
    if (out.present())
      on_.fill(out.data, 0xFF, static_cast<std::size_t>(out.elements()) * size_of(out.dtype));
}

void ProblemTensors::fetch() const {
  const auto copy = [&](const TensorView& to, const TensorView& from) {
    if (from.present())
      on_.copy_out(to.data, from.data,
                   static_cast<std::size_t>(from.elements()) * size_of(from.dtype));
  };
  copy(host_arguments_.o, device_arguments_.o);
  copy(host_arguments_.final_state, device_arguments_.final_state);
}

}  // namespace wyvern
