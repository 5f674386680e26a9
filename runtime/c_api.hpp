// Shared by the two halves of the C API: handles, errors as codes, structs of other versions.
#pragma once

#include <wyvern/wyvern.h>
#include <wyvern/device.hpp>
#include <wyvern/error.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <string_view>

#include "runtime/tuning_policy.hpp"

struct wyvern_device {
  wyvern::Device device;
};

struct wyvern_problem {
  wyvern::Problem problem;
};

struct wyvern_runtime {
  wyvern_runtime(wyvern::RuntimeOptions options, const std::string& command,
                 std::function<void(const std::string&)> failed);

  wyvern::Runtime runtime;
  wyvern::PolicyRuntime policies;
};

namespace wyvern {

/// Keeps the message for wyvern_last_error() and returns the status.
wyvern_status failed(wyvern_status status, const char* message) noexcept;
wyvern_status status_of(ErrorKind kind) noexcept;

/// Runs the body of a function of the C API and turns an exception into a status and a message.
template <class Body>
wyvern_status guarded(const Body& body) noexcept {
  try {
    body();
    return WYVERN_OK;
  } catch (const Error& error) {
    return failed(status_of(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(WYVERN_OUT_OF_MEMORY, "the host's memory is full");
  } catch (const std::exception& error) {
    return failed(WYVERN_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(WYVERN_INTERNAL_ERROR, "something unknown was thrown");
  }
}

[[noreturn]] inline void bad_input(const std::string& message) {
  throw Error(ErrorKind::kBadInput, message);
}

/// The object behind a pointer that must not be null.
template <class T>
T& given(T* pointer, std::string_view name) {
  if (pointer == nullptr) bad_input(fmt::format("{} is null; it must not be", name));
  return *pointer;
}

/// The size of a struct in the first version, all of whose members every caller has: the end of
/// that version's last member.
template <class T>
inline constexpr std::size_t kFirstSize = 0;
template <>
inline constexpr std::size_t kFirstSize<wyvern_device_info> =
    offsetof(wyvern_device_info, peak_bytes_per_s) + sizeof(double);
template <>
inline constexpr std::size_t kFirstSize<wyvern_field_info> =
    offsetof(wyvern_field_info, may_be_unset) + sizeof(std::int32_t);
template <>
inline constexpr std::size_t kFirstSize<wyvern_tensor_spec> =
    offsetof(wyvern_tensor_spec, bytes) + sizeof(std::size_t);
template <>
inline constexpr std::size_t kFirstSize<wyvern_runtime_options> =
    offsetof(wyvern_runtime_options, user) + sizeof(void*);
template <>
inline constexpr std::size_t kFirstSize<wyvern_prepare_options> =
    offsetof(wyvern_prepare_options, plan) + sizeof(const char*);
template <>
inline constexpr std::size_t kFirstSize<wyvern_tensor> =
    offsetof(wyvern_tensor, rank) + sizeof(std::int32_t);
template <>
inline constexpr std::size_t kFirstSize<wyvern_launch> =
    offsetof(wyvern_launch, cu_seqlens_host_count) + sizeof(std::size_t);

/// No version of a struct is larger: a size that was never set is mostly beyond it.
inline constexpr std::size_t kLargestStruct = 4096;

/// Throws Error(kBadInput) for a size that no version of T has.
template <class T>
void check_size(std::string_view name, std::size_t size) {
  // A hole would hold whatever the caller's memory held, where a later member may be.
  static_assert(kFirstSize<T> % alignof(T) == 0 && sizeof(T) % alignof(T) == 0);
  if (size < kFirstSize<T> || size > kLargestStruct)
    bad_input(fmt::format("{} is {}; it must be the size of the struct, between {} and {}", name,
                          size, kFirstSize<T>, kLargestStruct));
}

/// The caller's struct of `size` bytes as this library's.
template <class T>
T read_struct(const void* from, std::size_t size, std::string_view name) {
  const auto* const bytes = static_cast<const unsigned char*>(from);
  if (size > sizeof(T) &&
      std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char byte) { return byte != 0; }))
    bad_input(fmt::format("{} sets members that this library, version {} of the API, does not have",
                          name, WYVERN_API_VERSION));
  T own{};
  std::memcpy(&own, bytes, std::min(size, sizeof(T)));
  return own;
}

/// A struct that says its own size; all zeros for a null pointer, where that is legal.
template <class T>
T read_options(const T* from, std::string_view name) {
  if (from == nullptr) return T{};
  check_size<T>(fmt::format("{}.struct_size", name), from->struct_size);
  return read_struct<T>(from, from->struct_size, name);
}

/// Fills the caller's struct of `size` bytes.
template <class T>
void write_struct(const T& own, void* to, std::size_t size) {
  const std::size_t known = std::min(size, sizeof(T));
  std::memcpy(to, &own, known);
  std::memset(static_cast<unsigned char*>(to) + known, 0, size - known);
}

/// Fills a struct that says its own size, which stays.
template <class T>
void write_info(T own, T* to, std::string_view name) {
  const std::size_t size = given(to, name).struct_size;
  check_size<T>(fmt::format("{}.struct_size", name), size);
  own.struct_size = size;
  write_struct(own, to, size);
}

/// Fills a caller's buffer with a text and its NUL, as much as fits.
void write_text(std::string_view text, char* to, std::size_t capacity, std::size_t* length);

/// Fills a caller's array, see wyvern_problem_tensors().
void write_specs(std::span<const TensorSpec> from, wyvern_tensor_spec* specs, std::size_t spec_size,
                 std::size_t capacity, std::size_t* count);

/// Calls visit(tensor) with each of the caller's tensors.
template <class Visitor>
void each_tensor(const wyvern_launch& launch, const Visitor& visit) {
  check_size<wyvern_tensor>("launch.tensor_size", launch.tensor_size);
  if (launch.tensors == nullptr && launch.tensor_count != 0)
    bad_input(
        fmt::format("launch.tensors is null; it must point to {} tensors", launch.tensor_count));
  const auto* at = reinterpret_cast<const unsigned char*>(launch.tensors);
  for (std::size_t i = 0; i < launch.tensor_count; ++i, at += launch.tensor_size)
    visit(read_struct<wyvern_tensor>(at, launch.tensor_size, "launch.tensors"));
}
/// The caller's tensor of `size` bytes, on its own.
inline wyvern_tensor one_tensor(const wyvern_tensor* tensor, std::size_t size) {
  check_size<wyvern_tensor>("tensor_size", size);
  return read_struct<wyvern_tensor>(&given(tensor, "tensor"), size, "tensor");
}
/// Fills in a tensor of a launch as the runtime has them; leaves it absent where nothing is said of
/// it but its name.
void read_tensor(const wyvern_tensor& from, TensorView& to);

}  // namespace wyvern
