#include "tools/benchmark/hopper/device_code.hpp"

#include <fmt/format.h>

namespace wyvern::hopper {

const std::string& device_code() {
  static const std::string text = R"CUDA(
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
#define DEVICE __device__ __forceinline__

struct alignas(64) TensorMap { u64 words[16]; };
extern __shared__ char dynamic_shared[];

DEVICE u64 clocks_now() {
  u64 value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value)::"memory");
  return value;
}
DEVICE u64 nanoseconds_now() {
  u64 value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
  return value;
}
DEVICE u32 shared_address(const void* pointer) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return u32(address);
}
DEVICE u32 hash(u32 x) {  // the host has the same
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (done == 0);
}
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (done == 0);
}
DEVICE u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
DEVICE void barrier_arrive_remote(u32 remote) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
               : "memory");
}
/// For giving a buffer back: orders nothing that other blocks are to read, so it need not wait for
/// this thread's stores as a release at the cluster's scope does.
DEVICE void barrier_arrive_remote_unordered(u32 remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// One box at {0, token, half, head}.
DEVICE void copy_box(u32 to, const TensorMap& map, int token, int half, int head, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(&map), "r"(0), "r"(token), "r"(half),
      "r"(head), "r"(barrier) : "memory");
}
DEVICE void copy_box_multicast(u32 to, const TensorMap& map, int token, int half, int head,
                               u32 barrier, u16 ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(&map), "r"(0),
      "r"(token), "r"(half), "r"(head), "r"(barrier), "h"(ranks) : "memory");
}

DEVICE uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
DEVICE void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w) : "memory");
}

/// A row of 128 bytes in a tile with 128-byte swizzle: where its 16-byte piece `piece` lies.
DEVICE u32 swizzled(int row, int piece) { return u32(row * 128 + ((piece ^ (row & 7)) << 4)); }

/// Brings `rows` rows of 128 bytes into a swizzled tile.
DEVICE void fill_tile(u32 tile, const void* from, int rows, int thread, int threads) {
  const uint4* source = static_cast<const uint4*>(from);
  for (int i = thread; i < rows * 8; i += threads)
    store_shared(tile + swizzled(i / 8, i % 8), source[i]);
}

/// What wgmma reads: a swizzled tile, groups of 8 rows 1024 bytes apart.
DEVICE u64 descriptor(u32 tile) {
  return u64((tile & 0x3ffff) >> 4) | (u64(1) << 16) | (u64(64) << 32) | (u64(1) << 62);
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

/// Two floats as bf16, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
#define MMA(NAME, SHAPE_AND_TYPES)                                                                \
  DEVICE void NAME(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {                            \
    asm volatile("mma.sync.aligned." SHAPE_AND_TYPES                                              \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                 \
  }
MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
)CUDA";
  return text;
}

std::string wgmma_function(int n, Operand a, Element element) {
  const int count = n / 2;
  const bool in_registers = a == Operand::registers;
  const bool bf16 = element == Element::bf16;
  std::string outputs;
  std::string constraints;
  for (int i = 0; i < count; ++i) {
    outputs += fmt::format("{}%{}", i == 0 ? "" : ", ", i);
    constraints += fmt::format("{}\"+f\"(d[{}])", i == 0 ? "" : ", ", i);
  }
  const std::string left =
      in_registers ? fmt::format("{{%{}, %{}, %{}, %{}}}", count, count + 1, count + 2, count + 3)
                   : fmt::format("%{}", count);
  const int right = count + (in_registers ? 4 : 1);
  // After the scale of d: signs of A and B, then what is transposed; tf32 is never transposed.
  const char* modes = !bf16 ? "p, 1, 1" : in_registers ? "p, 1, 1, 0" : "p, 1, 1, 0, 0";
  return fmt::format(
      "template <int ACCUMULATE = 1>\nDEVICE void wgmma(float (&d)[{}], {}, u64 b) {{\n"
      "  asm volatile(\"{{.reg .pred p;\\nsetp.ne.u32 p, %{}, 0;\\n\"\n"
      "    \"wgmma.mma_async.sync.aligned.m64n{}k{}.f32.{} {{{}}}, {}, %{}, {};}}\"\n"
      "    : {} : {}, \"l\"(b), \"n\"(ACCUMULATE));\n}}\n",
      count, in_registers ? "const u32 (&a)[4]" : "u64 a", right + 1, n, bf16 ? 16 : 8,
      bf16 ? "bf16.bf16" : "tf32.tf32", outputs, left, right, modes, constraints,
      in_registers ? "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3])" : "\"l\"(a)");
}

}  // namespace wyvern::hopper
