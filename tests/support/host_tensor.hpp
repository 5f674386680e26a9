// Host tensors stored in any dtype, with seeded fills, poison, and guard bands around the data.
#pragma once

#include <wyvern/tensor.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace wyvern::testing {

using Engine = std::mt19937_64;
using Shape = std::vector<std::int64_t>;

/// Bytes of a guard band on either side of a tensor's data.
inline constexpr std::size_t kGuardBytes = 1024;
/// Every byte of a guard band.
inline constexpr unsigned char kGuardByte = 0xA5;
/// Poison whose every element is a NaN (floating dtypes) or -1 (integers).
inline constexpr unsigned char kNanPoison = 0xFF;
/// A second poison, finite in every dtype: an element that keeps either poison was not written.
inline constexpr unsigned char kFinitePoison = 0x3C;

/// A contiguous tensor that owns its memory: guard band, data aligned to 256 bytes, guard band.
/// Copies are deep. Not thread-safe.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, Shape shape);
  HostTensor(DType dtype, Shape shape, const std::vector<double>& values);
  HostTensor(const HostTensor& other);
  HostTensor& operator=(const HostTensor& other);
  HostTensor(HostTensor&&) noexcept = default;
  HostTensor& operator=(HostTensor&&) noexcept = default;

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t elements() const { return elements_; }
  std::size_t bytes() const { return static_cast<std::size_t>(elements_) * size_of(dtype_); }
  unsigned char* data() const { return storage_.get() + offset_; }

  double at(std::int64_t index) const;
  /// Stores `value` rounded to nearest even in this dtype.
  void set(std::int64_t index, double value);
  /// Sets every element to make().
  void fill(const std::function<double()>& make);
  std::vector<double> values() const;

  void poison(unsigned char byte);
  /// Empty when both guard bands are intact, else which one was written and where.
  std::string guard_damage() const;

  /// A view with this shape; its data pointer is never null, so an empty tensor counts as present.
  TensorView view() const { return view_at(data()); }
  /// The same shape and dtype over memory elsewhere.
  TensorView view_at(void* pointer) const;

 private:
  void load(std::int64_t first, std::int64_t count, double* to) const;
  void store(std::int64_t first, std::int64_t count, const double* from);

  DType dtype_ = DType::fp32;
  Shape shape_;
  std::int64_t elements_ = 0;
  std::size_t offset_ = 0;
  std::size_t capacity_ = 0;
  std::unique_ptr<unsigned char[]> storage_;
};

bool same_bytes(const HostTensor& a, const HostTensor& b);

/// Random tensors of the kinds the delta rule is run on.
HostTensor normal(Engine& engine, DType dtype, Shape shape, double deviation = 1);
HostTensor uniform(Engine& engine, DType dtype, Shape shape, double low, double high);
/// A tensor [.., K] of rows with length 1 (before rounding).
HostTensor unit_rows(Engine& engine, DType dtype, Shape shape);

/// How g is filled.
enum class Gate : std::uint8_t {
  zero,           ///< no decay at all
  typical,        ///< log-uniform around -0.05, as trained models have
  fast,           ///< near -16: a token decays a state to fp32's resolution
  very_negative,  ///< -1000 everywhere
  mixed,          ///< typical, with one in eight at -1000
};
std::string to_string(Gate gate);
HostTensor gates(Engine& engine, DType dtype, Shape shape, Gate gate);

/// rms(x - reference) / rms(reference) over the elements `select` says (all without it); infinity
/// for a NaN or Inf among them, the plain rms of the difference when the reference is all zero.
double rms_error(const HostTensor& x, const std::vector<double>& reference,
                 const std::function<bool(std::int64_t)>& select = {});

}  // namespace wyvern::testing
