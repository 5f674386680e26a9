// The part of PyTorch's stable C interface (2.10 and later) that the extension uses, found in the
// libtorch of the process: neither its headers are needed to build nor its libraries to link.
// tests/test_extension.py compares these declarations with the headers of the torch that is there.
#pragma once

#include <cstddef>
#include <cstdint>

// The names that PyTorch has for them, so that a compiler can compare the declarations.
using AOTITorchError = std::int32_t;  // 0: done
using StableIValue = std::uint64_t;
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;

// X(result, name, parameters)
#define WYVERN_TORCH_FUNCTIONS(X)                                                            \
  X(std::uint64_t, aoti_torch_abi_version, ())                                               \
  X(std::int32_t, aoti_torch_device_type_cpu, ())                                            \
  X(std::int32_t, aoti_torch_device_type_cuda, ())                                           \
  X(std::int32_t, aoti_torch_dtype_float32, ())                                              \
  X(std::int32_t, aoti_torch_dtype_float16, ())                                              \
  X(std::int32_t, aoti_torch_dtype_bfloat16, ())                                             \
  X(std::int32_t, aoti_torch_dtype_int32, ())                                                \
  X(std::int32_t, aoti_torch_dtype_int64, ())                                                \
  X(std::int32_t, aoti_torch_dtype_uint8, ())                                                \
  X(std::int32_t, aoti_torch_dtype_int8, ())                                                 \
  X(std::int32_t, aoti_torch_dtype_int16, ())                                                \
  X(std::int32_t, aoti_torch_dtype_float64, ())                                              \
  X(std::int32_t, aoti_torch_dtype_complex64, ())                                            \
  X(std::int32_t, aoti_torch_dtype_complex128, ())                                           \
  X(std::int32_t, aoti_torch_dtype_bool, ())                                                 \
  X(std::int32_t, aoti_torch_dtype_float8_e4m3fn, ())                                        \
  X(std::int32_t, aoti_torch_dtype_float8_e5m2, ())                                          \
  X(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle))                     \
  X(AOTITorchError, aoti_torch_get_data_ptr, (AtenTensorHandle, void**))                     \
  X(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle, std::int64_t*))                   \
  X(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle, std::int64_t**))                \
  X(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle, std::int64_t**))              \
  X(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle, std::int32_t*))                 \
  X(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle, std::int32_t*))           \
  X(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle, std::int32_t*))          \
  X(AOTITorchError, aoti_torch_is_contiguous, (AtenTensorHandle, bool*))                     \
  X(AOTITorchError, aoti_torch_empty_strided,                                                \
    (std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t, std::int32_t,     \
     std::int32_t, AtenTensorHandle*))                                                       \
  X(AOTITorchError, aoti_torch_copy_, (AtenTensorHandle, AtenTensorHandle, std::int32_t))    \
  X(AOTITorchError, aoti_torch_library_init_def,                                             \
    (const char*, const char*, std::uint32_t, TorchLibraryHandle*))                          \
  X(AOTITorchError, aoti_torch_library_init_impl,                                            \
    (const char*, const char*, const char*, std::uint32_t, TorchLibraryHandle*))             \
  X(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle, const char*))               \
  X(AOTITorchError, torch_library_impl,                                                      \
    (TorchLibraryHandle, const char*, void (*)(StableIValue*, std::uint64_t, std::uint64_t), \
     std::uint64_t))                                                                         \
  X(AOTITorchError, torch_new_list_reserve_size, (std::size_t, StableListHandle*))           \
  X(AOTITorchError, torch_list_size, (StableListHandle, std::size_t*))                       \
  X(AOTITorchError, torch_list_get_item, (StableListHandle, std::size_t, StableIValue*))     \
  X(AOTITorchError, torch_list_push_back, (StableListHandle, StableIValue))                  \
  X(AOTITorchError, torch_delete_list, (StableListHandle))                                   \
  X(AOTITorchError, torch_string_length, (StringHandle, std::size_t*))                       \
  X(AOTITorchError, torch_string_c_str, (StringHandle, const char**))                        \
  X(AOTITorchError, torch_delete_string, (StringHandle))

// The same, of a build of PyTorch for CUDA.
#define WYVERN_TORCH_CUDA_FUNCTIONS(X) \
  X(AOTITorchError, aoti_torch_get_current_cuda_stream, (std::int32_t, void**))

namespace wyvern::extension {

/// PyTorch's functions by their names. Thread-safe once loaded.
struct Torch {
// NOLINTNEXTLINE(bugprone-macro-parentheses): types and declarators take none
#define WYVERN_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  WYVERN_TORCH_FUNCTIONS(WYVERN_MEMBER)
  WYVERN_TORCH_CUDA_FUNCTIONS(WYVERN_MEMBER)
#undef WYVERN_MEMBER
};

/// Version 2.10 as aoti_torch_abi_version() writes it: how values are passed here.
inline constexpr std::uint64_t kTorchVersion = (std::uint64_t{2} << 56) | (std::uint64_t{10} << 48);

/// The functions of the libtorch that this process has loaded. Throws std::runtime_error where
/// there is none or it is older than 2.10; then the next call tries again.
const Torch& torch();

}  // namespace wyvern::extension
