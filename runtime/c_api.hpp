// Shared by the C API's sources: handles, errors as status codes, structs of other versions.
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

/// Stores the message for wyvern_last_error() and returns the status.
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

/// The object of a pointer; throws Error(kBadInput) for null.
template <class T>
T& given(T* pointer, std::string_view name) {
  if (pointer == nullptr) bad_input(fmt::format("{} is null; it must not be", name));
  return *pointer;
}

/// The size of a struct in API version 1, which every caller's struct has at least: the end of that
/// version's last member.
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
inline constexpr std::size_t kFirstSize<wyvern_fold_options> =
    offsetof(wyvern_fold_options, transition) + sizeof(std::int64_t);
template <>
inline constexpr std::size_t kFirstSize<wyvern_tensor> =
    offsetof(wyvern_tensor, rank) + sizeof(std::int32_t);
template <>
inline constexpr std::size_t kFirstSize<wyvern_launch> =
    offsetof(wyvern_launch, cu_seqlens_host_count) + sizeof(std::size_t);

/// An upper limit of every struct's size; an uninitialized size is mostly above it.
inline constexpr std::size_t kLargestStruct = 4096;

/// Throws Error(kBadInput) for a size that no version of T has.
template <class T>
void check_size(std::string_view name, std::size_t size) {
  // Padding at the end would be uninitialized where a later version has a member.
  static_assert(kFirstSize<T> % alignof(T) == 0 && sizeof(T) % alignof(T) == 0);
  if (size < kFirstSize<T> || size > kLargestStruct)
    bad_input(fmt::format("{} is {}; it must be the size of the struct, between {} and {}", name,
                          size, kFirstSize<T>, kLargestStruct));
}

/// Converts the caller's struct of `size` bytes to this library's T.
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

/// Reads a struct that has a struct_size; all zeros for a null pointer.
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

/// Fills a struct that has a struct_size, and keeps that size.
template <class T>
void write_info(T own, T* to, std::string_view name) {
  const std::size_t size = given(to, name).struct_size;
  check_size<T>(fmt::format("{}.struct_size", name), size);
  own.struct_size = size;
  write_struct(own, to, size);
}

/// Writes a text and its NUL to the caller's buffer, truncated to its capacity.
void write_text(std::string_view text, char* to, std::size_t capacity, std::size_t* length);

/// Fills the caller's array as wyvern_problem_tensors() says.
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
/// Reads a single tensor of the caller, of `size` bytes.
inline wyvern_tensor one_tensor(const wyvern_tensor* tensor, std::size_t size) {
  check_size<wyvern_tensor>("tensor_size", size);
  return read_struct<wyvern_tensor>(&given(tensor, "tensor"), size, "tensor");
}
/// Converts a caller's tensor to a TensorView; leaves it absent where the caller set only its name.
void read_tensor(const wyvern_tensor& from, TensorView& to);

}  // namespace wyvern
