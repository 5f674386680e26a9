#include "tests/support/host_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace wyvern::testing {
namespace {

constexpr std::size_t kAlignment = 256;

template <class T>
T read(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class T>
void write(unsigned char* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

}  // namespace

HostTensor::HostTensor(DType dtype, Shape shape)
    : dtype_(dtype),
      shape_(std::move(shape)),
      elements_(
          std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>())),
      capacity_(bytes() + 2 * kGuardBytes + kAlignment),
      storage_(std::make_unique<unsigned char[]>(capacity_)) {
  const auto start = reinterpret_cast<std::uintptr_t>(storage_.get()) + kGuardBytes;
  offset_ = kGuardBytes + (kAlignment - start % kAlignment) % kAlignment;
  std::fill_n(storage_.get(), offset_, kGuardByte);
  std::fill_n(storage_.get() + offset_ + bytes(), capacity_ - offset_ - bytes(), kGuardByte);
}

HostTensor::HostTensor(DType dtype, Shape shape, const std::vector<double>& values)
    : HostTensor(dtype, std::move(shape)) {
  if (std::ssize(values) < elements_) throw std::out_of_range("too few values for a tensor");
  store(0, elements_, values.data());
}

HostTensor::HostTensor(const HostTensor& other) : HostTensor(other.dtype_, other.shape_) {
  if (other.storage_) std::copy_n(other.data(), bytes(), data());
}

HostTensor& HostTensor::operator=(const HostTensor& other) {
  if (this != &other) *this = HostTensor(other);
  return *this;
}

double HostTensor::at(std::int64_t index) const {
  double value = 0;
  load(index, 1, &value);
  return value;
}

void HostTensor::set(std::int64_t index, double value) { store(index, 1, &value); }

void HostTensor::load(std::int64_t first, std::int64_t count, double* to) const {
  const unsigned char* p = data() + static_cast<std::size_t>(first) * size_of(dtype_);
  const auto all = [&]<class T>(T /*stored*/, auto convert) {
    for (std::int64_t i = 0; i < count; ++i)
      to[i] = convert(read<T>(p + static_cast<std::size_t>(i) * sizeof(T)));
  };
  const auto number = [](auto x) { return static_cast<double>(x); };
  switch (dtype_) {
    case DType::fp32: return all(float{}, number);
    case DType::fp16: return all(std::uint16_t{}, fp16_to_float);
    case DType::bf16: return all(std::uint16_t{}, bf16_to_float);
    case DType::int32: return all(std::int32_t{}, number);
    case DType::int64: return all(std::int64_t{}, number);
    case DType::boolean: return all(std::uint8_t{}, number);
    case DType::float8_e4m3: return all(std::uint8_t{}, e4m3_to_float);
    case DType::float8_e5m2: return all(std::uint8_t{}, e5m2_to_float);
  }
}

void HostTensor::store(std::int64_t first, std::int64_t count, const double* from) {
  unsigned char* p = data() + static_cast<std::size_t>(first) * size_of(dtype_);
  const auto all = [&](auto convert) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto value = convert(from[i]);
      write(p + static_cast<std::size_t>(i) * sizeof(value), value);
    }
  };
  switch (dtype_) {
    case DType::fp32: return all([](double x) { return static_cast<float>(x); });
    case DType::fp16: return all([](double x) { return float_to_fp16(static_cast<float>(x)); });
    case DType::bf16: return all([](double x) { return float_to_bf16(static_cast<float>(x)); });
    case DType::int32: return all([](double x) { return static_cast<std::int32_t>(x); });
    case DType::int64: return all([](double x) { return static_cast<std::int64_t>(x); });
    case DType::boolean: return all([](double x) { return static_cast<std::uint8_t>(x != 0); });
    case DType::float8_e4m3:
      return all([](double x) { return float_to_e4m3(static_cast<float>(x)); });
    case DType::float8_e5m2:
      return all([](double x) { return float_to_e5m2(static_cast<float>(x)); });
  }
}

void HostTensor::fill(const std::function<double()>& make) {
  for (std::int64_t i = 0; i < elements_; ++i) set(i, make());
}

std::vector<double> HostTensor::values() const {
  std::vector<double> all(static_cast<std::size_t>(elements_));
  load(0, elements_, all.data());
  return all;
}

void HostTensor::poison(unsigned char byte) { std::fill_n(data(), bytes(), byte); }

std::string HostTensor::guard_damage() const {
  for (std::size_t i = 0; i < capacity_; ++i) {
    if (i == offset_) i += bytes();
    if (i >= capacity_ || storage_[i] == kGuardByte) continue;
    return i < offset_ ? fmt::format("{} bytes before the start", offset_ - i)
                       : fmt::format("{} bytes past the end", i - offset_ - bytes());
  }
  return {};
}

TensorView HostTensor::view_at(void* pointer) const {
  TensorView view;
  view.data = pointer;
  view.dtype = dtype_;
  view.rank = static_cast<int>(shape_.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape_.size(); i-- > 0;) {
    view.shape[i] = shape_[i];
    view.strides[i] = stride;
    stride *= shape_[i];
  }
  return view;
}

bool same_bytes(const HostTensor& a, const HostTensor& b) {
  return a.bytes() == b.bytes() && std::equal(a.data(), a.data() + a.bytes(), b.data());
}

HostTensor normal(Engine& engine, DType dtype, Shape shape, double deviation) {
  std::normal_distribution<double> distribution(0, deviation);
  HostTensor tensor(dtype, std::move(shape));
  tensor.fill([&] { return distribution(engine); });
  return tensor;
}

HostTensor uniform(Engine& engine, DType dtype, Shape shape, double low, double high) {
  std::uniform_real_distribution<double> distribution(low, high);
  HostTensor tensor(dtype, std::move(shape));
  tensor.fill([&] { return distribution(engine); });
  return tensor;
}

HostTensor unit_rows(Engine& engine, DType dtype, Shape shape) {
  std::normal_distribution<double> distribution;
  HostTensor tensor(dtype, std::move(shape));
  const std::int64_t width = tensor.shape().back();
  std::vector<double> row(static_cast<std::size_t>(width));
  for (std::int64_t start = 0; start < tensor.elements(); start += width) {
    double squares = 0;
    for (double& x : row) {
      x = distribution(engine);
      squares += x * x;
    }
    for (std::int64_t i = 0; i < width; ++i)
      tensor.set(start + i, row[static_cast<std::size_t>(i)] / std::sqrt(squares));
  }
  return tensor;
}

std::string to_string(Gate gate) {
  switch (gate) {
    case Gate::zero: return "zero";
    case Gate::typical: return "typical";
    case Gate::fast: return "fast";
    case Gate::very_negative: return "very_negative";
    case Gate::mixed: return "mixed";
  }
  return "?";
}

HostTensor gates(Engine& engine, DType dtype, Shape shape, Gate gate) {
  std::normal_distribution<double> exponent(-3, 1);
  std::uniform_int_distribution<int> eighth(0, 7);
  HostTensor tensor(dtype, std::move(shape));
  tensor.fill([&]() -> double {
    if (gate == Gate::zero) return 0;
    if (gate == Gate::very_negative) return -1000;
    if (gate == Gate::fast) return -16 + 0.1 * exponent(engine);
    if (gate == Gate::mixed && eighth(engine) == 0) return -1000;
    return -std::exp(exponent(engine));
  });
  return tensor;
}

double rms_error(const HostTensor& x, const std::vector<double>& reference,
                 const std::function<bool(std::int64_t)>& select) {
  double difference = 0, norm = 0, count = 0;
  const std::vector<double> values = x.values();
  for (std::int64_t i = 0; i < x.elements(); ++i) {
    if (select && !select(i)) continue;
    const auto at = static_cast<std::size_t>(i);
    const double value = values[at], expected = reference.at(at);
    if (!std::isfinite(value)) return std::numeric_limits<double>::infinity();
    difference += (value - expected) * (value - expected);
    norm += expected * expected;
    count += 1;
  }
  if (count == 0) return 0;
  return std::sqrt(norm == 0 ? difference / count : difference / norm);
}

}  // namespace wyvern::testing
