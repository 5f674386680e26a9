#include "tests/fake_cuda/fake_cuda.hpp"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "runtime/devices/cuda/cuda_driver.hpp"

namespace wyvern::fake_cuda {
namespace {

using cuda::Result;

constexpr Result kInvalidValue = 1;
constexpr Result kInvalidContext = 201;
constexpr Result kNotFound = 500;
constexpr std::uint64_t kTensorMapMark = 0x70616D20726F736EULL;

/// What the loader's handles point at. A library, its kernel and its function are one object.
struct Library {
  std::string entry;
};

struct State {
  std::mutex mutex;
  std::vector<Gpu> gpus{Gpu{}};
  std::set<std::string> lacking;
  std::map<std::string, Result> refusals;
  std::vector<std::size_t> sizes;
  std::vector<std::string> calls;
  std::vector<Launch> launches;
  std::vector<TensorMapCall> maps;
  int objects = 0;
};

State& state() {
  // Never destroyed: a driver answers to the end of the process.
  static State& everything = *new State;
  return everything;
}

thread_local void* current_context = nullptr;

/// Notes a call and answers as refuse() was told; otherwise `act` has the state to itself.
template <class Act>
Result call(const char* name, Act act) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.calls.emplace_back(name);
  const auto refusal = s.refusals.find(name);
  if (refusal != s.refusals.end() && refusal->second != 0) return refusal->second;
  return act(s);
}

Result note(const char* name) {
  return call(name, [](State&) { return 0; });
}

/// Hands out a handle that is not null and is nothing.
Result make(const char* name, void** handle) {
  return call(name, [handle](State& s) {
    *handle = reinterpret_cast<void*>(static_cast<std::uintptr_t>(0x1000 + ++s.objects));
    return 0;
  });
}

Result drop(const char* name) {
  return call(name, [](State& s) {
    --s.objects;
    return 0;
  });
}

Result init(unsigned) { return note("cuInit"); }
Result driver_version(int* version) {
  *version = 13000;
  return note("cuDriverGetVersion");
}
Result device_count(int* count) {
  return call("cuDeviceGetCount", [count](State& s) {
    *count = static_cast<int>(s.gpus.size());
    return 0;
  });
}
Result device_get(cuda::DeviceHandle* device, int ordinal) {
  return call("cuDeviceGet", [=](State& s) {
    *device = ordinal;
    return ordinal < static_cast<int>(s.gpus.size()) ? 0 : kInvalidValue;
  });
}
Result device_name(char* text, int size, cuda::DeviceHandle device) {
  return call("cuDeviceGetName", [=](State& s) {
    std::strncpy(text, s.gpus.at(device).name.c_str(), static_cast<std::size_t>(size - 1));
    return 0;
  });
}
Result device_memory(std::size_t* bytes, cuda::DeviceHandle device) {
  return call("cuDeviceTotalMem", [=](State& s) {
    *bytes = s.gpus.at(device).memory_bytes;
    return 0;
  });
}
/// Sixteen bytes that count up from the device's number.
Result device_uuid(std::array<unsigned char, 16>* uuid, cuda::DeviceHandle device) {
  return call("cuDeviceGetUuid", [=](State&) {
    for (std::size_t i = 0; i < uuid->size(); ++i)
      (*uuid)[i] = static_cast<unsigned char>(static_cast<std::size_t>(device) + i);
    return 0;
  });
}
Result device_attribute(int* value, int which, cuda::DeviceHandle device) {
  return call("cuDeviceGetAttribute", [=](State& s) {
    const Gpu& gpu = s.gpus.at(device);
    switch (which) {
      case cuda::kClockRateKhz: *value = 1980000; break;
      case cuda::kMultiprocessorCount: *value = gpu.multiprocessors; break;
      case cuda::kMemoryClockKhz: *value = 3201000; break;
      case cuda::kMemoryBusWidthBits: *value = 6144; break;
      case cuda::kL2CacheBytes: *value = 1 << 20; break;
      case cuda::kComputeCapabilityMajor: *value = gpu.major; break;
      case cuda::kComputeCapabilityMinor: *value = gpu.minor; break;
      case cuda::kMaxSharedMemoryPerBlockOptin: *value = gpu.shared_bytes_optin; break;
      case cuda::kClusterLaunch: *value = gpu.clusters ? 1 : 0; break;
      default: return kInvalidValue;
    }
    return 0;
  });
}

Result context_retain(cuda::Context* context, cuda::DeviceHandle device) {
  return call("cuDevicePrimaryCtxRetain", [=](State& s) {
    ++s.objects;
    *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(0x100 + device));
    return 0;
  });
}
Result context_release(cuda::DeviceHandle) { return drop("cuDevicePrimaryCtxRelease"); }
Result context_current(cuda::Context* context) {
  *context = current_context;
  return note("cuCtxGetCurrent");
}
Result set_current(cuda::Context context) {
  current_context = context;
  return note("cuCtxSetCurrent");
}

/// Memory of the host, so that a copy can be read back.
Result allocate(cuda::DevicePointer* pointer, std::size_t bytes) {
  return call("cuMemAlloc", [=](State& s) {
    ++s.objects;
    *pointer =
        reinterpret_cast<cuda::DevicePointer>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    return *pointer == 0 ? 2 : 0;
  });
}
Result release(cuda::DevicePointer pointer) {
  std::free(reinterpret_cast<void*>(pointer));
  return drop("cuMemFree");
}
Result copy_in(cuda::DevicePointer to, const void* from, std::size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return note("cuMemcpyHtoD");
}
Result copy_out(void* to, cuda::DevicePointer from, std::size_t bytes) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return note("cuMemcpyDtoH");
}
Result fill(cuda::DevicePointer at, unsigned char byte, std::size_t bytes, cuda::StreamHandle) {
  std::memset(reinterpret_cast<void*>(at), byte, bytes);
  return note("cuMemsetD8Async");
}

Result stream_create(cuda::StreamHandle* stream, unsigned) {
  return make("cuStreamCreate", stream);
}
Result stream_destroy(cuda::StreamHandle) { return drop("cuStreamDestroy"); }
Result stream_synchronize(cuda::StreamHandle) { return note("cuStreamSynchronize"); }
Result begin_capture(cuda::StreamHandle, int) { return note("cuStreamBeginCapture"); }
Result end_capture(cuda::StreamHandle, cuda::Graph* graph) {
  return make("cuStreamEndCapture", graph);
}
Result instantiate(cuda::GraphExec* exec, cuda::Graph, unsigned long long) {
  return make("cuGraphInstantiateWithFlags", exec);
}
Result graph_launch(cuda::GraphExec, cuda::StreamHandle) { return note("cuGraphLaunch"); }
Result exec_destroy(cuda::GraphExec) { return drop("cuGraphExecDestroy"); }
Result graph_destroy(cuda::Graph) { return drop("cuGraphDestroy"); }
Result event_create(cuda::Event* event, unsigned) { return make("cuEventCreate", event); }
Result event_destroy(cuda::Event) { return drop("cuEventDestroy"); }
Result event_record(cuda::Event, cuda::StreamHandle) { return note("cuEventRecord"); }
Result event_synchronize(cuda::Event) { return note("cuEventSynchronize"); }
Result event_elapsed(float* milliseconds, cuda::Event, cuda::Event) {
  *milliseconds = 1.0F;
  return note("cuEventElapsedTime");
}

Result library_load(cuda::Library* library, const void* code, const int*, void**, unsigned,
                    const int*, void**, unsigned) {
  return call("cuLibraryLoadData", [=](State& s) {
    if (code == nullptr || current_context == nullptr) return kInvalidContext;
    ++s.objects;
    *library = new Library;
    return 0;
  });
}
Result library_unload(cuda::Library library) {
  delete static_cast<Library*>(library);
  return drop("cuLibraryUnload");
}
Result library_kernel(cuda::KernelHandle* kernel, cuda::Library library, const char* name) {
  return call("cuLibraryGetKernel", [=](State&) {
    static_cast<Library*>(library)->entry = name;
    *kernel = library;
    return 0;
  });
}
Result kernel_function(cuda::Function* function, cuda::KernelHandle kernel) {
  *function = kernel;
  return note("cuKernelGetFunction");
}
Result function_attribute(int* value, int, cuda::Function) {
  *value = 1024;
  return note("cuFuncGetAttribute");
}
Result set_function_attribute(cuda::Function, int, int) { return note("cuFuncSetAttribute"); }

std::vector<std::vector<unsigned char>> copied(const State& s, void** parameters) {
  std::vector<std::vector<unsigned char>> all;
  for (std::size_t i = 0; i < s.sizes.size(); ++i) {
    const auto* bytes = static_cast<const unsigned char*>(parameters[i]);
    all.emplace_back(bytes, bytes + s.sizes[i]);
  }
  return all;
}

Result launch(cuda::Function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
              unsigned by, unsigned bz, unsigned shared, cuda::StreamHandle stream,
              void** parameters, void**) {
  return call("cuLaunchKernel", [=](State& s) {
    if (current_context == nullptr) return kInvalidContext;
    Launch& one = s.launches.emplace_back();
    one.entry = static_cast<Library*>(function)->entry;
    one.grid = {gx, gy, gz};
    one.block = {bx, by, bz};
    one.shared_bytes = shared;
    one.stream = stream;
    one.parameters = copied(s, parameters);
    return 0;
  });
}

Result launch_ex(const cuda::LaunchConfig* config, cuda::Function function, void** parameters,
                 void**) {
  return call("cuLaunchKernelEx", [=](State& s) {
    if (current_context == nullptr) return kInvalidContext;
    Launch one;
    one.with_attributes = true;
    one.entry = static_cast<Library*>(function)->entry;
    one.grid = std::to_array(config->grid);
    one.block = std::to_array(config->block);
    one.shared_bytes = config->shared_bytes;
    one.stream = config->stream;
    for (unsigned i = 0; i < config->attribute_count; ++i) {
      const cuda::LaunchAttribute& attribute = config->attributes[i];
      if (attribute.id == cuda::kClusterDimension)
        one.cluster = std::to_array(attribute.cluster);
      else if (attribute.id == cuda::kProgrammaticStreamSerialization)
        one.programmatic = attribute.allowed != 0;
      else
        return kInvalidValue;
    }
    for (std::size_t i = 0; i < 3; ++i)
      if (one.grid[i] % one.cluster[i] != 0) return kInvalidValue;
    one.parameters = copied(s, parameters);
    s.launches.push_back(std::move(one));
    return 0;
  });
}

Result encode(cuda::TensorMap* map, int type, std::uint32_t rank, void* address,
              const std::uint64_t* dims, const std::uint64_t* strides, const std::uint32_t* box,
              const std::uint32_t* element_strides, int interleave, int swizzle, int l2, int fill) {
  return call("cuTensorMapEncodeTiled", [=](State& s) {
    if (current_context == nullptr) return kInvalidContext;  // as one H200's driver does
    const bool aligned = reinterpret_cast<std::uintptr_t>(address) % 16 == 0 &&
                         reinterpret_cast<std::uintptr_t>(map) % 64 == 0;
    if (!aligned || address == nullptr || rank < 1 || rank > 5) return kInvalidValue;
    for (std::uint32_t i = 0; i + 1 < rank; ++i)
      if (strides[i] % 16 != 0) return kInvalidValue;
    for (std::uint32_t i = 0; i < rank; ++i)
      if (dims[i] == 0 || box[i] == 0 || box[i] > 256) return kInvalidValue;
    s.maps.push_back({type,
                      address,
                      {dims, dims + rank},
                      {strides, strides + rank - 1},
                      {box, box + rank},
                      {element_strides, element_strides + rank},
                      interleave,
                      swizzle,
                      l2,
                      fill});
    std::memset(map, 0, sizeof *map);
    map->opaque[0] = reinterpret_cast<std::uintptr_t>(address);
    map->opaque[1] = s.maps.size() - 1;
    map->opaque[2] = kTensorMapMark;
    return 0;
  });
}

Result replace_address(cuda::TensorMap* map, void* address) {
  return call("cuTensorMapReplaceAddress", [=](State&) {
    if (current_context == nullptr) return kInvalidContext;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (address == nullptr || at % 16 != 0 || reinterpret_cast<std::uintptr_t>(map) % 64 != 0 ||
        map->opaque[2] != kTensorMapMark)
      return kInvalidValue;
    map->opaque[0] = at;
    return 0;
  });
}

Result error_name(Result result, const char** text) {
  *text = result == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_FAKE";
  return 0;
}
Result error_string(Result result, const char** text) {
  *text = result == kInvalidValue ? "invalid argument" : "as the test asked for";
  return 0;
}

template <class Function>
void* erased(Function* function) {
  return reinterpret_cast<void*>(function);
}

const std::map<std::string, void*>& entry_points() {
  static const std::map<std::string, void*> all{
      {"cuInit", erased(&init)},
      {"cuDriverGetVersion", erased(&driver_version)},
      {"cuDeviceGetCount", erased(&device_count)},
      {"cuDeviceGet", erased(&device_get)},
      {"cuDeviceGetName", erased(&device_name)},
      {"cuDeviceTotalMem", erased(&device_memory)},
      {"cuDeviceGetAttribute", erased(&device_attribute)},
      {"cuDeviceGetUuid", erased(&device_uuid)},
      {"cuDevicePrimaryCtxRetain", erased(&context_retain)},
      {"cuDevicePrimaryCtxRelease", erased(&context_release)},
      {"cuCtxGetCurrent", erased(&context_current)},
      {"cuCtxSetCurrent", erased(&set_current)},
      {"cuMemAlloc", erased(&allocate)},
      {"cuMemFree", erased(&release)},
      {"cuMemcpyHtoD", erased(&copy_in)},
      {"cuMemcpyDtoH", erased(&copy_out)},
      {"cuMemsetD8Async", erased(&fill)},
      {"cuStreamCreate", erased(&stream_create)},
      {"cuStreamDestroy", erased(&stream_destroy)},
      {"cuStreamSynchronize", erased(&stream_synchronize)},
      {"cuStreamBeginCapture", erased(&begin_capture)},
      {"cuStreamEndCapture", erased(&end_capture)},
      {"cuGraphInstantiateWithFlags", erased(&instantiate)},
      {"cuGraphLaunch", erased(&graph_launch)},
      {"cuGraphExecDestroy", erased(&exec_destroy)},
      {"cuGraphDestroy", erased(&graph_destroy)},
      {"cuEventCreate", erased(&event_create)},
      {"cuEventDestroy", erased(&event_destroy)},
      {"cuEventRecord", erased(&event_record)},
      {"cuEventSynchronize", erased(&event_synchronize)},
      {"cuEventElapsedTime", erased(&event_elapsed)},
      {"cuLibraryLoadData", erased(&library_load)},
      {"cuLibraryUnload", erased(&library_unload)},
      {"cuLibraryGetKernel", erased(&library_kernel)},
      {"cuKernelGetFunction", erased(&kernel_function)},
      {"cuFuncGetAttribute", erased(&function_attribute)},
      {"cuFuncSetAttribute", erased(&set_function_attribute)},
      {"cuLaunchKernel", erased(&launch)},
      {"cuLaunchKernelEx", erased(&launch_ex)},
      {"cuTensorMapEncodeTiled", erased(&encode)},
      {"cuTensorMapReplaceAddress", erased(&replace_address)},
      {"cuGetErrorName", erased(&error_name)},
      {"cuGetErrorString", erased(&error_string)},
  };
  return all;
}

}  // namespace

void reset() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.gpus = {Gpu{}};
  s.lacking.clear();
  s.refusals.clear();
  s.sizes.clear();
  s.calls.clear();
  s.launches.clear();
  s.maps.clear();
}

void set_gpus(std::vector<Gpu> gpus) {
  const std::lock_guard lock(state().mutex);
  state().gpus = std::move(gpus);
}

void lack(const std::string& function) {
  const std::lock_guard lock(state().mutex);
  state().lacking.insert(function);
}

void refuse(const std::string& function, int result) {
  const std::lock_guard lock(state().mutex);
  state().refusals[function] = result;
}

void parameter_sizes(std::vector<std::size_t> sizes) {
  const std::lock_guard lock(state().mutex);
  state().sizes = std::move(sizes);
}

std::vector<std::string> take_calls() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().calls, {});
}

std::vector<Launch> launches() {
  const std::lock_guard lock(state().mutex);
  return state().launches;
}

std::vector<TensorMapCall> tensor_maps() {
  const std::lock_guard lock(state().mutex);
  return state().maps;
}

TensorMapParameter as_tensor_map(const std::vector<unsigned char>& parameter) {
  cuda::TensorMap map{};
  std::memcpy(&map, parameter.data(), sizeof map);
  return {map.opaque[0], static_cast<std::size_t>(map.opaque[1])};
}

int open_objects() {
  const std::lock_guard lock(state().mutex);
  return state().objects;
}

}  // namespace wyvern::fake_cuda

extern "C" WYVERN_FAKE_CUDA int cuGetProcAddress_v2(const char* name, void** address, int,
                                                    std::uint64_t, int*) {
  namespace fake = wyvern::fake_cuda;
  const std::lock_guard lock(fake::state().mutex);
  const auto found = fake::entry_points().find(name);
  const bool there = found != fake::entry_points().end() && !fake::state().lacking.contains(name);
  *address = there ? found->second : nullptr;
  return there ? 0 : fake::kNotFound;
}
