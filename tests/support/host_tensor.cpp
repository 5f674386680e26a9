#include "tests/support/host_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

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
  for (std::int64_t i = 0; i < elements_; ++i) set(i, values.at(static_cast<std::size_t>(i)));
}

HostTensor::HostTensor(const HostTensor& other) : HostTensor(other.dtype_, other.shape_) {
  if (other.storage_) std::copy_n(other.data(), bytes(), data());
}

HostTensor& HostTensor::operator=(const HostTensor& other) {
  if (this != &other) *this = HostTensor(other);
  return *this;
}

double HostTensor::at(std::int64_t index) const {
  const unsigned char* p = data() + static_cast<std::size_t>(index) * size_of(dtype_);
  switch (dtype_) {
    case DType::fp32: return read<float>(p);
    case DType::fp16: return fp16_to_float(read<std::uint16_t>(p));
    case DType::bf16: return bf16_to_float(read<std::uint16_t>(p));
    case DType::int32: return read<std::int32_t>(p);
    case DType::int64: return static_cast<double>(read<std::int64_t>(p));
  }
  return 0;
}

void HostTensor::set(std::int64_t index, double value) {
  unsigned char* p = data() + static_cast<std::size_t>(index) * size_of(dtype_);
  switch (dtype_) {
    case DType::fp32: return write(p, static_cast<float>(value));
    case DType::fp16: return write(p, float_to_fp16(static_cast<float>(value)));
    case DType::bf16: return write(p, float_to_bf16(static_cast<float>(value)));
    case DType::int32: return write(p, static_cast<std::int32_t>(value));
    case DType::int64: return write(p, static_cast<std::int64_t>(value));
  }
}

void HostTensor::fill(const std::function<double()>& make) {
  for (std::int64_t i = 0; i < elements_; ++i) set(i, make());
}

std::vector<double> HostTensor::values() const {
  std::vector<double> all(static_cast<std::size_t>(elements_));
  for (std::int64_t i = 0; i < elements_; ++i) all[static_cast<std::size_t>(i)] = at(i);
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
    if (gate == Gate::mixed && eighth(engine) == 0) return -1000;
    return -std::exp(exponent(engine));
  });
  return tensor;
}

double rms_error(const HostTensor& x, const std::vector<double>& reference,
                 const std::function<bool(std::int64_t)>& select) {
  double difference = 0, norm = 0, count = 0;
  for (std::int64_t i = 0; i < x.elements(); ++i) {
    if (select && !select(i)) continue;
    const double value = x.at(i), expected = reference.at(static_cast<std::size_t>(i));
    if (!std::isfinite(value)) return std::numeric_limits<double>::infinity();
    difference += (value - expected) * (value - expected);
    norm += expected * expected;
    count += 1;
  }
  if (count == 0) return 0;
  return std::sqrt(norm == 0 ? difference / count : difference / norm);
}

}  // namespace wyvern::testing
