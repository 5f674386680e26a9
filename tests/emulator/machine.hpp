// What emulated kernels and their host share: the operations of a GPU that are not plain C++.
// Plain data and functions only, as the two are compiled apart. Included by the host and, through
// the emulator's ptx.cuh, by every emulated kernel.
#pragma once

namespace wyvern::emulator {

/// Operations that the 32 lanes of a warp carry out together.
enum class Collective {
  sync_warp,
  shuffle,
  transpose_8x8,
  load_matrix_x4,
  load_matrix_x4_transposed,
  mma_bf16,
  mma_fp16,
  mma_tf32,
};

/// What a lane brings to a collective operation and where it wants the result.
struct LaneOperands {
  const void* row = nullptr;  ///< load_matrix: address of this lane's row
  unsigned a[4] = {};         ///< mma: left fragment; shuffle, transpose: a[0] is the value
  unsigned b[2] = {};         ///< mma: right fragment; shuffle: b[0] is the source lane
  float* d = nullptr;         ///< mma: the accumulator fragment
  unsigned* r = nullptr;      ///< other results
};

/// The processor, as a kernel sees it. The host keeps `thread` that of the running fiber.
struct Machine {
  int thread = 0;
  long block = 0;
  unsigned char* shared = nullptr;
  long shared_bytes = 0;
  void (*sync_block)() = nullptr;
  void (*collective)(Collective, LaneOperands&) = nullptr;
  void (*copy_async)(void* destination, const void* source, int bytes, bool valid) = nullptr;
  void (*copy_async_commit)() = nullptr;
  void (*copy_async_wait)(int pending) = nullptr;
};

}  // namespace wyvern::emulator
