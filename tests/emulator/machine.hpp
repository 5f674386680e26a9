// What emulated kernels and their host share: the operations of a GPU that are not plain C++. Plain
// data and functions only, as the two are compiled separately. Included by the host and, through
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
  store_matrix_x4,
  store_matrix_x4_transposed,
  mma_bf16,
  mma_fp16,
  mma_tf32,
  wgmma_fence,
  wgmma,
  wgmma_commit,
  wgmma_wait,
  set_registers,
};

/// One product of a warpgroup, 64 x 16 times 16 x n, as a lane asks for it.
struct WarpgroupProduct {
  int n = 0;
  bool fp16 = false;                    ///< of bf16 operands otherwise
  const unsigned* a = nullptr;          ///< the lane's A fragment; null: in shared memory
  unsigned long long a_descriptor = 0;  ///< where A is then
  unsigned long long b_descriptor = 0;
  bool a_mn_major = false;
  bool b_mn_major = false;
  bool accumulate = false;
  float* d = nullptr;  ///< the lane's n / 2 accumulators
};

/// A lane's operands of a collective operation and the place of its result.
struct LaneOperands {
  const void* row = nullptr;  ///< load_matrix: address of this lane's row
  void* to = nullptr;         ///< store_matrix: the same
  unsigned a[4] = {};         ///< mma: left fragment; store_matrix; shuffle, transpose: a[0]
  unsigned b[2] = {};         ///< mma: right fragment; shuffle: b[0] is the source lane
  float* d = nullptr;         ///< mma: the accumulator fragment
  unsigned* r = nullptr;      ///< other results
  const WarpgroupProduct* product = nullptr;  ///< wgmma
  int pending = 0;                            ///< wgmma_wait; set_registers: how many
};

/// What Hopper adds. Pointers named `barrier` are to mbarriers, in shared memory.
struct HopperMachine {
  void (*barrier_init)(void* barrier, unsigned arrivals) = nullptr;
  void (*fence_barrier_init)() = nullptr;
  void (*barrier_arrive)(void* barrier, unsigned expected_bytes) = nullptr;
  void (*barrier_wait)(void* barrier, unsigned parity) = nullptr;
  void (*tensor_load)(void* to, const void* map, const int* at, int rank, void* barrier) = nullptr;
  void (*tensor_store)(const void* map, const int* at, int rank, const void* from) = nullptr;
  void (*bulk_load)(void* to, const void* from, unsigned bytes, void* barrier) = nullptr;
  void (*bulk_store)(void* to, const void* from, unsigned bytes) = nullptr;
  void (*bulk_commit)() = nullptr;
  void (*bulk_wait)(int pending) = nullptr;
  void (*touch)(const void* shared) = nullptr;
  void (*fence_proxy_async)() = nullptr;
};

/// The processor, as a kernel sees it. The host keeps `thread` that of the running fiber.
struct Machine {
  int thread = 0;
  long block = 0;
  long blocks = 1;  ///< of a row of the grid
  unsigned char* shared = nullptr;
  long shared_bytes = 0;
  void (*sync_block)() = nullptr;
  void (*sync_named)(int name, int threads, bool wait) = nullptr;
  void (*collective)(Collective, LaneOperands&) = nullptr;
  void (*copy_async)(void* destination, const void* source, int bytes, bool valid) = nullptr;
  void (*copy_async_commit)() = nullptr;
  void (*copy_async_wait)(int pending) = nullptr;
  HopperMachine hopper;
};

}  // namespace wyvern::emulator
