#include "tests/emulator/tensor.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace wyvern::emulator {
namespace {
constexpr std::uint64_t kMagic = 0x57595645524E544DULL;
constexpr std::int64_t kSwizzledRow = 128;

/// How the words of an encoded map are used here; a driver's are its own.
struct Map {
  std::uint64_t magic;
  unsigned char* base;
  std::array<std::int64_t, 5> extents;
  std::array<std::int64_t, 5> strides;  ///< bytes, all dimensions
  std::array<std::uint16_t, 5> box;
  std::uint8_t rank;
  std::uint8_t element_bytes;
  bool swizzle;

  static Map of(const TensorMap& encoded) {
    Map map;
    static_assert(sizeof(map) <= sizeof(encoded));
    std::memcpy(&map, &encoded, sizeof(map));
    return map;
  }
};

}  // namespace

TensorMap encode(const TiledView& view, std::size_t element_bytes, void* address) {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("a tensor map's ") + what);
  };
  const std::size_t rank = view.dims.size();
  require(rank >= 1, "rank is not 1 to 5");
  require(view.strides.size() + 1 == rank && view.box.size() == rank,
          "strides or box do not have its rank");
  require(reinterpret_cast<std::uintptr_t>(address) % 16 == 0,
          "address is not aligned to 16 bytes");
  for (const std::int64_t size : view.dims)
    require(size >= 1 && size <= std::int64_t{1} << 32, "dimension is not 1 to 2^32");
  for (const std::int64_t stride : view.strides)
    require(stride > 0 && stride % 16 == 0 && stride < std::int64_t{1} << 40,
            "stride is not a multiple of 16 bytes under 2^40");
  for (const std::int64_t size : view.box) require(size >= 1 && size <= 256, "box is not 1 to 256");
  const bool swizzle = view.swizzle != Swizzle::none;
  const std::int64_t row = view.box[0] * static_cast<std::int64_t>(element_bytes);
  require(row % 16 == 0, "box rows are not multiples of 16 bytes");
  require(!swizzle || view.swizzle == Swizzle::bytes128, "swizzle is not of 128 bytes");
  require(!swizzle || row == kSwizzledRow, "box rows do not fill the swizzle's 128 bytes");

  Map map{};
  map.magic = kMagic;
  map.base = static_cast<unsigned char*>(address);
  map.rank = static_cast<std::uint8_t>(rank);
  map.element_bytes = static_cast<std::uint8_t>(element_bytes);
  map.swizzle = swizzle;
  for (std::size_t i = 0; i < rank; ++i) {
    map.extents[i] = view.dims[i];
    map.strides[i] = i == 0 ? static_cast<std::int64_t>(element_bytes) : view.strides[i - 1];
    map.box[i] = static_cast<std::uint16_t>(view.box[i]);
  }
  TensorMap encoded{};
  std::memcpy(encoded.opaque, &map, sizeof(map));
  return encoded;
}

TmaCopy::TmaCopy(const void* map, std::span<const int> at, unsigned char* shared)
    : at_(at.begin(), at.end()), shared_(shared) {
  std::memcpy(&map_, map, sizeof(map_));
}

TmaCopy::TmaCopy(void* address, std::int64_t bytes, unsigned char* shared)
    : at_(1, 0), shared_(shared) {
  // One dimension of words, all of it a box.
  constexpr std::int64_t kWord = 16;
  Map map{};
  map.magic = kMagic;
  map.base = static_cast<unsigned char*>(address);
  map.extents[0] = map.box[0] = static_cast<std::uint16_t>(bytes / kWord);
  map.strides[0] = map.element_bytes = kWord;
  map.rank = 1;
  const bool aligned = reinterpret_cast<std::uintptr_t>(address) % kWord == 0;
  if (!aligned || bytes % kWord != 0 || map.box[0] != bytes / kWord) map.magic = 0;
  std::memcpy(&map_, &map, sizeof(map));
}

std::string TmaCopy::check(const unsigned char* shared, std::int64_t shared_bytes) const {
  const Map map = Map::of(map_);
  if (map.magic != kMagic)
    return "a TMA copy by what is not a tensor map, or not of whole words of 16 bytes";
  if (map.rank != at_.size())
    return fmt::format("a TMA copy with {} coordinates by a map of rank {}", at_.size(), map.rank);
  const std::int64_t offset = shared_ - shared;
  if (offset < 0 || offset + bytes() > shared_bytes)
    return fmt::format("a TMA copy of {} bytes at {} leaves shared memory", bytes(), offset);
  // A swizzle goes by bits of the address: a tile that begins elsewhere is permuted otherwise.
  const int alignment = map.swizzle ? 1024 : 128;
  if (offset % alignment != 0)
    return fmt::format("a TMA copy's shared memory at {} is not aligned to {} bytes", offset,
                       alignment);
  return {};
}

std::int64_t TmaCopy::bytes() const {
  const Map map = Map::of(map_);
  return std::accumulate(map.box.begin(), map.box.begin() + map.rank,
                         std::int64_t{map.element_bytes}, std::multiplies<>());
}

/// Calls visit(element in shared memory, element of the tensor or null, bytes) over the box.
template <class Visit>
void TmaCopy::for_each(Visit&& visit) const {
  const Map map = Map::of(map_);
  std::array<std::int64_t, 5> index{};
  const std::int64_t total = bytes();
  for (std::int64_t offset = 0; offset < total; offset += map.element_bytes) {
    bool inside = true;
    unsigned char* element = map.base;
    for (std::size_t i = 0; i < map.rank; ++i) {
      const std::int64_t coordinate = at_[i] + index[i];
      inside = inside && coordinate >= 0 && coordinate < map.extents[i];
      element += coordinate * map.strides[i];
    }
    const std::int64_t place = map.swizzle ? offset ^ (offset / kSwizzledRow % 8 * 16) : offset;
    visit(shared_ + place, inside ? element : nullptr, std::size_t{map.element_bytes});
    for (std::size_t i = 0; i < map.rank && ++index[i] == map.box[i]; ++i) index[i] = 0;
  }
}

void TmaCopy::poison() const { std::memset(shared_, 0xFF, static_cast<std::size_t>(bytes())); }

void TmaCopy::load() const {
  for_each([](unsigned char* shared, const unsigned char* element, std::size_t size) {
    if (element != nullptr)
      std::memcpy(shared, element, size);
    else
      std::memset(shared, 0, size);
  });
}

void TmaCopy::store() const {
  for_each([](const unsigned char* shared, unsigned char* element, std::size_t size) {
    if (element != nullptr) std::memcpy(element, shared, size);
  });
}

}  // namespace wyvern::emulator
