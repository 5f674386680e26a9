// What a warpgroup beside the state does for each chunk of 64: tril(Q·K^T ∘ decay) and
// beta ∘ strict tril(K·K^T ∘ decay) from tiles in shared memory, packed to bf16 into shared memory.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/benchmark/hopper/bench.hpp"

namespace wyvern::hopper {
namespace {

constexpr unsigned kSharedBytes = (16 + 16 + 2 * 16 + 1) * 1024;  // Q, K, results of two warpgroups

Program program() {
  return {"gram", R"CUDA(
using Rows = SwizzledTile<bf16, 64, 128>;
using Result = SwizzledTile<bf16, 64, 64>;
/// d = A·B^T, 64x64 over k = 128.
DEVICE void product(float (&d)[32], Rows a, Rows b) {
#pragma unroll
  for (int k = 0; k < 128; k += 16)
    wgmma<bf16, 64, Major::k, Major::k>(d, a.by_rows(0, k), b.by_rows(0, k), k > 0);
  wgmma_commit();
}
/// decay[i] = exp2(g[row] - g[column]) where the warp's rows reach; tiles right of them are left.
DEVICE void decays(float (&decay)[32], const float* g, int warp, int lane) {
  const float above = g[warp * 16 + lane / 4], below = g[warp * 16 + lane / 4 + 8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j > 2 * warp + 1) continue;
    const float2 at = *reinterpret_cast<const float2*>(g + j * 8 + lane % 4 * 2);
    decay[4 * j] = exp2_fast(above - at.x);
    decay[4 * j + 1] = exp2_fast(above - at.y);
    decay[4 * j + 2] = exp2_fast(below - at.x);
    decay[4 * j + 3] = exp2_fast(below - at.y);
  }
}
/// d ∘ decay ∘ scale of the row, what is right of the diagonal (STRICT: or on it) zero, to `tile`.
template <bool STRICT>
DEVICE void finish(float (&d)[32], const float (&decay)[32], float above, float below, Result tile,
                   int warp, int lane) {
  const int row = warp * 16 + lane / 4;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    u32 packed[4] = {0, 0, 0, 0};
    if (s <= warp) {
#pragma unroll
      for (int i = 8 * s; i < 8 * s + 8; ++i) {
        d[i] *= decay[i] * (i / 2 % 2 == 0 ? above : below);
        if (s == warp) {
          const int r = row + i / 2 % 2 * 8, c = i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (STRICT ? c >= r : c > r) d[i] = 0.f;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = pack<bf16>(d[8 * s + 2 * i], d[8 * s + 2 * i + 1]);
    }
    store_matrix_x4(tile.at(warp * 16 + lane % 16, 16 * s + lane / 16 * 8), packed);
  }
}
/// `in`: Q then K, each two tiles of 64 rows of 128 bytes. ONCE: both products take one set of
/// decays.
template <int PRODUCTS, bool ONCE>
DEVICE void gram(const uint4* in, const float* g_in, const float* beta_in, u32* out, int iterations,
                 u64* clocks) {
  __shared__ float g[64], beta[64];
  unsigned char* const base = tile_memory();
  const Rows q{base}, k{base + Rows::kBytes};
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  unsigned char* const results = base + 2 * Rows::kBytes + warpgroup * 2 * Result::kBytes;
  const Result p_tile{results}, a_tile{results + Result::kBytes};
  fill_tile(SwizzledTile<bf16, 256, 64>{base}, in, threadIdx.x, blockDim.x);
  if (threadIdx.x < 64) {
    g[threadIdx.x] = g_in[threadIdx.x];
    beta[threadIdx.x] = beta_in[threadIdx.x];
  }
  fence_proxy_async();
  __syncthreads();
  const u64 start = clocks_now();
  for (int it = 0; it < iterations; ++it) {
    float p[32], a[32], decay[32];
    wgmma_fence();
    product(p, q, k);
    if constexpr (PRODUCTS == 2) product(a, k, k);
    decays(decay, g, warp, lane);
    wgmma_wait<PRODUCTS - 1>();
    finish<false>(p, decay, 1.f, 1.f, p_tile, warp, lane);
    if constexpr (PRODUCTS == 2) {
      if constexpr (!ONCE) {
        asm volatile("" ::: "memory");
        decays(decay, g, warp, lane);
      }
      const float above = beta[warp * 16 + lane / 4], below = beta[warp * 16 + lane / 4 + 8];
      wgmma_wait<0>();
      finish<true>(a, decay, above, below, a_tile, warp, lane);
    }
    fence_proxy_async();
    sync_named(1 + warpgroup, 128);
  }
  __syncthreads();
  const u64 stop = clocks_now();
  if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
  const int which = blockIdx.x * (blockDim.x / 128) + warpgroup;
  uint4* mine = reinterpret_cast<uint4*>(out) + which * 1024;
  for (int i = threadIdx.x % 128; i < PRODUCTS * 512; i += 128)
    mine[i] = load_shared((i < 512 ? p_tile : a_tile).at(i / 8 % 64, i % 8 * 8));
}
#define GRAM(NAME, PRODUCTS, ONCE)                                                                \
  extern "C" __global__ __launch_bounds__(256, 1) void NAME(                                      \
      const uint4* in, const float* g, const float* beta, u32* out, int iterations, u64* clocks) {\
    gram<PRODUCTS, ONCE>(in, g, beta, out, iterations, clocks);                                   \
  }
GRAM(one, 1, true) GRAM(both, 2, false) GRAM(both_once, 2, true)
)CUDA"};
}

constexpr int kDepth = 128;

/// Q, K, running sums of gates and betas of one chunk.
struct Chunk {
  std::vector<float> q, k;
  std::vector<float> g, beta;
};

Chunk random_chunk() {
  Random random(23);
  Chunk chunk;
  float sum = 0;
  for (int i = 0; i < 64; ++i) {
    for (int c = 0; c < kDepth; ++c) {
      chunk.q.push_back(from_bf16(to_bf16(random.uniform(-0.1F, 0.2F))));
      chunk.k.push_back(from_bf16(to_bf16(random.uniform(-0.1F, 0.2F))));
    }
    sum += random.uniform(-0.2F, 0);
    chunk.g.push_back(sum);
    chunk.beta.push_back(random.uniform(0, 1));
  }
  return chunk;
}

/// Rows of 64 columns one half after the other, as the tiles lie.
void append_halves(std::vector<std::uint16_t>& words, const std::vector<float>& matrix) {
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 64; ++i)
      for (int c = 0; c < 64; ++c) words.push_back(to_bf16(matrix[i * kDepth + half * 64 + c]));
}

double error_of(const Chunk& chunk, const std::vector<std::uint16_t>& made, int products) {
  double largest = 0;
  for (int which = 0; which < products; ++which)
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 64; ++j) {
        double wanted = 0;
        if (which == 0 ? j <= i : j < i) {
          const std::vector<float>& left = which == 0 ? chunk.q : chunk.k;
          for (int c = 0; c < kDepth; ++c)
            wanted += double{left[i * kDepth + c]} * chunk.k[j * kDepth + c];
          wanted *= std::exp2(double{chunk.g[i]} - chunk.g[j]) * (which == 0 ? 1 : chunk.beta[i]);
        }
        const double error = std::fabs(from_bf16(made[(which * 64 + i) * 64 + j]) - wanted);
        if (!(error <= largest)) largest = error;
      }
  return largest;
}

}  // namespace

std::vector<Program> gram_programs() { return {program()}; }

void run_gram(const Report& report) {
  const unsigned blocks = open_gpu().multiprocessors;
  const Chunk chunk = random_chunk();
  std::vector<std::uint16_t> words;
  append_halves(words, chunk.q);
  append_halves(words, chunk.k);
  const auto in = upload(words);
  const auto g = upload(chunk.g);
  const auto beta = upload(chunk.beta);
  const Memory out(std::size_t{blocks} * 2 * 16384);
  const Memory clocks(blocks * sizeof(std::uint64_t));
  struct Way {
    const char* kernel;
    const char* name;
    int products;
    const char* expected;
  };
  constexpr int kIterations = 2000;
  for (const Way& way : {Way{"one", "tril(Q·K^T decay)", 1, "600"},
                         Way{"both", "that and beta tril(K·K^T decay)", 2, "1100"},
                         Way{"both_once", "both with one set of exponentials", 2, "900"}})
    for (unsigned warpgroups = 1; warpgroups <= 2; ++warpgroups) {
      const Kernel made = kernel(program(), way.kernel, kSharedBytes);
      const Sample sample = measure_clocks(clocks, blocks, [&] {
        launch(made, {blocks, warpgroups * 128, kSharedBytes}, in->address(), g->address(),
               beta->address(), out.address(), kIterations, clocks.address());
      });
      Row row{"gram",
              fmt::format("{}, {} warpgroup{} each with its own", way.name, warpgroups,
                          warpgroups == 1 ? "" : "s"),
              sample.median / (kIterations * warpgroups),
              "clk",
              sample.spread_percent,
              warpgroups == 1 ? way.expected : "",
              ""};
      set_check(row, error_of(chunk, download<std::uint16_t>(out, 2 * 64 * 64), way.products),
                1e-2);
      report(row);
    }
}

}  // namespace wyvern::hopper
