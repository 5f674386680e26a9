// Rates of wgmma by shape, operand and count of warpgroups, of mma.sync beside it, and what it
// costs to hand an accumulator to the next product through registers or through shared memory.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "tools/benchmark/hopper/bench.hpp"

namespace wyvern::hopper {
namespace {

constexpr unsigned kMostWarpgroups = 3;
constexpr unsigned kSharedBytes = (kMostWarpgroups * 8 + 32 + 1) * 1024;  // A tiles, B, alignment

enum class Operand { registers, shared };
enum class Element { bf16, tf32 };

const char* word(Operand a) {
  return a == Operand::registers ? "A in registers" : "A in shared memory";
}
const char* word(Element element) { return element == Element::bf16 ? "bf16 k16" : "tf32 k8"; }

/// As many as have registers for their accumulators and fragments.
unsigned most_warpgroups(int n, Operand a) {
  return n == 256 && a == Operand::registers ? 2 : kMostWarpgroups;
}

/// d += A·B^T over four steps of k, repeated: A is 64 rows of 128 bytes, B n rows of 128 bytes.
Program rate_program(int n, Operand a, Element element) {
  const bool in_registers = a == Operand::registers;
  const std::string settings = fmt::format(
      "constexpr int N = {};\nconstexpr bool BF16 = {}, REGISTERS = {};\nconstexpr int BOUND = "
      "{};\n",
      n, element == Element::bf16, in_registers, most_warpgroups(n, a) * 128);
  return {fmt::format("wgmma_n{}_{}_{}", n, in_registers ? "registers" : "shared",
                      element == Element::bf16 ? "bf16" : "tf32"),
          settings + R"CUDA(
/// wgmma() for tf32, which no template multiplies by warpgroups: a is 64 x 8, b 8 x N.
#define WGMMA_TF32(n, registers, a_text, b_at, ...)                                               \
  if constexpr (N == n)                                                                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" WYVERN_D##registers    \
               "}, " a_text ", %" #b_at ", 1, 1, 1;"                                              \
               : WYVERN_O##registers(0) : __VA_ARGS__, "l"(b.bits))
DEVICE void wgmma_tf32(float (&d)[N / 2], Descriptor a, Descriptor b) {
  WGMMA_TF32(64, 32, "%32", 33, "l"(a.bits));
  WGMMA_TF32(128, 64, "%64", 65, "l"(a.bits));
}
DEVICE void wgmma_tf32(float (&d)[N / 2], const u32 (&a)[4], Descriptor b) {
  WGMMA_TF32(64, 32, "{%32,%33,%34,%35}", 36, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
  WGMMA_TF32(128, 64, "{%64,%65,%66,%67}", 68, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
/// A as the registers of step `step` of k: words of a row that hold k = 2c, 2c+1 (tf32: k = c).
DEVICE void load_fragment(u32 (&f)[4], const u32* a, int step) {
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < 4; ++i)
    f[i] = a[(row + i % 2 * 8) * 32 + step * 8 + i / 2 * 4 + thread % 4];
}
template <int BATCH>
DEVICE void rate(const u32* a, const u32* b, float* out, int iterations, u64* clocks) {
  const int warpgroup = threadIdx.x / 128;
  // A step of k has 32 bytes of a row in either format: 16 columns of a 16-bit tile.
  const SwizzledTile<bf16, 64, 64> left{tile_memory() + warpgroup * 8192};
  const SwizzledTile<bf16, N, 64> right{tile_memory() + 3 * 8192};
  fill_tile(left, a, threadIdx.x % 128, 128);
  fill_tile(right, b, threadIdx.x, blockDim.x);
  fence_proxy_async();
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = 0;
  u32 fragments[4][4];
  if constexpr (REGISTERS)
    for (int i = 0; i < 4; ++i) load_fragment(fragments[i], a, i);
  __syncthreads();
  const u64 start = clocks_now();
  for (int it = 0; it < iterations; ++it) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int k = j % 4 * 16;
      if constexpr (BF16 && REGISTERS)
        wgmma<bf16, N, Major::k>(d, fragments[j % 4], right.by_rows(0, k), true);
      else if constexpr (BF16)
        wgmma<bf16, N, Major::k, Major::k>(d, left.by_rows(0, k), right.by_rows(0, k), true);
      else if constexpr (REGISTERS)
        wgmma_tf32(d, fragments[j % 4], right.by_rows(0, k));
      else
        wgmma_tf32(d, left.by_rows(0, k), right.by_rows(0, k));
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
  float* mine = out + (u64(blockIdx.x) * (blockDim.x / 128) + warpgroup) * 64 * N;
  for (int i = 0; i < N / 2; ++i)
    mine[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + thread % 4 * 2 + i % 2] = d[i];
}
#define RATE(BATCH)                                                                              \
  extern "C" __global__ __launch_bounds__(BOUND, 1) void rate_##BATCH(                             \
      const u32* a, const u32* b, float* out, int iterations, u64* clocks) {                     \
    rate<BATCH>(a, b, out, iterations, clocks);                                                  \
  }
RATE(1) RATE(4) RATE(16)
)CUDA"};
}

/// A row-major matrix of 128-byte rows, as words for the device and as numbers for the host.
struct Matrix {
  std::vector<std::uint32_t> words;
  std::vector<float> values;
};

Matrix random_matrix(int rows, Element element, Random& random) {
  Matrix m;
  for (int i = 0; i < rows * 32; ++i) {
    if (element == Element::bf16) {
      const std::uint16_t low = to_bf16(random.uniform(-1, 1));
      const std::uint16_t high = to_bf16(random.uniform(-1, 1));
      m.words.push_back(static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16);
      m.values.insert(m.values.end(), {from_bf16(low), from_bf16(high)});
    } else {
      const auto bits = std::bit_cast<std::uint32_t>(random.uniform(-1, 1)) & 0xffffe000U;
      m.words.push_back(bits);
      m.values.push_back(std::bit_cast<float>(bits));
    }
  }
  return m;
}

/// Largest error of `out` against A·B^T over `steps` steps of k, taken from the front in turn.
double product_error(const Matrix& a, const Matrix& b, int n, int steps, int step_width,
                     const std::vector<float>& out) {
  const int width = step_width * 4;
  double largest = 0;
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int s = 0; s < steps; ++s)
        for (int c = s % 4 * step_width; c < (s % 4 + 1) * step_width; ++c)
          sum += double{a.values[i * width + c]} * b.values[j * width + c];
      const double error = std::fabs(out[i * n + j] - sum) / steps;
      if (!(error <= largest)) largest = error;
    }
  return largest;
}

void run_wgmma_rates(const Report& report, int n, Operand operand, Element element) {
  const unsigned blocks = open_gpu().multiprocessors;
  Random random(11);
  const Matrix a = random_matrix(64, element, random);
  const Matrix b = random_matrix(n, element, random);
  const auto a_memory = upload(a.words);
  const auto b_memory = upload(b.words);
  const Memory out(std::size_t{blocks} * kMostWarpgroups * 64 * n * sizeof(float));
  const Memory clocks(blocks * sizeof(std::uint64_t));
  const int width = element == Element::bf16 ? 16 : 8;
  const unsigned most = most_warpgroups(n, operand);
  for (const int batch : {1, 4, 16}) {
    const Kernel rate =
        kernel(rate_program(n, operand, element), fmt::format("rate_{}", batch), kSharedBytes);
    const auto run = [&](unsigned grid, unsigned warpgroups, int iterations) {
      launch(rate, {grid, warpgroups * 128, kSharedBytes}, a_memory->address(), b_memory->address(),
             out.address(), iterations, clocks.address());
    };
    run(1, most, 1);
    const auto made = download<float>(out, std::size_t{most} * 64 * n);
    double error = 0;
    for (unsigned w = 0; w < most; ++w) {
      const auto first = made.begin() + w * 64 * n;
      error = std::max(error, product_error(a, b, n, batch, width, {first, first + 64 * n}));
    }
    const int iterations = 8000 / batch;
    for (unsigned warpgroups = 1; warpgroups <= most; ++warpgroups) {
      if (batch != 16 && warpgroups != 1) continue;
      const Sample sample =
          measure_clocks(clocks, blocks, [&] { run(blocks, warpgroups, iterations); });
      Row row{"tensor_cores",
              fmt::format("wgmma m64n{} {}, {}, batches of {}, {} warpgroup{}", n, word(element),
                          word(operand), batch, warpgroups, warpgroups == 1 ? "" : "s"),
              sample.median / (static_cast<double>(iterations) * batch * warpgroups),
              "clk",
              sample.spread_percent,
              batch == 1 ? "60 to 128" : fmt::format("{}", n / 2),
              ""};
      set_check(row, error, element == Element::bf16 ? 1e-4 : 1e-3);
      report(row);
    }
  }
}

/// Eight accumulators of 16x8 a warp, all with one A.
Program mma_program() {
  return {"mma_sync", R"CUDA(
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_m16n8k16<bf16>(d, a, b0, b1);
}
DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const float left[4] = {bits_float(a[0]), bits_float(a[1]), bits_float(a[2]), bits_float(a[3])};
  mma_m16n8k8_tf32(d, left, bits_float(b0), bits_float(b1));
}
#define MMA_RATE(NAME, INSTRUCTION)                                                               \
  extern "C" __global__ __launch_bounds__(512, 1) void NAME(const u32* a, const u32* b,           \
                                                            float* out, int iterations,           \
                                                            u64* clocks) {                        \
    const int lane = threadIdx.x % 32;                                                            \
    float d[8][4];                                                                                \
    u32 left[4], right[8][2];                                                                     \
    for (int i = 0; i < 4; ++i) left[i] = a[(lane / 4 + i % 2 * 8) * 32 + i / 2 * 4 + lane % 4];  \
    for (int n = 0; n < 8; ++n)                                                                   \
      for (int i = 0; i < 2; ++i) right[n][i] = b[(n * 8 + lane / 4) * 32 + i * 4 + lane % 4];    \
    for (int n = 0; n < 8; ++n)                                                                   \
      for (int i = 0; i < 4; ++i) d[n][i] = 0;                                                    \
    __syncthreads();                                                                              \
    const u64 start = clocks_now();                                                               \
    for (int it = 0; it < iterations; ++it)                                                       \
      _Pragma("unroll") for (int n = 0; n < 8; ++n)                                               \
          INSTRUCTION(d[n], left, right[n][0], right[n][1]);                                      \
    __syncthreads();                                                                              \
    const u64 stop = clocks_now();                                                                \
    if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;                                      \
    float* mine = out + (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 16 * 64;            \
    for (int n = 0; n < 8; ++n)                                                                   \
      for (int i = 0; i < 4; ++i)                                                                 \
        mine[(lane / 4 + i / 2 * 8) * 64 + n * 8 + lane % 4 * 2 + i % 2] = d[n][i];               \
  }
MMA_RATE(rate_bf16, mma_bf16)
MMA_RATE(rate_tf32, mma_tf32)
)CUDA"};
}

void run_mma_rates(const Report& report, Element element) {
  const unsigned blocks = open_gpu().multiprocessors;
  Random random(13);
  const Matrix a = random_matrix(64, element, random);
  const Matrix b = random_matrix(64, element, random);
  const auto a_memory = upload(a.words);
  const auto b_memory = upload(b.words);
  constexpr unsigned kMostWarps = 16;
  const Memory out(std::size_t{blocks} * kMostWarps * 16 * 64 * sizeof(float));
  const Memory clocks(blocks * sizeof(std::uint64_t));
  const bool bf16 = element == Element::bf16;
  const Kernel rate = kernel(mma_program(), bf16 ? "rate_bf16" : "rate_tf32");
  const auto run = [&](unsigned grid, unsigned warps, int iterations) {
    launch(rate, {grid, warps * 32}, a_memory->address(), b_memory->address(), out.address(),
           iterations, clocks.address());
  };
  run(1, 4, 1);
  std::vector<float> made = download<float>(out, 16 * 64);
  const int width = bf16 ? 16 : 8;
  double error = 0;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 64; ++j) {
      double sum = 0;
      for (int c = 0; c < width; ++c)
        sum += double{a.values[i * width * 4 + c]} * b.values[j * width * 4 + c];
      const double apart = std::fabs(made[i * 64 + j] - sum);
      if (!(apart <= error)) error = apart;
    }
  constexpr int kIterations = 8000;
  for (const unsigned warps : {4U, 8U, kMostWarps}) {
    const Sample sample = measure_clocks(clocks, blocks, [&] { run(blocks, warps, kIterations); });
    // As long as one m64n64 of wgmma: 32 of the small products.
    Row row{"tensor_cores",
            fmt::format("mma.sync m16n8 {}, {} warps: 32 of them (64x64)", word(element), warps),
            32 * sample.median / (8.0 * kIterations * warps),
            "clk",
            sample.spread_percent,
            "",
            ""};
    set_check(row, error, 1e-4);
    report(row);
  }
}

/// D = bf16(D)·Q^T again and again, Q orthogonal so that D keeps its size. Variants: nothing but
/// packing and the product, the packed D through shared memory (stmatrix, fence, barrier), parts of
/// that to see what each costs, and the product alone with no packing. Without its fence the
/// product reads what was there before: that variant only tells what the fence costs.
Program hand_over_program() {
  return {"hand_over", R"CUDA(
enum class Way { registers, fence, barrier, no_fence, shared, product_alone };
constexpr bool uses_shared(Way way) { return way == Way::shared || way == Way::no_fence; }
template <Way WAY>
DEVICE void hand_over(const float* d0, const u32* q, float* out, int iterations, u64* clocks) {
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  using Tile = SwizzledTile<bf16, 64, 64>;
  const Tile tile{tile_memory() + warpgroup * Tile::kBytes};
  const Tile right{tile_memory() + 3 * Tile::kBytes};
  fill_tile(right, q, threadIdx.x, blockDim.x);
  fence_proxy_async();
  const int row = thread / 32 * 16 + lane / 4;
  float d[32];
  for (int i = 0; i < 32; ++i)
    d[i] = d0[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2];
  u32 packed[4][4];
  for (int i = 0; i < 16; ++i) packed[i / 4][i % 4] = pack<bf16>(d[2 * i], d[2 * i + 1]);
  __syncthreads();
  const u64 start = clocks_now();
  for (int it = 0; it < iterations; ++it) {
    if constexpr (WAY != Way::product_alone) {
#pragma unroll
      for (int i = 0; i < 16; ++i) packed[i / 4][i % 4] = pack<bf16>(d[2 * i], d[2 * i + 1]);
    }
    if constexpr (uses_shared(WAY)) {
#pragma unroll
      for (int s = 0; s < 4; ++s)
        store_matrix_x4(tile.at(thread / 32 * 16 + lane % 16, 16 * s + lane / 16 * 8), packed[s]);
    }
    if constexpr (WAY == Way::shared || WAY == Way::fence) fence_proxy_async();
    if constexpr (uses_shared(WAY) || WAY == Way::barrier) sync_named(1 + warpgroup, 128);
    // What is packed is in its registers before the tensor cores are let at them.
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s)
      if constexpr (uses_shared(WAY))
        wgmma<bf16, 64, Major::k, Major::k>(d, tile.by_rows(0, 16 * s), right.by_rows(0, 16 * s),
                                            s > 0);
      else
        wgmma<bf16, 64, Major::k>(d, packed[s], right.by_rows(0, 16 * s),
                                  WAY == Way::product_alone || s > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
  }
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  float* mine = out + (u64(blockIdx.x) * (blockDim.x / 128) + warpgroup) * 64 * 64;
  for (int i = 0; i < 32; ++i)
    mine[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
#define HAND_OVER(WAY)                                                                            \
  extern "C" __global__ __launch_bounds__(384, 1) void by_##WAY(                                  \
      const float* d0, const u32* q, float* out, int iterations, u64* clocks) {                   \
    hand_over<Way::WAY>(d0, q, out, iterations, clocks);                                          \
  }
HAND_OVER(registers) HAND_OVER(fence) HAND_OVER(barrier) HAND_OVER(no_fence) HAND_OVER(shared)
HAND_OVER(product_alone)
)CUDA"};
}

/// I - 2 u u^T, rounded to bf16: orthogonal but for the rounding.
std::vector<float> reflection(Random& random) {
  std::vector<double> u(64);
  double norm = 0;
  for (double& x : u) {
    x = random.uniform(-1, 1);
    norm += x * x;
  }
  std::vector<float> q(64 * 64);
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < 64; ++j)
      q[i * 64 + j] =
          from_bf16(to_bf16(static_cast<float>((i == j ? 1.0 : 0.0) - 2 * u[i] * u[j] / norm)));
  return q;
}

/// What the device makes of d in `steps` rounds, d rounded to bf16 before each if `rounded`.
std::vector<double> host_rounds(std::vector<double> d, const std::vector<float>& q, int steps) {
  for (int s = 0; s < steps; ++s) {
    std::vector<double> next(64 * 64, 0.0);
    for (int i = 0; i < 64; ++i)
      for (int c = 0; c < 64; ++c) {
        const double x = from_bf16(to_bf16(static_cast<float>(d[i * 64 + c])));
        for (int j = 0; j < 64; ++j) next[i * 64 + j] += x * q[j * 64 + c];
      }
    d = next;
  }
  return d;
}

void run_hand_over(const Report& report) {
  const unsigned blocks = open_gpu().multiprocessors;
  Random random(17);
  std::vector<float> d0(64 * 64);
  for (float& x : d0) x = random.uniform(-1, 1);
  const std::vector<float> q = reflection(random);
  std::vector<std::uint16_t> q_bits;
  for (const float x : q) q_bits.push_back(to_bf16(x));
  const auto d_memory = upload(d0);
  const auto q_memory = upload(q_bits);
  const Memory out(std::size_t{blocks} * kMostWarpgroups * 64 * 64 * sizeof(float));
  const Memory clocks(blocks * sizeof(std::uint64_t));
  struct Way {
    const char* kernel;
    const char* name;
    const char* expected;
  };
  for (const Way& way :
       {Way{"by_product_alone", "product alone", "128 and latency"},
        Way{"by_registers", "pack, product from registers", ""},
        Way{"by_fence", "pack, fence.proxy.async, product from registers", ""},
        Way{"by_barrier", "pack, barrier, product from registers", ""},
        Way{"by_no_fence", "pack, stmatrix, barrier, product from shared memory", ""},
        Way{"by_shared", "pack, stmatrix, fence, barrier, product from shared memory", ""}}) {
    const Kernel chain = kernel(hand_over_program(), way.kernel, kSharedBytes);
    const auto run = [&](unsigned grid, unsigned warpgroups, int iterations) {
      launch(chain, {grid, warpgroups * 128, kSharedBytes}, d_memory->address(),
             q_memory->address(), out.address(), iterations, clocks.address());
    };
    const bool alone = std::string(way.kernel) == "by_product_alone";
    const int rounds = alone ? 1 : 3;
    run(1, 1, rounds);
    const auto made = download<float>(out, 64 * 64);
    const std::vector<double> wanted = host_rounds({d0.begin(), d0.end()}, q, rounds);
    double error = 0;
    for (int i = 0; i < 64 * 64; ++i) {
      const double apart = std::fabs(made[i] - wanted[i] - (alone ? double{d0[i]} : 0.0));
      if (!(apart <= error)) error = apart;
    }
    constexpr int kIterations = 4000;
    for (unsigned warpgroups = 1; warpgroups <= 2; ++warpgroups) {
      const Sample sample =
          measure_clocks(clocks, blocks, [&] { run(blocks, warpgroups, kIterations); });
      Row row{"tensor_cores",
              fmt::format("64x64x64 chain, {}, {} warpgroup{}", way.name, warpgroups,
                          warpgroups == 1 ? "" : "s"),
              sample.median / kIterations,
              "clk",
              sample.spread_percent,
              way.expected,
              ""};
      if (std::string(way.kernel) == "by_no_fence")
        row.check = error <= 2e-2 ? "unordered, right this time" : "unordered, and wrong";
      else
        set_check(row, error, 2e-2);
      report(row);
    }
  }
}

struct Variant {
  int n;
  Operand operand;
  Element element;
};

std::vector<Variant> variants() {
  std::vector<Variant> list;
  for (const int n : {64, 128, 256})
    for (const Operand operand : {Operand::registers, Operand::shared})
      list.push_back({n, operand, Element::bf16});
  for (const int n : {64, 128})
    for (const Operand operand : {Operand::registers, Operand::shared})
      list.push_back({n, operand, Element::tf32});
  return list;
}

}  // namespace

std::vector<Program> tensor_core_programs() {
  std::vector<Program> list;
  for (const Variant& v : variants()) list.push_back(rate_program(v.n, v.operand, v.element));
  list.push_back(mma_program());
  list.push_back(hand_over_program());
  return list;
}

void run_tensor_cores(const Report& report) {
  for (const Variant& v : variants()) run_wgmma_rates(report, v.n, v.operand, v.element);
  run_mma_rates(report, Element::bf16);
  run_mma_rates(report, Element::tf32);
  run_hand_over(report);
}

}  // namespace wyvern::hopper
