// Inverses of 64x64 unit lower triangular matrices by one warpgroup: the four diagonal blocks of 16
// by substitution in fp32 with a lane for each column, then 16 to 32 to 64 by
// X21 = -X22 A21 X11 with mma.sync in fp16, fp32 accumulators.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/benchmark/hopper/bench.hpp"

namespace wyvern::hopper {
namespace {

constexpr unsigned kMostWarpgroups = 4;
constexpr unsigned kBytesEach = 64 * 144 * 2 + 4 * 16 * 16 * 4;  // A, X, diagonal blocks

Program program() {
  return {"inverse", R"CUDA(
constexpr u32 ROW = 144;  // bytes of a row of 64 fp16 and 16 more, so that 8 rows hit all banks
constexpr u32 X = 64 * ROW;  // from a to its inverse x

/// X21 (16x8 at column 8 of `half`) = -X22 A21 X11 of the 32x32 block at (corner, corner).
DEVICE void join_16(char* a, int corner, int half, int lane) {
  const u32 at_row = (lane % 16) * ROW, at_column = lane / 16 * 16;
  u32 left[4], right[4];
  load_matrix_x4(left, a + X + (corner + 16) * ROW + at_row + (corner + 16) * 2 + at_column);
  load_matrix_x4_transposed(right, a + (corner + 16) * ROW + at_row + corner * 2 + at_column);
  float u[2][4] = {};
  mma_m16n8k16<fp16>(u[0], left, right[0], right[1]);
  mma_m16n8k16<fp16>(u[1], left, right[2], right[3]);
  const u32 negated[4] = {pack<fp16>(-u[0][0], -u[0][1]), pack<fp16>(-u[0][2], -u[0][3]),
                          pack<fp16>(-u[1][0], -u[1][1]), pack<fp16>(-u[1][2], -u[1][3])};
  load_matrix_x4_transposed(right, a + X + corner * ROW + at_row + corner * 2 + at_column);
  float d[4] = {};
  mma_m16n8k16<fp16>(d, negated, half == 0 ? right[0] : right[2], half == 0 ? right[1] : right[3]);
  char* const to = a + X + (corner + 16 + lane / 4) * ROW + (corner + half * 8 + lane % 4 * 2) * 2;
  store_shared(to, pack<fp16>(d[0], d[1]));
  store_shared(to + 8 * ROW, pack<fp16>(d[2], d[3]));
}

/// Rows 16 of `strip`, columns 16 of `half` of X21 = -X22 A21 X11, blocks of 32.
DEVICE void join_32(char* a, int strip, int half, int lane) {
  const u32 at_row = (lane % 16) * ROW, at_column = lane / 16 * 16;
  u32 left[4], right[4];
  float u[4][4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k > strip) break;  // X22 is lower triangular
    load_matrix_x4(left, a + X + (32 + 16 * strip) * ROW + at_row + (32 + 16 * k) * 2 + at_column);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      load_matrix_x4_transposed(right, a + (32 + 16 * k) * ROW + at_row + n * 32 + at_column);
      mma_m16n8k16<fp16>(u[2 * n], left, right[0], right[1]);
      mma_m16n8k16<fp16>(u[2 * n + 1], left, right[2], right[3]);
    }
  }
  float d[2][4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k < half) continue;  // X11 too
    const float(&even)[4] = u[2 * k], (&odd)[4] = u[2 * k + 1];
    const u32 negated[4] = {pack<fp16>(-even[0], -even[1]), pack<fp16>(-even[2], -even[3]),
                            pack<fp16>(-odd[0], -odd[1]), pack<fp16>(-odd[2], -odd[3])};
    load_matrix_x4_transposed(right, a + X + 16 * k * ROW + at_row + half * 32 + at_column);
    mma_m16n8k16<fp16>(d[0], negated, right[0], right[1]);
    mma_m16n8k16<fp16>(d[1], negated, right[2], right[3]);
  }
  char* const to = a + X + (32 + 16 * strip + lane / 4) * ROW + (16 * half + lane % 4 * 2) * 2;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    store_shared(to + n * 16, pack<fp16>(d[n][0], d[n][1]));
    store_shared(to + n * 16 + 8 * ROW, pack<fp16>(d[n][2], d[n][3]));
  }
}

/// The inverse of a 16x16 block whose fp32 columns lie at `block`, by columns from the left, so
/// that each step has one multiply-add of latency; both half-warps do the same.
DEVICE void invert_16(const float* block, char* x, int corner, int lane) {
  const int column = lane % 16;
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int k = 0; k < 15; ++k)
#pragma unroll
    for (int i = (k + 1) / 4 * 4; i < 16; i += 4) {
      const uint4 a = load_shared(block + k * 16 + i);
      if (i > k) v[i] -= __uint_as_float(a.x) * v[k];
      if (i + 1 > k) v[i + 1] -= __uint_as_float(a.y) * v[k];
      if (i + 2 > k) v[i + 2] -= __uint_as_float(a.z) * v[k];
      v[i + 3] -= __uint_as_float(a.w) * v[k];
    }
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const u16 half = u16(pack<fp16>(v[i], 0.f));
      store_shared(x + (corner + i) * ROW + (corner + column) * 2, half);
    }
}

/// `in`: fp32 [64, 64], what stands below the diagonal; `out`: the inverse, as fp32.
/// STEPS of three: blocks of 16, then of 32, then the whole.
template <int STEPS>
DEVICE void invert(const float* in, float* out, int iterations, u64* clocks) {
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  char* const a = reinterpret_cast<char*>(shared_memory()) + warpgroup * (128 * ROW + 4096);
  char* const x = a + X;
  u16* a_values = reinterpret_cast<u16*>(a);
  u16* x_values = reinterpret_cast<u16*>(x);
  float* blocks = reinterpret_cast<float*>(a + 128 * ROW);
  for (int i = thread; i < 4096; i += 128) {
    const int row = i / 64, column = i % 64;
    a_values[row * 72 + column] = u16(pack<fp16>(row > column ? in[i] : 0.f, 0.f));
    x_values[row * 72 + column] = 0;
    if (row / 16 == column / 16) blocks[column * 16 + row % 16] = row > column ? in[i] : 0.f;
  }
  const float* const block = blocks + warp * 256;
  __syncthreads();
  const u64 start = clocks_now();
  for (int it = 0; it < iterations; ++it) {
    invert_16(block, x, warp * 16, lane);
    sync_named(1 + 2 * warpgroup + warp / 2, 64);
    if constexpr (STEPS > 1) join_16(a, warp / 2 * 32, warp % 2, lane);
    sync_named(9 + warpgroup, 128);
    if constexpr (STEPS > 2) join_32(a, warp / 2, warp % 2, lane);
    sync_named(9 + warpgroup, 128);
  }
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  for (int i = thread; i < 4096; i += 128) {
    out[(blockIdx.x * (blockDim.x / 128) + warpgroup) * 4096 + i] =
        to_float(fp16{x_values[i / 64 * 72 + i % 64]});
  }
}
#define INVERT(STEPS)                                                                             \
  extern "C" __global__ __launch_bounds__(512) void invert_##STEPS(                               \
      const float* in, float* out, int iterations, u64* clocks) {                                 \
    invert<STEPS>(in, out, iterations, clocks);                                                   \
  }
INVERT(1) INVERT(2) INVERT(3)
)CUDA"};
}

/// Below the diagonal, as K·K^T of unit rows times beta leaves it.
std::vector<float> random_lower(Random& random) {
  constexpr int kDepth = 128;
  std::vector<double> keys(64 * kDepth);
  for (int i = 0; i < 64; ++i) {
    double norm = 0;
    for (int c = 0; c < kDepth; ++c) {
      const double value = random.uniform(-0.6F, 1);  // not centred, so rows resemble each other
      keys[i * kDepth + c] = value;
      norm += value * value;
    }
    for (int c = 0; c < kDepth; ++c) keys[i * kDepth + c] /= std::sqrt(norm);
  }
  std::vector<float> lower(64 * 64, 0.0F);
  for (int i = 0; i < 64; ++i) {
    const float beta = random.uniform(0.1F, 1);
    for (int j = 0; j < i; ++j) {
      double dot = 0;
      for (int c = 0; c < kDepth; ++c) dot += keys[i * kDepth + c] * keys[j * kDepth + c];
      lower[i * 64 + j] = beta * static_cast<float>(dot);
    }
  }
  return lower;
}

std::vector<double> inverse_of(const std::vector<float>& lower) {
  std::vector<double> x(64 * 64, 0.0);
  for (int i = 0; i < 64; ++i) {
    x[i * 64 + i] = 1;
    for (int j = 0; j < i; ++j)
      for (int k = j; k < i; ++k) x[i * 64 + j] -= lower[i * 64 + k] * x[k * 64 + j];
  }
  return x;
}

}  // namespace

std::vector<Program> inverse_programs() { return {program()}; }

void run_inverse(const Report& report) {
  const unsigned blocks = open_gpu().multiprocessors;
  Random random(19);
  const std::vector<float> lower = random_lower(random);
  const std::vector<double> wanted = inverse_of(lower);
  const auto in = upload(lower);
  const Memory out(std::size_t{blocks} * kMostWarpgroups * 4096 * sizeof(float));
  const Memory clocks(blocks * sizeof(std::uint64_t));
  constexpr int kIterations = 2000;
  const auto measure = [&](int steps, unsigned warpgroups) {
    const Kernel invert =
        kernel(program(), fmt::format("invert_{}", steps), kMostWarpgroups * kBytesEach);
    return measure_clocks(clocks, blocks, [&] {
      launch(invert, {blocks, warpgroups * 128, warpgroups * kBytesEach}, in->address(),
             out.address(), kIterations, clocks.address());
    });
  };
  for (unsigned warpgroups = 1; warpgroups <= kMostWarpgroups; warpgroups *= 2) {
    const Sample sample = measure(3, warpgroups);
    const auto made = download<float>(out, std::size_t{blocks} * warpgroups * 4096);
    double error = 0;
    for (std::size_t i = 0; i < made.size(); ++i) {
      const double apart = std::fabs(made[i] - wanted[i % 4096]);
      if (!(apart <= error)) error = apart;
    }
    Row row{"inverse",
            fmt::format("64x64, {} warpgroup{} each with its own", warpgroups,
                        warpgroups == 1 ? "" : "s"),
            sample.median / (kIterations * warpgroups),
            "clk/inverse",
            sample.spread_percent,
            warpgroups == 1 ? "700" : "",
            ""};
    set_check(row, error, 2e-3);
    report(row);
  }
  for (const int steps : {1, 2}) {
    const Sample sample = measure(steps, 1);
    report({"inverse",
            fmt::format("of it, 1 warpgroup, to the end of blocks of {}", steps == 1 ? 16 : 32),
            sample.median / kIterations, "clk/inverse", sample.spread_percent, "", ""});
  }
}

}  // namespace wyvern::hopper
