// One Hopper GPU for the microbenchmarks: launches that no operator makes, over the runtime's
// driver table and the compiler's NVRTC. Used by one thread. Every failure throws wyvern::Error:
// kUnavailable for a missing driver, NVRTC or GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/devices/cuda/cuda_driver.hpp"

namespace wyvern::hopper {

/// CUDA C++ for one module; source_of() of device_code.hpp completes it.
struct Program {
  std::string label;
  std::string source;
};

/// The program's cubin for sm_90a; needs no GPU. Throws Error(kCompile) for a program that does not
/// compile, spills or has a wgmma that ptxas serializes: it would measure something else.
std::string compile(const Program& program);

/// "NVRTC 13.0"
std::string nvrtc_version();

using cuda::DevicePointer;
using cuda::TensorMap;

/// A tensor of bf16 [tokens, heads, 128] seen as {64, tokens, 2, heads}, loaded in boxes
/// {64, rows, halves, 1} with 128-byte swizzle.
struct TensorView {
  DevicePointer address = 0;
  std::uint64_t tokens = 0;
  std::uint64_t heads = 0;
  std::uint32_t rows = 0;
  std::uint32_t halves = 2;
};

/// Device memory, freed with this object.
class Memory {
 public:
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  DevicePointer address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  void write(const void* from, std::size_t bytes) const;
  void read(void* to, std::size_t bytes) const;

 private:
  std::size_t bytes_;
  DevicePointer address_ = 0;
};

template <class T>
std::unique_ptr<Memory> upload(const std::vector<T>& values) {
  auto memory = std::make_unique<Memory>(values.size() * sizeof(T));
  memory->write(values.data(), values.size() * sizeof(T));
  return memory;
}

template <class T>
std::vector<T> download(const Memory& memory, std::size_t count) {
  std::vector<T> values(count);
  memory.read(values.data(), count * sizeof(T));
  return values;
}

/// One kernel of a loaded module; valid for the life of the process.
struct Kernel {
  cuda::Function function = nullptr;
};

struct Shape {
  unsigned grid = 1;
  unsigned threads = 32;
  unsigned shared_bytes = 0;
  bool programmatic = false;  ///< may start before the kernel in front of it has ended
};

/// Loads a program, compiling it on first use.
Kernel kernel(const Program& program, const std::string& name, unsigned shared_bytes = 0);

/// Asynchronous, in the one stream of this process.
void launch_raw(Kernel kernel, const Shape& shape, void** arguments);

template <class... Arguments>
void launch(Kernel kernel, const Shape& shape, Arguments... arguments) {
  std::array<void*, sizeof...(Arguments)> pointers{static_cast<void*>(&arguments)...};
  launch_raw(kernel, shape, pointers.data());
}

void synchronize();

/// Milliseconds on the GPU between two points of the stream.
class Stopwatch {
 public:
  Stopwatch();
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  void start() const;
  double stop_ms() const;  ///< waits

 private:
  cuda::Event start_ = nullptr;
  cuda::Event stop_ = nullptr;
};

/// Captures the launches between its constructor and finish() as a graph, then replays it.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  void finish();
  void replay() const;

 private:
  cuda::Graph graph_ = nullptr;
  cuda::GraphExec executable_ = nullptr;
};

TensorMap tensor_map(const TensorView& view);

struct GpuFacts {
  std::string name;
  std::string driver;  ///< the CUDA version that the driver supports, as "13.0"
  unsigned multiprocessors = 0;
  std::size_t l2_bytes = 0;
};

/// Opens the first GPU, which must have compute capability 9.0.
const GpuFacts& open_gpu();

}  // namespace wyvern::hopper
