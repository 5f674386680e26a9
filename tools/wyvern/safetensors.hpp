// Tensors on the host, and reading and writing them as safetensors files.
//
// The format: eight bytes, little-endian, the header's length; the header, a JSON object from a
// tensor's name to its dtype, shape and byte range; then the bytes of all tensors without holes.
#pragma once

#include <wyvern/tensor.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern::cli {

/// An owned, contiguous tensor in host memory, aligned to 64 bytes. Copies share the memory.
struct HostTensor {
  DType dtype = DType::fp32;
  std::vector<std::int64_t> shape;
  std::shared_ptr<void> data;  ///< never null, even when the tensor is empty

  /// Uninitialized. Throws Error(kBadInput) when its size does not fit in memory.
  static HostTensor make(DType dtype, std::vector<std::int64_t> shape);

  std::int64_t elements() const noexcept;
  std::size_t bytes() const noexcept {
    return static_cast<std::size_t>(elements()) * size_of(dtype);
  }
  /// Of at most kMaxRank dimensions.
  TensorView view() const;
};

/// Writes one element of a floating tensor, rounded to its dtype.
void store(HostTensor& tensor, std::int64_t index, double value);

using Tensors = std::map<std::string, HostTensor>;

/// "[1,2048,16,128]".
std::string shape_text(const std::vector<std::int64_t>& shape);

/// Throws Error(kIo) when the file cannot be read and Error(kBadInput) when it is not a well-formed
/// safetensors file; never trusts a number in it. Tensors of other dtypes than ours are an error
/// where `is_used` of their names, else left out.
Tensors read_safetensors(
    const std::filesystem::path& file,
    const std::function<bool(std::string_view)>& is_used = [](std::string_view) { return true; });

/// Replaces the file as write_file() does. Throws Error(kIo).
void write_safetensors(const std::filesystem::path& file, const Tensors& tensors);

}  // namespace wyvern::cli
