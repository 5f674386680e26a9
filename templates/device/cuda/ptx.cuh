// The hardware: every PTX instruction and special register that CUDA templates use, and nothing
// else. The rest of device/cuda is plain C++ over these functions, so the emulator of
// tests/emulator replaces this one file. Fragment layouts are those of the PTX ISA's chapter on
// mma.
#pragma once

#include "device/cuda/types.cuh"

namespace wyvern::cuda {

#define WYVERN_DEVICE __device__ __forceinline__
/// Begins the definition of the entry point, whose parameters WYVERN_PARAMETERS names. A block has
/// `threads`, and registers are so few that `blocks` of them fit on a multiprocessor; 0 leaves the
/// number to the compiler.
#define WYVERN_KERNEL(threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) wyvern_kernel(WYVERN_PARAMETERS)

WYVERN_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
WYVERN_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
WYVERN_DEVICE int block_count() { return static_cast<int>(gridDim.x); }
/// Of a grid of rows of blocks (cuda_contract.hpp), in which block_index() counts a row's.
WYVERN_DEVICE int block_row() { return static_cast<int>(blockIdx.y + blockIdx.z * gridDim.y); }
WYVERN_DEVICE int lane_index() { return static_cast<int>(threadIdx.x & 31U); }
WYVERN_DEVICE int warp_index() { return static_cast<int>(threadIdx.x >> 5U); }

WYVERN_DEVICE void sync_block() { __syncthreads(); }
WYVERN_DEVICE void sync_warp() { __syncwarp(); }

/// Barrier `name` (1 to 15; 0 is sync_block's) of `threads` threads, a multiple of 32.
WYVERN_DEVICE void sync_named(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
/// Counts this thread in without waiting.
WYVERN_DEVICE void arrive_named(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/// The launch's dynamic shared memory, aligned to 128 bytes.
WYVERN_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char wyvern_shared[];
  return wyvern_shared;
}

WYVERN_DEVICE uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// ---- numbers ------------------------------------------------------------------------------------

WYVERN_DEVICE uint32 float_bits(float x) { return __float_as_uint(x); }
WYVERN_DEVICE float bits_float(uint32 x) { return __uint_as_float(x); }

WYVERN_DEVICE float to_float(float x) { return x; }
WYVERN_DEVICE float to_float(bf16 x) { return bits_float(static_cast<uint32>(x.bits) << 16U); }
WYVERN_DEVICE float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

/// Round to nearest even.
template <class T>
WYVERN_DEVICE T from_float(float x);
template <>
WYVERN_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
WYVERN_DEVICE bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
WYVERN_DEVICE fp16 from_float<fp16>(float x) {
  fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

/// Two 16-bit numbers in one register, `low` in the lower half.
template <class T>
WYVERN_DEVICE uint32 pack(float low, float high);
template <>
WYVERN_DEVICE uint32 pack<bf16>(float low, float high) {
  uint32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <>
WYVERN_DEVICE uint32 pack<fp16>(float low, float high) {
  uint32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

/// The same, clamped to T's largest number. Few sums are beyond bf16's.
template <class T>
WYVERN_DEVICE uint32 pack_within_range(float low, float high) {
  return pack<T>(low, high);
}
template <>
WYVERN_DEVICE uint32 pack_within_range<fp16>(float low, float high) {
  uint32 y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

/// Nearest tf32, as the float it is.
WYVERN_DEVICE float to_tf32(float x) {
  uint32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return bits_float(y);
}

/// 2^x within 2 ulp; subnormal results are 0.
WYVERN_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / x within 1 ulp; 0 of an infinite x.
WYVERN_DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / sqrt(x) within 2 ulp.
WYVERN_DEVICE float reciprocal_sqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
WYVERN_DEVICE float exponential(float x) { return expf(x); }
WYVERN_DEVICE float log_one_plus(float x) { return log1pf(x); }
WYVERN_DEVICE float reciprocal_sqrt(float x) { return 1.0f / sqrtf(x); }
WYVERN_DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
WYVERN_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
WYVERN_DEVICE float absolute(float x) { return fabsf(x); }

// ---- wide stores --------------------------------------------------------------------------------

/// Eight or sixteen bytes to global memory, aligned to their number, in one access. The compiler
/// splits assignments of structs and does not always merge the pieces again.
WYVERN_DEVICE void store_words(void* to, const uint32 (&x)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(__cvta_generic_to_global(to)), "r"(x[0]),
               "r"(x[1])
               : "memory");
}
WYVERN_DEVICE void store_words(void* to, const uint32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/// The same to shared memory.
WYVERN_DEVICE void store_shared_words(void* to, const uint32 (&x)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(shared_address(to)), "r"(x[0]), "r"(x[1])
               : "memory");
}
WYVERN_DEVICE void store_shared_words(void* to, const uint32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(to)), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// ---- between blocks -----------------------------------------------------------------------------

/// All that this thread read and wrote before comes before what it adds to a counter afterwards.
WYVERN_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
/// Adds to a counter in global memory.
WYVERN_DEVICE void add_to_counter(int32* counter, int32 x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)),
               "r"(x)
               : "memory");
}
/// Waits until a counter in global memory has reached `count`: what other blocks did before they
/// added to it comes before all that this thread does afterwards. They must have smaller numbers,
/// as blocks start in the order of theirs.
WYVERN_DEVICE void await_counter(const int32* counter, int32 count) {
  int32 seen = 0;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(seen)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
  } while (seen < count);
}

// ---- moving registers inside a warp; every lane must take part ----------------------------------

WYVERN_DEVICE float shuffle(float x, int source_lane) {
  return __shfl_sync(0xFFFFFFFFU, x, source_lane);
}
WYVERN_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFU, x, mask); }
WYVERN_DEVICE uint32 shuffle_xor(uint32 x, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFU, x, mask);
}
/// The same, in its place among accesses to memory. Of an unrolled loop's others the compiler
/// starts all before the first store, with a register for each.
WYVERN_DEVICE float shuffle_xor_in_order(float x, int mask) {
  float y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;"
               : "=f"(y)
               : "f"(x), "r"(mask)
               : "memory");
  return y;
}
/// The value `distance` lanes below; lanes under `distance` keep their own.
WYVERN_DEVICE int shuffle_up(int x, int distance) {
  return __shfl_up_sync(0xFFFFFFFFU, x, static_cast<unsigned>(distance));
}

/// Transposes an 8x8 matrix of 16-bit elements: row i in lanes 4i..4i+3, two elements a lane.
WYVERN_DEVICE uint32 transpose_8x8(uint32 x) {
  uint32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- asynchronous copies from global to shared memory -------------------------------------------

/// Copies Bytes (4, 8 or 16, both sides aligned to them), or writes zeros when not `valid` and
/// reads nothing.
template <int Bytes>
WYVERN_DEVICE void copy_async(void* destination, const void* source, bool valid) {
  const int bytes = valid ? Bytes : 0;
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
                 "l"(source), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(destination)),
                 "l"(source), "r"(bytes), "n"(Bytes)
                 : "memory");
}
WYVERN_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most Pending of this thread's latest committed groups are under way.
template <int Pending>
WYVERN_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- matrix fragments ---------------------------------------------------------------------------

/// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
WYVERN_DEVICE void load_matrix_x4(uint32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
/// The same, each matrix transposed.
WYVERN_DEVICE void load_matrix_x4_transposed(uint32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

/// d += a (16x16) * b (16x8).
template <class T>
WYVERN_DEVICE void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
template <>
WYVERN_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
WYVERN_DEVICE void mma_m16n8k16<fp16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d += a (16x8) * b (8x8), operands already rounded to tf32.
WYVERN_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(float_bits(a[0])), "r"(float_bits(a[1])), "r"(float_bits(a[2])), "r"(float_bits(a[3])),
        "r"(float_bits(b0)), "r"(float_bits(b1)));
}

}  // namespace wyvern::cuda
