#include "runtime/devices/cuda/nvml.hpp"

#include <dlfcn.h>

#include <fstream>

namespace wyvern::cuda {
namespace {

using Handle = void*;  // nvmlDevice_t
using Result = int;    // nvmlReturn_t; 0 is success
enum Clock : int { kMultiprocessors = 1, kMemory = 2 };

/// The calls of the library that are made here; all null where it is missing or does not start.
struct Nvml {
  Result (*handle_by_uuid)(const char*, Handle*) = nullptr;
  Result (*clock)(Handle, int clock, unsigned* mhz) = nullptr;
  Result (*power_limit)(Handle, unsigned* milliwatts) = nullptr;
};

template <class F>
bool bind(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

Nvml open() {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  Result (*init)() = nullptr;
  Nvml nvml;
  const bool usable = library != nullptr && bind(library, "nvmlInit_v2", init) &&
                      bind(library, "nvmlDeviceGetHandleByUUID", nvml.handle_by_uuid) &&
                      bind(library, "nvmlDeviceGetClockInfo", nvml.clock) &&
                      bind(library, "nvmlDeviceGetEnforcedPowerLimit", nvml.power_limit) &&
                      init() == 0;
  return usable ? nvml : Nvml();
}

}  // namespace

DeviceState gpu_state(const std::string& uuid) {
  static const Nvml nvml = open();
  DeviceState state;
  state.unit = uuid;
  Handle handle = nullptr;
  if (nvml.handle_by_uuid == nullptr || nvml.handle_by_uuid(uuid.c_str(), &handle) != 0)
    return state;
  unsigned figure = 0;
  if (nvml.clock(handle, kMultiprocessors, &figure) == 0) state.clock_mhz = figure;
  if (nvml.clock(handle, kMemory, &figure) == 0) state.memory_clock_mhz = figure;
  if (nvml.power_limit(handle, &figure) == 0) state.power_limit_w = figure / 1e3;
  return state;
}

std::string driver_version() {
  std::string version;
  std::ifstream("/sys/module/nvidia/version") >> version;
  return version;
}

}  // namespace wyvern::cuda
