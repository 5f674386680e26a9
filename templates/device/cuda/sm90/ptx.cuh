// Hopper's instructions: what device/cuda/ptx.cuh is for every GPU. The rest of sm90 is plain C++
// over these functions, and the emulator of tests/emulator replaces this file too. All of it needs
// sm_90a. Pointers are to shared memory unless said otherwise.
#pragma once

#include "device/cuda/ptx.cuh"
#include "device/cuda/sm90/types.cuh"

namespace wyvern::cuda::sm90 {

/// The launch's dynamic shared memory, aligned to 1024 bytes as swizzled tiles must be.
WYVERN_DEVICE unsigned char* swizzled_memory() {
  extern __shared__ __align__(1024) unsigned char wyvern_swizzled[];
  return wyvern_swizzled;
}

/// x, which is equal in all lanes of the warp; the compiler then knows it: branches on it do not
/// tear apart the warps of a product.
WYVERN_DEVICE int uniform(int x) { return __shfl_sync(0xFFFFFFFFU, x, 0); }

/// x behind an optimization barrier: the compiler recomputes what depends on it.
WYVERN_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// The same. A number that a state begins with must be a float to the compiler: a bf16 number
/// becomes one by a shift of integers, and what was an integer is copied before each product.
WYVERN_DEVICE float opaque(float x) {
  asm("" : "+f"(x));
  return x;
}

// ---- mbarriers ----------------------------------------------------------------------------------

/// Phase 0 begins; `arrivals` arrivals complete a phase. One thread does this, then
/// fence_barrier_init(), and a block barrier lets the others use it.
WYVERN_DEVICE void barrier_init(Barrier* barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
/// Lets tensor copies see the barriers that this thread has initialized.
WYVERN_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

WYVERN_DEVICE void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
/// Arrives, and makes the phase wait for `bytes` of tensor copies besides.
WYVERN_DEVICE void barrier_arrive_expect(Barrier* barrier, uint32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
/// Whether the latest phase of this parity is complete: of the phase under way and the one before,
/// the one of this parity. Before phase 0, one of parity 1 counts as complete. May wait for a
/// while.
WYVERN_DEVICE bool barrier_try_wait(Barrier* barrier, uint32 parity) {
  uint32 complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.b32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// ---- tensor copies ------------------------------------------------------------------------------

/// Prefetches the descriptor itself, which is in global or constant memory.
WYVERN_DEVICE void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Starts copying the box of `map` that begins at element `at`, innermost coordinate first, to
/// `to`; the barrier's phase gets the bytes of the whole box. Elements outside the tensor become
/// zeros.
WYVERN_DEVICE void tensor_load(void* to, const TensorMap& map, const int32 (&at)[2],
                               Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2,%3}], [%4];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(shared_address(barrier))
      : "memory");
}
WYVERN_DEVICE void tensor_load(void* to, const TensorMap& map, const int32 (&at)[3],
                               Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2,%3,%4}], [%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(shared_address(barrier))
      : "memory");
}
WYVERN_DEVICE void tensor_load(void* to, const TensorMap& map, const int32 (&at)[4],
                               Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2,%3,%4,%5}], [%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(barrier))
      : "memory");
}

/// Starts copying a box from shared memory to the tensor, but for elements outside it. A copy is
/// part of the group that this thread commits next.
WYVERN_DEVICE void tensor_store(const TensorMap& map, const int32 (&at)[4], const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1,%2,%3,%4}], [%5];" ::"l"(
          &map),
      "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(from))
      : "memory");
}

/// Starts copying `bytes`, a multiple of 16, from global memory, aligned to 16 bytes as `to` is;
/// the barrier's phase gets them.
WYVERN_DEVICE void bulk_load(void* to, const void* from, uint32 bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
/// The same the other way, as part of the group that this thread commits next.
WYVERN_DEVICE void bulk_store(void* to, const void* from, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
WYVERN_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until at most Pending of this thread's latest committed groups still read shared memory.
template <int Pending>
WYVERN_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

/// Orders this thread's accesses to shared memory before tensor copies and wgmma that start after
/// it.
WYVERN_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Does nothing. Says that this thread is about to read or write the 16 bytes around `pointer`,
/// from which the emulator tells where fence_proxy_async() is missing.
WYVERN_DEVICE void touch(const void* /*pointer*/) {}

// ---- matrix fragments ---------------------------------------------------------------------------

/// load_matrix_x4 the other way: lane i gives the address of row i % 8 of matrix i / 8.
WYVERN_DEVICE void store_matrix_x4(void* row, const uint32 (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
/// The same, each matrix transposed.
WYVERN_DEVICE void store_matrix_x4_transposed(void* row, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- products of a warpgroup; its 128 threads take part together --------------------------------

/// Orders the registers' earlier accesses before the products that follow.
WYVERN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Makes a group of the products since the last commit.
WYVERN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most Pending of the latest groups are under way.
template <int Pending>
WYVERN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
/// Keeps the compiler from moving accesses of registers across this point: those of accumulators
/// before a product begins or after it ends, those of an A fragment that a product may still read.
template <int N>
WYVERN_DEVICE void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
WYVERN_DEVICE void pin(uint32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

/// Gives each thread of the warpgroup Count registers, a multiple of 8 from 24 to 256, more or
/// fewer than it has. More are waited for until other warpgroups have given them up. The kernel
/// must state how many of its blocks a multiprocessor runs at least.
template <int Count>
WYVERN_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
WYVERN_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// The accumulator's registers in the text of an instruction, and as its operands.
// clang-format off
#define WYVERN_D8  \
  "%0,%1,%2,%3,%4,%5,%6,%7"
#define WYVERN_D16 WYVERN_D8 \
  ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WYVERN_D32 WYVERN_D16 \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WYVERN_D64 WYVERN_D32 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
  "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WYVERN_D128 WYVERN_D64 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81," \
  "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99," \
  "%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114," \
  "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WYVERN_O8(i)                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WYVERN_O16(i) WYVERN_O8(i), WYVERN_O8(i + 8)
#define WYVERN_O32(i) WYVERN_O16(i), WYVERN_O16(i + 16)
#define WYVERN_O64(i) WYVERN_O32(i), WYVERN_O32(i + 32)
#define WYVERN_O128(i) WYVERN_O64(i), WYVERN_O64(i + 64)
// clang-format on

/// d = a * b, plus d if `accumulate`: a is 64 x 16, b 16 x N, both of type T. Element i of d is row
/// 16 (warp % 4) + lane / 4 + i / 2 % 2 * 8, column i / 4 * 8 + lane % 4 * 2 + i % 2. The product
/// runs on after the instruction: before a wait for its group nothing may touch d, or write what
/// the descriptors point at.
template <class T, int N, Major A, Major B>
WYVERN_DEVICE void wgmma(float (&d)[N / 2], Descriptor a, Descriptor b, bool accumulate) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256);
#define WYVERN_WGMMA(type, n, registers, a_at, b_at, p_at, a_major, b_major)             \
  if constexpr (N == n)                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at                                \
               ", 0;\n"                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type           \
               " {" WYVERN_D##registers "}, %" #a_at ", %" #b_at ", p, 1, 1, %" #a_major \
                                        ", %" #b_major ";\n}\n"                          \
               : WYVERN_O##registers(0)                                                  \
               : "l"(a.bits), "l"(b.bits), "r"(static_cast<int32>(accumulate)),          \
                 "n"(A == Major::mn ? 1 : 0), "n"(B == Major::mn ? 1 : 0))
  if constexpr (kIsBf16<T>) {
    WYVERN_WGMMA("bf16", 16, 8, 8, 9, 10, 11, 12);
    WYVERN_WGMMA("bf16", 32, 16, 16, 17, 18, 19, 20);
    WYVERN_WGMMA("bf16", 64, 32, 32, 33, 34, 35, 36);
    WYVERN_WGMMA("bf16", 128, 64, 64, 65, 66, 67, 68);
    WYVERN_WGMMA("bf16", 256, 128, 128, 129, 130, 131, 132);
  } else {
    WYVERN_WGMMA("f16", 16, 8, 8, 9, 10, 11, 12);
    WYVERN_WGMMA("f16", 32, 16, 16, 17, 18, 19, 20);
    WYVERN_WGMMA("f16", 64, 32, 32, 33, 34, 35, 36);
    WYVERN_WGMMA("f16", 128, 64, 64, 65, 66, 67, 68);
    WYVERN_WGMMA("f16", 256, 128, 128, 129, 130, 131, 132);
  }
#undef WYVERN_WGMMA
}

/// The same with a in registers: an A fragment of mma_m16n8k16 for each warp's 16 rows.
template <class T, int N, Major B>
WYVERN_DEVICE void wgmma(float (&d)[N / 2], const uint32 (&a)[4], Descriptor b, bool accumulate) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256);
#define WYVERN_WGMMA(type, n, registers, a0, a1, a2, a3, b_at, p_at, b_major)               \
  if constexpr (N == n)                                                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at                                   \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type              \
               " {" WYVERN_D##registers "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_at \
                                        ", p, 1, 1, %" #b_major ";\n}\n"                    \
               : WYVERN_O##registers(0)                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits),                   \
                 "r"(static_cast<int32>(accumulate)), "n"(B == Major::mn ? 1 : 0))
  if constexpr (kIsBf16<T>) {
    WYVERN_WGMMA("bf16", 16, 8, 8, 9, 10, 11, 12, 13, 14);
    WYVERN_WGMMA("bf16", 32, 16, 16, 17, 18, 19, 20, 21, 22);
    WYVERN_WGMMA("bf16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
    WYVERN_WGMMA("bf16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
    WYVERN_WGMMA("bf16", 256, 128, 128, 129, 130, 131, 132, 133, 134);
  } else {
    WYVERN_WGMMA("f16", 16, 8, 8, 9, 10, 11, 12, 13, 14);
    WYVERN_WGMMA("f16", 32, 16, 16, 17, 18, 19, 20, 21, 22);
    WYVERN_WGMMA("f16", 64, 32, 32, 33, 34, 35, 36, 37, 38);
    WYVERN_WGMMA("f16", 128, 64, 64, 65, 66, 67, 68, 69, 70);
    WYVERN_WGMMA("f16", 256, 128, 128, 129, 130, 131, 132, 133, 134);
  }
#undef WYVERN_WGMMA
}

}  // namespace wyvern::cuda::sm90
