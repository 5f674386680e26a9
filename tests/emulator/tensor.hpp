// Tensor maps of emulated launches, and the copies that go by them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace wyvern::emulator {

/// What a tensor map says, as cuTensorMapEncodeTiled takes it; innermost dimension first.
struct TensorMapView {
  void* base = nullptr;
  int element_bytes = 2;
  std::vector<std::int64_t> extents;  ///< elements
  std::vector<std::int64_t> strides;  ///< bytes, of every dimension but the innermost
  std::vector<std::int64_t> box;      ///< elements
  bool swizzle = false;               ///< of 128 bytes; none otherwise
};

/// What a kernel takes as its TensorMap. A launch's argument points at one.
struct alignas(64) EncodedTensorMap {
  std::array<std::uint64_t, 16> words{};
};

/// Throws std::invalid_argument where the driver would refuse.
EncodedTensorMap encode(const TensorMapView& view);

/// A copy of one box, under way between the tensor and shared memory. Immutable.
class TensorCopy {
 public:
  /// Of `map` as a kernel has it, for the box at `at`.
  TensorCopy(const void* map, std::span<const int> at, unsigned char* shared);

  /// What is wrong with it, or nothing; nothing else may be called otherwise.
  std::string check(const unsigned char* shared, std::int64_t shared_bytes) const;
  std::int64_t bytes() const;
  void poison() const;
  void load() const;   ///< from the tensor, zeros outside it
  void store() const;  ///< to the tensor, nothing outside it

 private:
  template <class Visit>
  void for_each(Visit&& visit) const;

  EncodedTensorMap map_;
  std::vector<int> at_;
  unsigned char* shared_;  ///< the box begins here
};

}  // namespace wyvern::emulator
