// A CUDA driver that runs nothing and writes everything down: a libcuda.so.1 for tests of what the
// runtime asks of the driver. It has GPUs of host memory, loads any bytes as a library with any
// entry point, and keeps each launch as it was asked for. A program that links it gets it wherever
// it opens libcuda.so.1, as the loader knows libraries by that name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#define WYVERN_FAKE_CUDA __attribute__((visibility("default")))

namespace wyvern::fake_cuda {

/// One GPU; by default what an H200 says of itself.
struct Gpu {
  std::string name = "NVIDIA H200";
  int major = 9;
  int minor = 0;
  int multiprocessors = 132;
  bool clusters = true;
  std::size_t memory_bytes = std::size_t{140} << 30;
  int shared_bytes_optin = 227 * 1024;
};

struct Launch {
  std::string entry;
  std::array<unsigned, 3> grid{}, block{}, cluster{1, 1, 1};
  unsigned shared_bytes = 0;
  void* stream = nullptr;
  bool programmatic = false;
  bool with_attributes = false;  ///< by cuLaunchKernelEx
  /// The bytes of each parameter, as many and as large as parameter_sizes() was told.
  std::vector<std::vector<unsigned char>> parameters;
};

struct TensorMapCall {
  int type = 0;
  void* address = nullptr;
  std::vector<std::uint64_t> dims, strides;
  std::vector<std::uint32_t> box, element_strides;
  int interleave = 0, swizzle = 0, l2_promotion = 0, fill = 0;
};

/// Forgets everything: one default GPU, nothing lacking, no refusals, no records. Objects that the
/// runtime holds stay valid.
WYVERN_FAKE_CUDA void reset();

/// What the machine has from now on.
WYVERN_FAKE_CUDA void set_gpus(std::vector<Gpu> gpus);
/// The driver has no entry point of this name when it is opened next; "cuGetProcAddress_v2" cannot
/// be taken away.
WYVERN_FAKE_CUDA void lack(const std::string& function);
/// Every call of this function fails with this CUresult from now on; 0 lets it succeed again.
WYVERN_FAKE_CUDA void refuse(const std::string& function, int result);
/// The sizes of a kernel's parameters, for Launch::parameters of the launches that follow.
WYVERN_FAKE_CUDA void parameter_sizes(std::vector<std::size_t> sizes);

/// The functions called since reset() or take_calls(), in order.
WYVERN_FAKE_CUDA std::vector<std::string> take_calls();
WYVERN_FAKE_CUDA std::vector<Launch> launches();
WYVERN_FAKE_CUDA std::vector<TensorMapCall> tensor_maps();
/// What maps of this driver say in a kernel's parameter: the tensor's address, and which of
/// tensor_maps() made the map.
struct TensorMapParameter {
  std::uint64_t address = 0;
  std::size_t made_by = 0;
};
WYVERN_FAKE_CUDA TensorMapParameter as_tensor_map(const std::vector<unsigned char>& parameter);
/// What was allocated, loaded, created or retained and not given back.
WYVERN_FAKE_CUDA int open_objects();

}  // namespace wyvern::fake_cuda
