// What it costs to wait for one another: mbarriers and named barriers between warpgroups, the
// cluster's barrier, and handing a 64x64 bf16 tile to the other block of a cluster of two.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "tools/benchmark/hopper/bench.hpp"

namespace wyvern::hopper {
namespace {

Program program() {
  return {"synchronization", R"CUDA(
/// Two warpgroups add one to a value in turn: thread t of one to thread t+5 of the other's. With
/// PER_WARP one lane of each warp arrives, else every thread.
template <bool PER_WARP>
DEVICE void ping_pong(u32* out, int iterations, u64* clocks) {
  __shared__ Barrier barriers[2];
  __shared__ u32 values[2][128];
  const int side = threadIdx.x / 128, thread = threadIdx.x % 128;
  Barrier* const mine = &barriers[side];
  Barrier* const other = &barriers[1 - side];
  if (threadIdx.x == 0) {
    barrier_init(&barriers[0], PER_WARP ? 4 : 128);
    barrier_init(&barriers[1], PER_WARP ? 4 : 128);
    fence_barrier_init();
  }
  values[side][thread] = hash(thread);
  __syncthreads();
  const u64 start = clocks_now();
  for (int i = 0; i < iterations; ++i) {
    if (side == 1 || i > 0) barrier_wait(mine, (side == 1 ? i : i - 1) & 1);
    if (side == 1 || i > 0) {
      volatile u32* from = values[1 - side];
      volatile u32* to = values[side];
      to[thread] = from[(thread + 5) % 128] + 1;
    }
    if constexpr (PER_WARP) {
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(other);
    } else {
      barrier_arrive(other);
    }
  }
  if (side == 0) barrier_wait(mine, (iterations - 1) & 1);
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  if (side == 1) out[blockIdx.x * 128 + thread] = values[1][thread];
}
extern "C" __global__ __launch_bounds__(256) void mbarrier_threads(u32* out, int n, u64* clocks) {
  ping_pong<false>(out, n, clocks);
}
extern "C" __global__ __launch_bounds__(256) void mbarrier_warps(u32* out, int n, u64* clocks) {
  ping_pong<true>(out, n, clocks);
}

/// The same by a pair of named barriers: one side arrives, the other waits.
extern "C" __global__ __launch_bounds__(256) void named_turns(u32* out, int n, u64* clocks) {
  __shared__ u32 values[2][128];
  const int side = threadIdx.x / 128, thread = threadIdx.x % 128;
  values[side][thread] = hash(thread);
  __syncthreads();
  const u64 start = clocks_now();
  for (int i = 0; i < n; ++i) {
    if (side == 1 || i > 0) {
      sync_named(1 + side, 256);
      volatile u32* from = values[1 - side];
      volatile u32* to = values[side];
      to[thread] = from[(thread + 5) % 128] + 1;
    }
    arrive_named(2 - side, 256);
  }
  if (side == 0) sync_named(1, 256);
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  if (side == 1) out[blockIdx.x * 128 + thread] = values[1][thread];
}

/// One thread of each block of a pair arrives at the other's barrier in turn.
template <bool RELEASE>
DEVICE void remote_turns(u32* out, int iterations, u64* clocks) {
  __shared__ Barrier mine[1];
  const u32 rank = cluster_rank();
  const u32 other = remote_address(mine, 1 - rank);
  if (threadIdx.x == 0) {
    barrier_init(mine, 1);
    fence_barrier_init();
  }
  cluster_arrive();
  cluster_wait();
  const u64 start = clocks_now();
  if (threadIdx.x == 0) {
    for (int i = 0; i < iterations; ++i) {
      if (rank == 1) barrier_wait(mine, i & 1);
      if constexpr (RELEASE)
        barrier_arrive_remote(other);
      else
        barrier_arrive_remote_unordered(other);
      if (rank == 0) barrier_wait(mine, i & 1);
    }
    out[blockIdx.x] = iterations;
  }
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  cluster_arrive();
  cluster_wait();
}
extern "C" __global__ __cluster_dims__(2, 1, 1) void remote_release(u32* out, int n, u64* clocks) {
  remote_turns<true>(out, n, clocks);
}
extern "C" __global__ __cluster_dims__(2, 1, 1) void remote_unordered(u32* out, int n,
                                                                       u64* clocks) {
  remote_turns<false>(out, n, clocks);
}

/// A barrier of `threads` in each group of so many; with DATA each thread takes a value over.
template <bool DATA>
DEVICE void barriers_in_turn(u32* out, int iterations, int threads, u64* clocks) {
  __shared__ u32 values[2][1024];
  const int group = threadIdx.x / threads * threads, thread = threadIdx.x % threads;
  values[1][threadIdx.x] = hash(threadIdx.x);
  __syncthreads();
  const u32 id = 1 + threadIdx.x / threads;
  const u64 start = clocks_now();
  for (int i = 0; i < iterations; ++i) {
    if constexpr (DATA) {
      volatile u32* from = values[(i + 1) & 1];
      volatile u32* to = values[i & 1];
      to[threadIdx.x] = from[group + (thread + 37) % threads] + 1;
    }
    sync_named(id, threads);
  }
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  if constexpr (DATA)
    out[blockIdx.x * blockDim.x + threadIdx.x] = values[(iterations - 1) & 1][threadIdx.x];
}
extern "C" __global__ void named(u32* out, int n, int threads, u64* clocks) {
  barriers_in_turn<false>(out, n, threads, clocks);
}
extern "C" __global__ void named_data(u32* out, int n, int threads, u64* clocks) {
  barriers_in_turn<true>(out, n, threads, clocks);
}

DEVICE u32 load_remote(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
enum class Cluster { bare, relaxed, data };
template <Cluster KIND>
DEVICE void cluster_barriers(u32* out, int iterations, u64* clocks, int blocks) {
  __shared__ u32 values[2][1024];
  const u32 next = (cluster_rank() + 1) % blocks;
  const u32 remote = remote_address(values, next) + threadIdx.x * 4;
  values[1][threadIdx.x] = hash(blockIdx.x * blockDim.x + threadIdx.x);
  cluster_arrive();
  cluster_wait();
  const u64 start = clocks_now();
  for (int i = 0; i < iterations; ++i) {
    if constexpr (KIND == Cluster::data) {
      volatile u32* to = values[i & 1];
      to[threadIdx.x] = load_remote(remote + ((i + 1) & 1) * 4096) + 1;
    }
    if constexpr (KIND == Cluster::relaxed)
      cluster_arrive_relaxed();
    else
      cluster_arrive();
    cluster_wait();
  }
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  if constexpr (KIND == Cluster::data)
    out[blockIdx.x * blockDim.x + threadIdx.x] = values[(iterations - 1) & 1][threadIdx.x];
}
#define CLUSTER(BLOCKS, NAME, KIND)                                                              \
  extern "C" __global__ __cluster_dims__(BLOCKS, 1, 1) void NAME##_##BLOCKS(u32* out, int n,      \
                                                                            u64* clocks) {        \
    cluster_barriers<Cluster::KIND>(out, n, clocks, BLOCKS);                                      \
  }
CLUSTER(2, cluster, bare) CLUSTER(2, cluster_relaxed, relaxed) CLUSTER(2, cluster_data, data)
CLUSTER(4, cluster, bare) CLUSTER(4, cluster_relaxed, relaxed) CLUSTER(4, cluster_data, data)

/// A tile of 8 KB goes from block to block of a pair, each adding one to every word. 128 threads
/// hold 64 bytes each in registers; the other side reads them from its own shared memory.
enum class Way { store, store_async, bulk };
template <Way WAY>
DEVICE void exchange(u32* out, int iterations, u64* clocks) {
  __shared__ alignas(128) char inbox[8192];
  __shared__ alignas(128) char outbox[8192];
  __shared__ Barrier arrived[1];
  const u32 rank = cluster_rank(), thread = threadIdx.x;
  const u32 there = remote_address(inbox, 1 - rank);
  const u32 arrived_there = remote_address(arrived, 1 - rank);
  if (thread == 0) {
    barrier_init(arrived, WAY == Way::store ? 4 : 1);
    fence_barrier_init();
  }
  uint4 v[4];
  for (int i = 0; i < 4; ++i)
    v[i] = {hash(thread * 16 + i * 4), hash(thread * 16 + i * 4 + 1),
            hash(thread * 16 + i * 4 + 2), hash(thread * 16 + i * 4 + 3)};
  cluster_arrive();
  cluster_wait();
  const u64 start = clocks_now();
  for (int it = 0; it < iterations; ++it) {
    for (u32 turn = 0; turn < 2; ++turn) {
      if (rank == turn) {
        if constexpr (WAY == Way::bulk) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            store_shared(outbox + (i * 128 + thread) * 16, v[i]);
          fence_proxy_async();
          sync_named(1, 128);
          if (thread == 0)
            asm volatile(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                " [%0], [%1], 8192, [%2];" ::"r"(there), "r"(shared_address(outbox)),
                "r"(arrived_there) : "memory");
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const u32 to = there + (i * 128 + thread) * 16;
            if constexpr (WAY == Way::store_async)
              asm volatile(
                  "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
                  " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(v[i].x), "r"(v[i].y),
                  "r"(v[i].z), "r"(v[i].w), "r"(arrived_there) : "memory");
            else
              asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to),
                           "r"(v[i].x), "r"(v[i].y), "r"(v[i].z), "r"(v[i].w) : "memory");
          }
          if constexpr (WAY == Way::store) {
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive_remote(arrived_there);
          }
        }
      } else {
        if (WAY != Way::store && thread == 0) barrier_arrive_expect(arrived, 8192);
        barrier_wait_cluster(arrived, it & 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[i] = load_shared(inbox + (i * 128 + thread) * 16);
          ++v[i].x, ++v[i].y, ++v[i].z, ++v[i].w;
        }
        // Every thread has read before the other block can be answered and write again.
        if constexpr (WAY != Way::bulk) sync_named(1, 128);
      }
    }
  }
  __syncthreads();
  const u64 stop = clocks_now();
  if (thread == 0) clocks[blockIdx.x] = stop - start;
  cluster_arrive();
  cluster_wait();
  if (rank == 0)
    for (int i = 0; i < 4; ++i)
      reinterpret_cast<uint4*>(out)[blockIdx.x / 2 * 512 + thread * 4 + i] = v[i];
}
#define EXCHANGE(WAY)                                                                             \
  extern "C" __global__ __launch_bounds__(128) __cluster_dims__(2, 1, 1) void exchange_##WAY(     \
      u32* out, int n, u64* clocks) {                                                             \
    exchange<Way::WAY>(out, n, clocks);                                                           \
  }
EXCHANGE(store) EXCHANGE(store_async) EXCHANGE(bulk)
)CUDA"};
}

constexpr int kIterations = 2000;
constexpr std::size_t kMostValues = 132 * 2048;

void set_values_check(Row& row, const std::vector<std::uint32_t>& made,
                      const std::function<std::uint32_t(std::size_t)>& wanted) {
  for (std::size_t i = 0; i < made.size(); ++i) row.ok = row.ok && made[i] == wanted(i);
  row.check = row.ok ? "values handed over" : "values handed over differ";
}

void run_turns(const Report& report, const Memory& out, const Memory& clocks) {
  const unsigned blocks = open_gpu().multiprocessors;
  struct Way {
    const char* kernel;
    const char* name;
  };
  for (const Way& way : {Way{"mbarrier_threads", "mbarriers, 128 threads arrive"},
                         Way{"mbarrier_warps", "mbarriers, 4 lanes arrive"},
                         Way{"named_turns", "bar.arrive and bar.sync"}}) {
    const Kernel turns = kernel(program(), way.kernel);
    const Sample sample = measure_clocks(clocks, blocks, [&] {
      launch(turns, {blocks, 256}, out.address(), kIterations, clocks.address());
    });
    Row row{"synchronization",
            fmt::format("a word from warpgroup to warpgroup and back, {}", way.name),
            sample.median / kIterations,
            "clk",
            sample.spread_percent,
            "80 to 120",
            ""};
    // Side 1 answers n times, side 0 n-1 times; each takes the value five threads on.
    set_values_check(row, download<std::uint32_t>(out, 128), [](std::size_t i) {
      const std::uint32_t steps = 2 * kIterations - 1;
      return hash(static_cast<std::uint32_t>((i + std::size_t{5} * steps) % 128)) + steps;
    });
    report(row);
  }
}

void run_named_barriers(const Report& report, const Memory& out, const Memory& clocks) {
  const unsigned blocks = open_gpu().multiprocessors;
  const Kernel bare = kernel(program(), "named");
  const Kernel checked = kernel(program(), "named_data");
  struct Use {
    unsigned block;
    unsigned threads;
  };
  for (const Use use :
       {Use{128, 128}, Use{256, 256}, Use{512, 128}, Use{512, 256}, Use{512, 512}}) {
    const auto run = [&](Kernel which) {
      launch(which, {blocks, use.block}, out.address(), kIterations, static_cast<int>(use.threads),
             clocks.address());
    };
    run(checked);
    Row row{"synchronization",
            fmt::format("bar.sync of {} threads, {} in the block", use.threads, use.block),
            0,
            "clk",
            0,
            "20 to 30",
            ""};
    set_values_check(row, download<std::uint32_t>(out, use.block), [&use](std::size_t i) {
      const std::size_t group = i / use.threads * use.threads;
      return hash(static_cast<std::uint32_t>(group + (i - group + std::size_t{37} * kIterations) %
                                                         use.threads)) +
             kIterations;
    });
    const Sample sample = measure_clocks(clocks, blocks, [&] { run(bare); });
    row.value = sample.median / kIterations;
    row.spread_percent = sample.spread_percent;
    report(row);
  }
}

void run_cluster_barriers(const Report& report, const Memory& out, const Memory& clocks) {
  for (const unsigned size : {2U, 4U}) {
    const unsigned blocks = open_gpu().multiprocessors / size * size;
    const Kernel bare = kernel(program(), fmt::format("cluster_{}", size));
    const Kernel relaxed = kernel(program(), fmt::format("cluster_relaxed_{}", size));
    const Kernel checked = kernel(program(), fmt::format("cluster_data_{}", size));
    for (const unsigned threads : {128U, 512U}) {
      const auto run = [&](Kernel which) {
        launch(which, {blocks, threads}, out.address(), kIterations, clocks.address());
      };
      run(checked);
      Row row{"synchronization",
              fmt::format("barrier.cluster, {} blocks of {} threads", size, threads),
              0,
              "clk",
              0,
              "150 to 250",
              ""};
      set_values_check(row, download<std::uint32_t>(out, blocks * threads), [=](std::size_t i) {
        const std::size_t block = i / threads;
        const std::size_t from = block / size * size + (block % size + kIterations) % size;
        return hash(static_cast<std::uint32_t>(from * threads + i % threads)) + kIterations;
      });
      for (const bool ordered : {true, false}) {
        const Sample sample =
            measure_clocks(clocks, blocks, [&] { run(ordered ? bare : relaxed); });
        Row timed = row;
        timed.name += ordered ? "" : ", arrive.relaxed";
        timed.value = sample.median / kIterations;
        timed.spread_percent = sample.spread_percent;
        report(timed);
      }
    }
  }
}

void run_remote_arrivals(const Report& report, const Memory& out, const Memory& clocks) {
  const unsigned blocks = open_gpu().multiprocessors & ~1U;
  for (const bool release : {true, false}) {
    const Kernel turns = kernel(program(), release ? "remote_release" : "remote_unordered");
    const Sample sample = measure_clocks(clocks, blocks, [&] {
      launch(turns, {blocks, 32}, out.address(), kIterations, clocks.address());
    });
    Row row{"synchronization",
            fmt::format("arrive at the other block's mbarrier and be answered, {}",
                        release ? "release.cluster" : "release.cta"),
            sample.median / kIterations,
            "clk",
            sample.spread_percent,
            "",
            ""};
    set_values_check(row, download<std::uint32_t>(out, blocks),
                     [](std::size_t) { return kIterations; });
    report(row);
  }
}

void run_exchanges(const Report& report, const Memory& out, const Memory& clocks) {
  const unsigned blocks = open_gpu().multiprocessors & ~1U;
  struct Way {
    const char* kernel;
    const char* name;
  };
  for (const Way& way : {Way{"exchange_store", "st.shared::cluster and remote arrive"},
                         Way{"exchange_store_async", "st.async"},
                         Way{"exchange_bulk", "shared memory, fence, one bulk copy"}}) {
    const Kernel exchange = kernel(program(), way.kernel);
    const Sample sample = measure_clocks(clocks, blocks, [&] {
      launch(exchange, {blocks, 128}, out.address(), kIterations, clocks.address());
    });
    Row row{"synchronization",
            fmt::format("8 KB to the other block, registers to registers, {}", way.name),
            sample.median / (2 * kIterations),
            "clk",
            sample.spread_percent,
            "400 to 600",
            ""};
    set_values_check(row, download<std::uint32_t>(out, blocks / 2 * 2048), [](std::size_t i) {
      return hash(static_cast<std::uint32_t>(i % 2048)) + 2 * kIterations;
    });
    report(row);
  }
}

}  // namespace

std::vector<Program> synchronization_programs() { return {program()}; }

void run_synchronization(const Report& report) {
  const Memory out(kMostValues * sizeof(std::uint32_t));
  const Memory clocks(open_gpu().multiprocessors * sizeof(std::uint64_t));
  run_turns(report, out, clocks);
  run_named_barriers(report, out, clocks);
  run_cluster_barriers(report, out, clocks);
  run_remote_arrivals(report, out, clocks);
  run_exchanges(report, out, clocks);
}

}  // namespace wyvern::hopper
