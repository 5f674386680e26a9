// The few calls of the CUDA driver that Wyvern makes, declared here and bound at run time, so that
// one binary builds without CUDA headers and runs without a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "templates/device/tensor_map.hpp"

namespace wyvern::cuda {

using Result = int;  // CUresult; 0 is success
using DeviceHandle = int;
using DevicePointer = unsigned long long;
using Context = void*;
using StreamHandle = void*;
using Event = void*;
using Library = void*;
using KernelHandle = void*;
using Function = void*;
using Graph = void*;
using GraphExec = void*;

/// Values of CUdevice_attribute, CUfunction_attribute and others that Wyvern queries.
enum DeviceAttribute : int {
  kClockRateKhz = 13,
  kMultiprocessorCount = 16,
  kMemoryClockKhz = 36,
  kMemoryBusWidthBits = 37,
  kL2CacheBytes = 38,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
  kClusterLaunch = 120,
};
enum FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kMaxDynamicSharedBytes = 8,
};
inline constexpr int kStreamNonBlocking = 1;
inline constexpr int kCaptureModeThreadLocal = 1;

/// CUlaunchAttribute: attributes of a launch beyond grid, block and shared memory.
enum LaunchAttributeId : int {
  kClusterDimension = 4,
  kProgrammaticStreamSerialization = 6,
};
struct LaunchAttribute {
  LaunchAttributeId id;
  int padding;
  union {
    unsigned cluster[3];  ///< of kClusterDimension: blocks along x, y, z
    int allowed;          ///< of kProgrammaticStreamSerialization
    char size[64];
  };
};
static_assert(sizeof(LaunchAttribute) == 72);

/// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

/// CUtensorMap: made by encode_tiled() of tensor_map.hpp.
using wyvern::TensorMap;

/// The bound entry points. Every member is callable once open_driver() succeeded, but for the last
/// four, which are null where the driver lacks them.
struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(DeviceHandle*, int);
  Result (*cuDeviceGetName)(char*, int, DeviceHandle);
  Result (*cuDeviceTotalMem)(std::size_t*, DeviceHandle);
  Result (*cuDeviceGetAttribute)(int*, int, DeviceHandle);
  Result (*cuDevicePrimaryCtxRetain)(Context*, DeviceHandle);
  Result (*cuDevicePrimaryCtxRelease)(DeviceHandle);
  Result (*cuCtxGetCurrent)(Context*);
  Result (*cuCtxSetCurrent)(Context);
  Result (*cuMemAlloc)(DevicePointer*, std::size_t);
  Result (*cuMemFree)(DevicePointer);
  Result (*cuMemcpyHtoD)(DevicePointer, const void*, std::size_t);
  Result (*cuMemcpyDtoH)(void*, DevicePointer, std::size_t);
  Result (*cuMemsetD8Async)(DevicePointer, unsigned char, std::size_t, StreamHandle);
  Result (*cuStreamCreate)(StreamHandle*, unsigned);
  Result (*cuStreamDestroy)(StreamHandle);
  Result (*cuStreamSynchronize)(StreamHandle);
  Result (*cuStreamBeginCapture)(StreamHandle, int);
  Result (*cuStreamEndCapture)(StreamHandle, Graph*);
  Result (*cuGraphInstantiateWithFlags)(GraphExec*, Graph, unsigned long long);
  Result (*cuGraphLaunch)(GraphExec, StreamHandle);
  Result (*cuGraphExecDestroy)(GraphExec);
  Result (*cuGraphDestroy)(Graph);
  Result (*cuEventCreate)(Event*, unsigned);
  Result (*cuEventDestroy)(Event);
  Result (*cuEventRecord)(Event, StreamHandle);
  Result (*cuEventSynchronize)(Event);
  Result (*cuEventElapsedTime)(float*, Event, Event);
  Result (*cuLibraryLoadData)(Library*, const void*, const int*, void**, unsigned, const int*,
                              void**, unsigned);
  Result (*cuLibraryUnload)(Library);
  Result (*cuLibraryGetKernel)(KernelHandle*, Library, const char*);
  Result (*cuKernelGetFunction)(Function*, KernelHandle);
  Result (*cuFuncGetAttribute)(int*, int, Function);
  Result (*cuFuncSetAttribute)(Function, int, int);
  Result (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, StreamHandle, void**, void**);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuLaunchKernelEx)(const LaunchConfig*, Function, void**, void**) = nullptr;
  Result (*cuTensorMapEncodeTiled)(TensorMap*, int type, std::uint32_t rank, void* address,
                                   const std::uint64_t* dims, const std::uint64_t* strides,
                                   const std::uint32_t* box, const std::uint32_t* element_strides,
                                   int interleave, int swizzle, int l2_promotion,
                                   int fill) = nullptr;
  Result (*cuTensorMapReplaceAddress)(TensorMap*, void* address) = nullptr;
  Result (*cuDeviceGetUuid)(std::array<unsigned char, 16>*, DeviceHandle) = nullptr;

  /// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string describe(Result result) const;
};

/// Opens the driver that the loader finds under this name and initializes it; null where there is
/// none, and then `problem` receives what is wrong and how to fix it. The library stays loaded.
std::unique_ptr<Driver> open_driver(const char* library, std::string& problem);

/// The driver of this machine, opened and initialized on first use; null where there is none, and
/// then `problem` (if given) receives what is wrong and how to fix it. Thread-safe.
const Driver* driver(std::string* problem = nullptr);

/// Throws Error(kUnavailable) "<what> failed: <name> (<description>)" unless the result is success.
void check(Result result, const char* what);

}  // namespace wyvern::cuda
