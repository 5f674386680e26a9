#include "tools/benchmark/hopper/device_code.hpp"

#include "templates/source.hpp"

namespace wyvern::hopper {
namespace {

/// Clocks, clusters, multicast, and accesses to shared memory that the compiler must not choose.
constexpr std::string_view kBegin = R"CUDA(
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/tile.cuh"

using namespace wyvern::cuda::sm90;
using u16 = uint16;
using u32 = uint32;
using u64 = uint64;
#define DEVICE WYVERN_DEVICE

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
DEVICE u32 hash(u32 x) {  // the host has the same
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// ---- clusters -----------------------------------------------------------------------------------

DEVICE void barrier_wait_cluster(Barrier* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (done == 0);
}
/// The address of another block's `pointer` among the cluster's shared memory.
DEVICE u32 remote_address(const void* pointer, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote) : "r"(shared_address(pointer)), "r"(rank));
  return remote;
}
DEVICE void barrier_arrive_remote(u32 remote) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
               : "memory");
}
/// For giving a pipeline stage back: orders nothing that other blocks are to read, so it need not
/// wait for this thread's stores as a release at the cluster's scope does.
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
/// tensor_load() to the same place of each block in the bits of `ranks`.
DEVICE void tensor_load_multicast(void* to, const TensorMap& map, const int (&at)[4],
                                  Barrier* barrier, u16 ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(barrier)),
      "h"(ranks) : "memory");
}

// ---- shared memory ------------------------------------------------------------------------------

/// Dynamic shared memory for swizzled tiles, also beside static shared memory: the host allocates
/// 1024 bytes more than the tiles have.
DEVICE unsigned char* tile_memory() {
  unsigned char* const start = swizzled_memory();
  return start + (-shared_address(start) & 1023u);
}
DEVICE uint4 load_shared(const void* from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(from)) : "memory");
  return v;
}
DEVICE void store_shared(void* to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_shared(void* to, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(to)), "r"(x) : "memory");
}
DEVICE void store_shared(void* to, u16 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared_address(to)), "h"(x) : "memory");
}
/// Rows of 64 elements from global memory to a tile of one panel.
template <class Tile>
DEVICE void fill_tile(Tile tile, const void* from, int thread, int threads) {
  const uint4* source = static_cast<const uint4*>(from);
  for (int i = thread; i < Tile::kRows * 8; i += threads)
    store_shared(tile.at(i / 8, i % 8 * 8), source[i]);
}
#line 1 "program"
)CUDA";

}  // namespace

std::string source_of(std::string_view program) {
  constexpr const char* kFile = "hopper_bench.cu";
  Template t;  // of no stage: it only says where the source begins
  t.name = "hopper_bench";
  t.source = kFile;
  const Dialect dialect{"device/cuda/types.cuh", "wyvern::cuda",
                        [](const Template&) { return std::string(); }};
  return specialize(t, {}, {}, dialect, {{kFile, std::string(kBegin) + std::string(program)}});
}

}  // namespace wyvern::hopper
