// TMA loads: latency of one, and bandwidth of a grid of one block per multiprocessor that
// streams tiles of [tokens, heads, 128] bf16 through shared memory, beside cp.async and plain
// loads.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/benchmark/hopper/bench.hpp"

namespace wyvern::hopper {
namespace {

constexpr std::uint64_t kHeads = 32;
constexpr std::uint64_t kRowBytes = 256;
constexpr std::size_t kLarge = std::size_t{1} << 30;   // far beyond L2
constexpr std::size_t kSmall = std::size_t{16} << 20;  // within it

/// Every variant adds up all the words of every tile, so that each byte is seen to arrive.
Program program() {
  return {"copies", R"CUDA(
extern "C" __global__ void fill(u32* words, u64 count) {
  const u64 step = gridDim.x * u64(blockDim.x);
  for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += step)
    words[i] = hash(u32(i));
}

/// Sum over this thread's part of a tile.
template <int BYTES, int THREADS>
DEVICE u32 sum_of(const unsigned char* tile, int thread) {
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < BYTES / 16 / THREADS; ++i) {
    const uint4 v = load_shared(tile + (i * THREADS + thread) * 16);
    sum += v.x + v.y + v.z + v.w;
  }
  return sum;
}

/// Warp 4 loads tiles of ROWS tokens of one head, warps 0 to 3 add them up. In a cluster of two,
/// both blocks want the same tiles and each loads one half (of D) for both.
template <int STAGES, int ROWS, int CLUSTER>
DEVICE void stream_tensor(const TensorMap& map, int heads, int tiles, int passes, u32* sums) {
  __shared__ Barrier full[STAGES], empty[STAGES];
  constexpr u32 BYTES = ROWS * 256;
  unsigned char* const base = tile_memory();
  const u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, 4 * CLUSTER);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if constexpr (CLUSTER == 2) { cluster_arrive(); cluster_wait(); }
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int stage = 0;
  u32 parity = 0, sum = 0;
  for (int pass = 0; pass < passes; ++pass)
    for (int tile = first; tile < tiles; tile += step) {
      unsigned char* const at = base + stage * BYTES;
      if (warp == 4) {
        if (lane == 0) {
          barrier_wait_cluster(empty + stage, parity ^ 1);
          barrier_arrive_expect(full + stage, BYTES);
          const int token = tile / heads * ROWS, head = tile % heads;
          if constexpr (CLUSTER == 1)
            tensor_load(at, map, {0, token, 0, head}, full + stage);
          else
            tensor_load_multicast(at + rank * BYTES / 2, map, {0, token, int(rank), head},
                                  full + stage, 3);
        }
        __syncwarp();
      } else {
        barrier_wait(full + stage, parity);
        sum += sum_of<BYTES, 128>(at, threadIdx.x);
        __syncwarp();
        // CLUSTER lanes tell as many blocks.
        if constexpr (CLUSTER == 1) {
          if (lane == 0) barrier_arrive(empty + stage);
        } else if (lane < CLUSTER) {
          barrier_arrive_remote_unordered(remote_address(empty + stage, lane));
        }
      }
      if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
  atomicAdd(sums, sum);
  if constexpr (CLUSTER == 2) { cluster_arrive(); cluster_wait(); }
}
#define TENSOR(STAGES, ROWS)                                                                      \
  extern "C" __global__ __launch_bounds__(160, 1) void tensor_##STAGES##_##ROWS(                  \
      const __grid_constant__ TensorMap map, int heads, int tiles, int passes, u32* sums) {       \
    stream_tensor<STAGES, ROWS, 1>(map, heads, tiles, passes, sums);                              \
  }                                                                                               \
  extern "C" __global__ __launch_bounds__(160, 1) __cluster_dims__(2, 1, 1)                       \
  void multicast_##STAGES##_##ROWS(const __grid_constant__ TensorMap map, int heads, int tiles,   \
                                   int passes, u32* sums) {                                       \
    stream_tensor<STAGES, ROWS, 2>(map, heads, tiles, passes, sums);                              \
  }
TENSOR(2, 64) TENSOR(3, 64) TENSOR(4, 64) TENSOR(2, 128) TENSOR(3, 128) TENSOR(4, 128)

/// The same tiles by 16-byte cp.async of all 128 threads.
template <int STAGES, int ROWS>
DEVICE void stream_async(const char* data, int heads, int tiles, int passes, u32* sums) {
  constexpr u32 BYTES = ROWS * 256;
  unsigned char* const base = tile_memory();
  const int mine = (tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
  const int count = mine * passes;
  const auto load = [&](int index) {
    if (index < count) {
      const int tile = int(blockIdx.x) + index % mine * int(gridDim.x);
      const char* from = data + (u64(tile / heads) * ROWS * heads + tile % heads) * 256;
      unsigned char* const to = base + index % STAGES * BYTES;
#pragma unroll
      for (int i = 0; i < ROWS / 8; ++i) {
        const int piece = i * 128 + threadIdx.x, row = piece / 16;
        copy_async<16>(to + piece * 16, from + u64(row) * heads * 256 + piece % 16 * 16, true);
      }
    }
    copy_async_commit();
  };
  for (int s = 0; s < STAGES - 1; ++s) load(s);
  u32 sum = 0;
  for (int i = 0; i < count; ++i) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    load(i + STAGES - 1);
    sum += sum_of<BYTES, 128>(base + i % STAGES * BYTES, threadIdx.x);
  }
  atomicAdd(sums, sum);
}
#define ASYNC(STAGES, ROWS)                                                                       \
  extern "C" __global__ __launch_bounds__(128, 1) void async_##STAGES##_##ROWS(                   \
      const char* data, int heads, int tiles, int passes, u32* sums) {                            \
    stream_async<STAGES, ROWS>(data, heads, tiles, passes, sums);                                 \
  }
ASYNC(2, 64) ASYNC(3, 64) ASYNC(4, 64) ASYNC(2, 128) ASYNC(3, 128) ASYNC(4, 128)

/// Plain 16-byte loads past L1 to registers, eight in flight a thread.
extern "C" __global__ __launch_bounds__(1024) void loads(const uint4* data, u64 count, int passes,
                                                         u32* sums) {
  u32 sum = 0;
  for (int pass = 0; pass < passes; ++pass)
    for (u64 i = blockIdx.x * u64(blockDim.x) * 8 + threadIdx.x; i < count;
         i += gridDim.x * u64(blockDim.x) * 8) {
      uint4 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                     : "l"(data + i + j * blockDim.x) : "memory");
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += v[j].x + v[j].y + v[j].z + v[j].w;
    }
  atomicAdd(sums, sum);
}

/// Clocks from one thread's request to the data of one box being there.
extern "C" __global__ void latency_tensor(const __grid_constant__ TensorMap map, int heads,
                                          int rows, u32 bytes, int first, int count, u64* clocks,
                                          u32* sums) {
  __shared__ Barrier full[1];
  unsigned char* const base = tile_memory();
  if (threadIdx.x != 0) return;
  barrier_init(full, 1);
  fence_barrier_init();
  prefetch(map);
  u32 sum = 0;
  for (int i = 0; i < count; ++i) {
    const u64 start = clocks_now();
    barrier_arrive_expect(full, bytes);
    tensor_load(base, map, {0, (first + i) / heads * rows, 0, (first + i) % heads}, full);
    barrier_wait(full, i & 1);
    clocks[i] = clocks_now() - start;
    for (u32 at = 0; at < bytes; at += 16) {
      const uint4 v = load_shared(base + at);
      sum += v.x + v.y + v.z + v.w;
    }
    fence_proxy_async();
  }
  sums[0] = sum;
}
extern "C" __global__ void latency_load(const uint4* data, u64 stride, int first, int count,
                                        u64* clocks, u32* sums) {
  u32 sum = 0;
  for (int i = 0; i < count; ++i) {
    const uint4* from = data + (first + i) * stride;
    uint4 v;
    const u64 start = clocks_now();
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    u32 used = v.x + v.y + v.z + v.w;
    asm volatile("" : "+r"(used)::"memory");
    clocks[i] = clocks_now() - start + (used & 0);
    sum += used;
  }
  sums[0] = sum;
}
)CUDA"};
}

std::uint32_t sum_of_words(std::size_t bytes) {
  std::uint32_t sum = 0;
  for (std::uint32_t i = 0; i < bytes / 4; ++i) sum += hash(i);
  return sum;
}

void set_sum_check(Row& row, std::uint32_t made, std::uint32_t wanted) {
  row.ok = made == wanted;
  row.check = row.ok ? "sum of all words" : "sum of all words differs";
}

/// The data, and the sums that reading it must give.
struct Source {
  Memory data{kLarge};
  Memory sums{sizeof(std::uint32_t)};
  std::uint32_t large_sum = sum_of_words(kLarge);
  std::uint32_t small_sum = sum_of_words(kSmall);

  Source() {
    launch(kernel(program(), "fill"), {open_gpu().multiprocessors * 4, 512}, data.address(),
           static_cast<std::uint64_t>(kLarge / 4));
    synchronize();
  }
};

/// What a bandwidth row reads: how much, and how often in one launch.
struct Extent {
  const char* name;
  std::size_t bytes;
  int passes;
  std::uint32_t sum;
};

/// `start` launches once; each byte of the extent is read `readers` times a pass.
void report_bandwidth(const Report& report, const Source& source, const Extent& extent,
                      const std::string& what, const std::string& expected, unsigned readers,
                      const std::function<void()>& start) {
  const std::uint32_t zero = 0;
  source.sums.write(&zero, sizeof zero);
  start();
  const std::uint32_t sum = download<std::uint32_t>(source.sums, 1)[0];
  const Sample sample = measure_ms(start);
  Row row{"copies",
          fmt::format("{} from {}", what, extent.name),
          static_cast<double>(extent.bytes) * extent.passes / (sample.median * 1e9),
          readers == 1 ? "TB/s" : "TB/s (to each of 2 blocks)",
          sample.spread_percent,
          expected,
          ""};
  set_sum_check(row, sum, extent.sum * static_cast<std::uint32_t>(extent.passes) * readers);
  report(row);
}

/// What should bind: the memory's rate, or as many bytes as are in flight in one latency.
std::string expected_bandwidth(bool large, double bytes_in_flight) {
  const double latency_us = large ? 0.8 : 0.45;
  const double by_latency = 132 * bytes_in_flight / latency_us * 1e-6;
  return fmt::format("{:.1f}", std::min(large ? 4.3 : 5.5, by_latency));
}

void run_bandwidth(const Report& report, const Source& source, const Extent& extent) {
  const unsigned blocks = open_gpu().multiprocessors;
  const bool large = extent.bytes == kLarge;
  const auto heads = static_cast<int>(kHeads);
  for (const unsigned rows : {64U, 128U})
    for (const unsigned stages : {2U, 3U, 4U}) {
      const auto tile_bytes = static_cast<unsigned>(rows * kRowBytes);
      const auto tiles = static_cast<int>(extent.bytes / tile_bytes);
      const unsigned shared = stages * tile_bytes + 1024;
      const std::uint64_t tokens = extent.bytes / kRowBytes / kHeads;
      const TensorMap whole = tensor_map({source.data.address(), tokens, kHeads, rows, 2});
      const TensorMap half = tensor_map({source.data.address(), tokens, kHeads, rows, 1});
      const std::string suffix = fmt::format("_{}_{}", stages, rows);
      const std::string size = fmt::format("{} KB, {} stages", tile_bytes / 1024, stages);
      const Kernel tensor = kernel(program(), "tensor" + suffix, shared);
      report_bandwidth(report, source, extent, "TMA loads of " + size,
                       expected_bandwidth(large, stages * tile_bytes), 1, [&] {
                         launch(tensor, {blocks, 160, shared}, whole, heads, tiles, extent.passes,
                                source.sums.address());
                       });
      const Kernel multicast = kernel(program(), "multicast" + suffix, shared);
      report_bandwidth(report, source, extent, "multicast to 2, " + size,
                       expected_bandwidth(large, stages * tile_bytes / 2.0), 2, [&] {
                         launch(multicast, {blocks & ~1U, 160, shared}, half, heads, tiles,
                                extent.passes, source.sums.address());
                       });
      const Kernel async = kernel(program(), "async" + suffix, shared);
      report_bandwidth(report, source, extent, "cp.async of " + size,
                       expected_bandwidth(large, (stages - 1.0) * tile_bytes), 1, [&] {
                         launch(async, {blocks, 128, shared}, source.data.address(), heads, tiles,
                                extent.passes, source.sums.address());
                       });
    }
  const Kernel loads = kernel(program(), "loads");
  for (const unsigned threads : {256U, 1024U})
    report_bandwidth(report, source, extent, fmt::format("ld.global.cg.v4, {} threads", threads),
                     expected_bandwidth(large, threads * 128.0), 1, [&] {
                       launch(loads, {blocks, threads}, source.data.address(),
                              static_cast<std::uint64_t>(extent.bytes / 16), extent.passes,
                              source.sums.address());
                     });
}

/// Sum over `count` tiles from `first` of [rows, 64 * halves] at the head of each.
std::uint32_t sum_of_boxes(unsigned rows, unsigned halves, int first, int count) {
  std::uint32_t sum = 0;
  for (int i = first; i < first + count; ++i)
    for (std::uint64_t row = 0; row < rows; ++row) {
      const std::uint64_t token = i / kHeads * rows + row;
      const std::uint64_t word = (token * kHeads + i % kHeads) * (kRowBytes / 4);
      for (std::uint64_t c = 0; c < halves * 32ULL; ++c)
        sum += hash(static_cast<std::uint32_t>(word + c));
    }
  return sum;
}

void report_latency(const Report& report, const std::string& what, const char* expected,
                    const Memory& clocks, int count, std::uint32_t sum, std::uint32_t wanted) {
  const auto counted = download<std::uint64_t>(clocks, static_cast<std::size_t>(count));
  // The first has the descriptor and the translation of addresses to fetch.
  const Sample sample = sample_of({counted.begin() + 8, counted.end()});
  Row row{"copies", what, sample.median, "clk", sample.spread_percent, expected, ""};
  set_sum_check(row, sum, wanted);
  report(row);
}

void run_latency(const Report& report, const Source& source) {
  constexpr int kCount = 96;
  const Memory clocks(kCount * sizeof(std::uint64_t));
  const Memory flush(std::size_t{256} << 20);
  const Kernel fill = kernel(program(), "fill");
  const auto empty_l2 = [&] {
    launch(fill, {open_gpu().multiprocessors * 4, 512}, flush.address(),
           static_cast<std::uint64_t>(flush.bytes() / 4));
  };
  const std::uint64_t tokens = kLarge / kRowBytes / kHeads;
  struct Box {
    unsigned rows;
    unsigned halves;
  };
  int first = 0;
  const Kernel latency = kernel(program(), "latency_tensor", 40 * 1024);
  for (const Box box : {Box{8, 1}, Box{64, 1}, Box{64, 2}, Box{128, 2}}) {
    const TensorMap map = tensor_map({source.data.address(), tokens, kHeads, box.rows, box.halves});
    const unsigned bytes = box.rows * box.halves * 128;
    first += 1024;
    const std::uint32_t wanted = sum_of_boxes(box.rows, box.halves, first, kCount);
    empty_l2();
    for (const char* from : {"HBM", "L2"}) {
      launch(latency, {1, 32, 40 * 1024}, map, static_cast<int>(kHeads), static_cast<int>(box.rows),
             bytes, first, kCount, clocks.address(), source.sums.address());
      report_latency(report, fmt::format("one TMA load of {} KB from {}", bytes / 1024, from),
                     from[0] == 'H' ? "1000 to 1500" : "600 to 900", clocks, kCount,
                     download<std::uint32_t>(source.sums, 1)[0], wanted);
    }
  }
  empty_l2();
  const Kernel load = kernel(program(), "latency_load");
  std::uint32_t wanted = 0;
  constexpr std::uint64_t kStride = 1024;  // in 16 bytes, so that each is another page of DRAM
  for (int i = 0; i < kCount; ++i)
    for (std::uint32_t c = 0; c < 4; ++c)
      wanted += hash(static_cast<std::uint32_t>(i * kStride * 4 + c));
  for (const char* from : {"HBM", "L2"}) {
    launch(load, {1, 1}, source.data.address(), kStride, 0, kCount, clocks.address(),
           source.sums.address());
    report_latency(report, fmt::format("one ld.global.cg.v4 from {}", from),
                   from[0] == 'H' ? "800" : "270", clocks, kCount,
                   download<std::uint32_t>(source.sums, 1)[0], wanted);
  }
}

}  // namespace

std::vector<Program> copy_programs() { return {program()}; }

void run_copies(const Report& report) {
  const Source source;
  run_latency(report, source);
  run_bandwidth(report, source, {"HBM", kLarge, 2, source.large_sum});
  run_bandwidth(report, source, {"L2", kSmall, 64, source.small_sum});
}

}  // namespace wyvern::hopper
