// The emulator's stand-in for device/cuda/sm90/ptx.cuh: the same functions, on the host.
#include "device/cuda/ptx.cuh"
#include "device/cuda/sm90/types.cuh"

#define __grid_constant__

namespace wyvern::cuda::sm90 {

inline emulator::HopperMachine& hopper() { return wyvern_machine->hopper; }

inline unsigned char* swizzled_memory() { return wyvern_machine->shared; }
/// An address of the window that the hardware has, whose start is aligned to 1024 bytes.
inline uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(static_cast<const unsigned char*>(pointer) - swizzled_memory());
}

inline int uniform(int x) { return x; }

inline int opaque(int x) { return x; }
inline float opaque(float x) { return x; }

// ---- mbarriers ----------------------------------------------------------------------------------

inline void barrier_init(Barrier* barrier, uint32 arrivals) {
  hopper().barrier_init(barrier, arrivals);
}
inline void fence_barrier_init() { hopper().fence_barrier_init(); }
inline void barrier_arrive(Barrier* barrier) { hopper().barrier_arrive(barrier, 0); }
inline void barrier_arrive_expect(Barrier* barrier, uint32 bytes) {
  hopper().barrier_arrive(barrier, bytes);
}
/// Returns when the phase is complete, as it may.
inline bool barrier_try_wait(Barrier* barrier, uint32 parity) {
  hopper().barrier_wait(barrier, parity);
  return true;
}

// ---- TMA copies ---------------------------------------------------------------------------------

inline void prefetch(const TensorMap&) {}
template <int Rank>
void tensor_load(void* to, const TensorMap& map, const int32 (&at)[Rank], Barrier* barrier) {
  static_assert(Rank >= 2 && Rank <= 4);
  hopper().tensor_load(to, &map, at, Rank, barrier);
}
inline void tensor_store(const TensorMap& map, const int32 (&at)[4], const void* from) {
  hopper().tensor_store(&map, at, 4, from);
}
inline void bulk_load(void* to, const void* from, uint32 bytes, Barrier* barrier) {
  hopper().bulk_load(to, from, bytes, barrier);
}
inline void bulk_store(void* to, const void* from, uint32 bytes) {
  hopper().bulk_store(to, from, bytes);
}
inline void bulk_commit() { hopper().bulk_commit(); }
template <int Pending>
void bulk_wait_read() {
  hopper().bulk_wait(Pending);
}
inline void fence_proxy_async() { hopper().fence_proxy_async(); }
inline void touch(const void* pointer) { hopper().touch(pointer); }

// ---- matrix fragments ---------------------------------------------------------------------------

inline void store_matrix(Collective operation, void* row, const uint32 (&r)[4]) {
  LaneOperands lane;
  lane.to = row;
  for (int i = 0; i < 4; ++i) lane.a[i] = r[i];
  wyvern_machine->collective(operation, lane);
}
inline void store_matrix_x4(void* row, const uint32 (&r)[4]) {
  store_matrix(Collective::store_matrix_x4, row, r);
}
inline void store_matrix_x4_transposed(void* row, const uint32 (&r)[4]) {
  store_matrix(Collective::store_matrix_x4_transposed, row, r);
}

// ---- products of a warpgroup --------------------------------------------------------------------

inline void warpgroup(Collective operation, int pending = 0,
                      const emulator::WarpgroupProduct* product = nullptr) {
  LaneOperands lane;
  lane.pending = pending;
  lane.product = product;
  wyvern_machine->collective(operation, lane);
}
inline void wgmma_fence() { warpgroup(Collective::wgmma_fence); }
inline void wgmma_commit() { warpgroup(Collective::wgmma_commit); }
template <int Pending>
void wgmma_wait() {
  warpgroup(Collective::wgmma_wait, Pending);
}
template <int Count>
void raise_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
  warpgroup(Collective::set_registers, Count);
}
template <int Count>
void lower_registers() {
  raise_registers<Count>();
}
template <class Register, int N>
void pin(Register (&)[N]) {}

template <class T, int N, Major A, Major B>
void wgmma(float (&d)[N / 2], Descriptor a, Descriptor b, bool accumulate) {
  const emulator::WarpgroupProduct product{.n = N,
                                           .fp16 = !kIsBf16<T>,
                                           .a_descriptor = a.bits,
                                           .b_descriptor = b.bits,
                                           .a_mn_major = A == Major::mn,
                                           .b_mn_major = B == Major::mn,
                                           .accumulate = accumulate,
                                           .d = d};
  warpgroup(Collective::wgmma, 0, &product);
}
template <class T, int N, Major B>
void wgmma(float (&d)[N / 2], const uint32 (&a)[4], Descriptor b, bool accumulate) {
  const emulator::WarpgroupProduct product{.n = N,
                                           .fp16 = !kIsBf16<T>,
                                           .a = a,
                                           .b_descriptor = b.bits,
                                           .b_mn_major = B == Major::mn,
                                           .accumulate = accumulate,
                                           .d = d};
  warpgroup(Collective::wgmma, 0, &product);
}

}  // namespace wyvern::cuda::sm90
