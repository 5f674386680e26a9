// One Hopper GPU for the microbenchmarks: the CUDA driver and NVRTC, both opened at run time. It
// stands apart from the runtime, because measuring the chip needs launches that no operator makes.
// Used by one thread. Every failure throws std::runtime_error with a sentence.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace wyvern::hopper {

/// CUDA C++ for one module; the code of device_code.hpp is put before it.
struct Program {
  std::string label;
  std::string source;
};

/// What NVRTC made of a program for sm_90a.
struct Compiled {
  std::string cubin;
  std::string log;                    ///< what the front end and ptxas -v printed
  std::vector<std::string> problems;  ///< lines of the log that mean slow or serialized code
};

/// Compiles for sm_90a; needs no GPU.
Compiled compile(const Program& program);

/// "13.0"
std::string nvrtc_version();

using DevicePointer = unsigned long long;

/// A CUtensorMap: passed to kernels by value.
struct alignas(64) TensorMap {
  std::array<std::uint64_t, 16> words;
};

/// A tensor of bf16 [tokens, heads, 128] seen as {64, tokens, 2, heads}, brought in boxes
/// {64, rows, halves, 1} with 128-byte swizzle.
struct TensorView {
  DevicePointer address = 0;
  std::uint64_t tokens = 0;
  std::uint64_t heads = 0;
  std::uint32_t rows = 0;
  std::uint32_t halves = 2;
};

/// Device memory that goes with its owner.
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
  void* function = nullptr;
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
  void* start_ = nullptr;
  void* stop_ = nullptr;
};

/// Records what is launched between its making and finish(), then replays it.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  void finish();
  void replay() const;

 private:
  void* graph_ = nullptr;
  void* executable_ = nullptr;
};

TensorMap tensor_map(const TensorView& view);

struct GpuFacts {
  std::string name;
  std::string driver;  ///< the CUDA version that the driver supports, as "13.0"
  unsigned multiprocessors = 0;
  std::size_t l2_bytes = 0;
};

/// Opens the first GPU; throws a sentence that says what is missing where there is none of compute
/// capability 9.0.
const GpuFacts& open_gpu();

}  // namespace wyvern::hopper
