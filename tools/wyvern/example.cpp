#include "tools/wyvern/example.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

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

void store(HostTensor& tensor, std::int64_t index, double value) {
  const auto rounded = static_cast<float>(value);
  switch (tensor.dtype) {
    case DType::fp32: static_cast<float*>(tensor.data.get())[index] = rounded; break;
    case DType::bf16:
      static_cast<std::uint16_t*>(tensor.data.get())[index] = float_to_bf16(rounded);
      break;
    case DType::fp16:
      static_cast<std::uint16_t*>(tensor.data.get())[index] = float_to_fp16(rounded);
      break;
    case DType::int32:
    case DType::int64: break;  // not made from real numbers
  }
}

/// The streams of random numbers, one per tensor, so that none depends on another's size.
enum class Stream : std::uint64_t { q = 1, k, v, beta, g, initial_state, A_log, dt_bias };

template <class Draw>
HostTensor filled(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed, Stream stream,
                  const Draw& draw) {
  HostTensor tensor = HostTensor::make(dtype, std::move(shape));
  Random random(seed, static_cast<std::uint64_t>(stream));
  const std::int64_t count = tensor.elements();
  for (std::int64_t i = 0; i < count; ++i) store(tensor, i, draw(random, i));
  return tensor;
}

/// Rows of unit length: k so that the recurrence is stable without use_qk_l2norm.
HostTensor unit_rows(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed,
                     Stream stream) {
  HostTensor tensor = HostTensor::make(dtype, std::move(shape));
  Random random(seed, static_cast<std::uint64_t>(stream));
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

/// Log decay: head h reaches down to a depth of its own, at most log 2, most tokens far above it.
HostTensor log_decay(const Problem& p, std::uint64_t seed) {
  constexpr double kLeast = 0.0010005;  // exp(-kLeast) is 0.999
  constexpr double kMost = 0.6931;
  std::vector<double> depth(static_cast<std::size_t>(p.HV));
  Random heads(seed ^ 0x6865616473U, static_cast<std::uint64_t>(Stream::g));
  for (double& d : depth) {
    const double u = heads.uniform();
    d = (kMost - kLeast) * (0.05 + 0.95 * u);
  }
  return filled(p.g_dtype, {p.B, p.T, p.HV}, seed, Stream::g, [&](Random& random, std::int64_t i) {
    const double u = random.uniform();
    return -(kLeast + depth[static_cast<std::size_t>(i % p.HV)] * (u * u));
  });
}

}  // namespace

Tensors make_example(const Selection& selection, std::uint64_t seed) {
  const Problem& p = selection.problem;
  const auto normal = [](Random& random, std::int64_t) { return random.normal(); };
  Tensors tensors;
  tensors["q"] = unit_rows(p.dtype, {p.B, p.T, p.H, p.K}, seed, Stream::q);
  tensors["k"] = unit_rows(p.dtype, {p.B, p.T, p.H, p.K}, seed, Stream::k);
  tensors["v"] = filled(p.dtype, {p.B, p.T, p.HV, p.V}, seed, Stream::v, normal);
  tensors["beta"] = filled(p.beta_dtype, {p.B, p.T, p.HV}, seed, Stream::beta,
                           [](Random& random, std::int64_t) {
                             return 0.02 + 0.96 * random.uniform();
                           });
  tensors["g"] = log_decay(p, seed);
  std::vector<std::int64_t> state{p.N, p.HV, p.K, p.V};
  if (p.state_v_first) std::swap(state[2], state[3]);
  tensors["initial_state"] =
      filled(p.state_dtype, std::move(state), seed, Stream::initial_state,
             [](Random& random, std::int64_t) { return 0.25 * random.normal(); });
  tensors["A_log"] = filled(DType::fp32, {p.HV}, seed, Stream::A_log,
                            [](Random& random, std::int64_t) {
                              return -1.0 + 3.5 * random.uniform();
                            });
  tensors["dt_bias"] = filled(DType::fp32, {p.HV}, seed, Stream::dt_bias,
                              [](Random& random, std::int64_t) {
                                return -6.0 + 4.0 * random.uniform();
                              });
  if (p.packed) {
    HostTensor boundaries = HostTensor::make(DType::int64, {p.N + 1});
    std::copy(selection.cu_seqlens.begin(), selection.cu_seqlens.end(),
              static_cast<std::int64_t*>(boundaries.data.get()));
    tensors["cu_seqlens"] = std::move(boundaries);
  }
  return tensors;
}

}  // namespace wyvern::cli
