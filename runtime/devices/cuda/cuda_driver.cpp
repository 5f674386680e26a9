#include "runtime/devices/cuda/cuda_driver.hpp"

#include <wyvern/error.hpp>

#include <dlfcn.h>
#include <fmt/format.h>

#include <memory>

namespace wyvern::cuda {
namespace {

// cuGetProcAddress_v2 returns the newest variant of an entry point that the version asked for has.
using GetProcAddress = Result (*)(const char*, void**, int, std::uint64_t, int*);
constexpr int kApiVersion = 12000;

template <class F>
bool resolve(GetProcAddress get, const char* name, F& function) {
  void* address = nullptr;
  int status = 0;
  if (get(name, &address, kApiVersion, 0, &status) != 0 || address == nullptr) return false;
  function = reinterpret_cast<F>(address);
  return true;
}

/// The name of the first entry point that is missing, or null.
const char* bind_all(GetProcAddress get, Driver& d) {
#define WYVERN_BIND(name) \
  if (!resolve(get, #name, d.name)) return #name
  WYVERN_BIND(cuInit);
  WYVERN_BIND(cuDriverGetVersion);
  WYVERN_BIND(cuDeviceGetCount);
  WYVERN_BIND(cuDeviceGet);
  WYVERN_BIND(cuDeviceGetName);
  WYVERN_BIND(cuDeviceTotalMem);
  WYVERN_BIND(cuDeviceGetAttribute);
  WYVERN_BIND(cuDevicePrimaryCtxRetain);
  WYVERN_BIND(cuDevicePrimaryCtxRelease);
  WYVERN_BIND(cuCtxGetCurrent);
  WYVERN_BIND(cuCtxSetCurrent);
  WYVERN_BIND(cuMemAlloc);
  WYVERN_BIND(cuMemFree);
  WYVERN_BIND(cuMemcpyHtoD);
  WYVERN_BIND(cuMemcpyDtoH);
  WYVERN_BIND(cuMemsetD8Async);
  WYVERN_BIND(cuStreamCreate);
  WYVERN_BIND(cuStreamDestroy);
  WYVERN_BIND(cuStreamSynchronize);
  WYVERN_BIND(cuStreamBeginCapture);
  WYVERN_BIND(cuStreamEndCapture);
  WYVERN_BIND(cuGraphInstantiateWithFlags);
  WYVERN_BIND(cuGraphLaunch);
  WYVERN_BIND(cuGraphExecDestroy);
  WYVERN_BIND(cuGraphDestroy);
  WYVERN_BIND(cuEventCreate);
  WYVERN_BIND(cuEventDestroy);
  WYVERN_BIND(cuEventRecord);
  WYVERN_BIND(cuEventSynchronize);
  WYVERN_BIND(cuEventElapsedTime);
  WYVERN_BIND(cuLibraryLoadData);
  WYVERN_BIND(cuLibraryUnload);
  WYVERN_BIND(cuLibraryGetKernel);
  WYVERN_BIND(cuKernelGetFunction);
  WYVERN_BIND(cuFuncGetAttribute);
  WYVERN_BIND(cuFuncSetAttribute);
  WYVERN_BIND(cuLaunchKernel);
  WYVERN_BIND(cuGetErrorName);
  WYVERN_BIND(cuGetErrorString);
#undef WYVERN_BIND
  // Without these only the templates that need them are excluded, and rows do not say which GPU it
  // was.
  resolve(get, "cuLaunchKernelEx", d.cuLaunchKernelEx);
  resolve(get, "cuTensorMapEncodeTiled", d.cuTensorMapEncodeTiled);
  resolve(get, "cuTensorMapReplaceAddress", d.cuTensorMapReplaceAddress);
  resolve(get, "cuDeviceGetUuid", d.cuDeviceGetUuid);
  return nullptr;
}

}  // namespace

std::unique_ptr<Driver> open_driver(const char* name, std::string& problem) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    problem = fmt::format(
        "{}, the NVIDIA driver, is not on this machine; install the driver for a GPU, or use "
        "--device cpu",
        name);
    return {};
  }
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    problem = "the NVIDIA driver is older than CUDA 12.0; update it";
    return {};
  }
  auto driver = std::make_unique<Driver>();
  if (const char* missing = bind_all(get, *driver)) {
    problem = fmt::format("the NVIDIA driver has no {}; update it to CUDA 12.0 or newer", missing);
    return {};
  }
  if (const Result result = driver->cuInit(0); result != 0) {
    problem = fmt::format("the NVIDIA driver does not start: {}; check that nvidia-smi lists a GPU",
                          driver->describe(result));
    return {};
  }
  return driver;
}

std::string Driver::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != 0 || cuGetErrorString(result, &text) != 0)
    return fmt::format("CUDA error {}", result);
  return fmt::format("{} ({})", name, text);
}

const Driver* driver(std::string* problem) {
  struct Opened {
    std::string problem;
    std::unique_ptr<Driver> driver = open_driver("libcuda.so.1", problem);
  };
  // Never freed: an operator or a runtime in a static object, such as a Python extension's, frees
  // its kernels and memory when the process ends, after later objects have been destroyed.
  static const Opened* const opened = new Opened;
  if (problem != nullptr) *problem = opened->problem;
  return opened->driver.get();
}

void check(Result result, const char* what) {
  if (result == 0) return;
  throw Error(ErrorKind::kUnavailable,
              fmt::format("{} failed: {}", what, driver()->describe(result)));
}

}  // namespace wyvern::cuda
