// Threads that run the block functions of CPU kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace wyvern {

/// A fixed set of threads that take part in one parallel loop at a time; the caller is one of them.
/// run() may be called from several threads: a second caller finds the pool busy and runs its loop
/// on its own thread alone, so no caller ever waits for another's work.
class ThreadPool {
 public:
  /// A block of a grid: its linear index and the calling thread's scratch memory.
  using Body = void (*)(const void* context, std::int64_t index, void* scratch);

  explicit ThreadPool(unsigned threads);
  ~ThreadPool();

  unsigned threads() const noexcept;
  /// Calls body(context, i, scratch) once for each i in [0, count), in no particular order, and
  /// returns when all have returned. scratch holds at least `scratch_bytes`, aligned to 64 bytes,
  /// and belongs to the running thread, which allocates it when it first needs that much.
  void run(std::int64_t count, std::size_t scratch_bytes, Body body, const void* context);

  /// The processors this process may run on.
  static unsigned available_threads();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace wyvern
