// Tensor maps of emulated launches, and the copies that go by them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "templates/device/tensor_map.hpp"
#include "templates/tiled_view.hpp"

namespace wyvern::emulator {

/// What a kernel takes as the map of a view of the tensor at `address`. Throws
/// std::invalid_argument where the driver would refuse, and for swizzles other than that of 128
/// bytes, which are not emulated.
TensorMap encode(const TiledView& view, std::size_t element_bytes, void* address);

/// A copy of one box, or of bytes in a row, under way between the tensor and shared memory.
/// Immutable.
class TmaCopy {
 public:
  /// Of `map` as a kernel has it, for the box at `at`.
  TmaCopy(const void* map, std::span<const int> at, unsigned char* shared);

  /// Of so many bytes from `address` on.
  TmaCopy(void* address, std::int64_t bytes, unsigned char* shared);

  /// What is wrong with it, or nothing; nothing else may be called otherwise.
  std::string check(const unsigned char* shared, std::int64_t shared_bytes) const;
  std::int64_t bytes() const;
  void poison() const;
  void load() const;   ///< from the tensor, zeros outside it
  void store() const;  ///< to the tensor, nothing outside it

 private:
  template <class Visit>
  void for_each(Visit&& visit) const;

  TensorMap map_;
  std::vector<int> at_;
  unsigned char* shared_;  ///< the box begins here
};

}  // namespace wyvern::emulator
