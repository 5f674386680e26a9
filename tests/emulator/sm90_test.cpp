// Hopper's instructions and what is built over them (templates/device/cuda/sm90), by kernels of
// this test's own: on the emulator against plain loops, misused where that must show, and compiled
// for sm_90a, so that both ptx.cuh files have what the kernels use.
#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "compiler/backend.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/tensor.hpp"
#include "tests/support/host_tensor.hpp"

namespace wyvern::emulator {
namespace {

using testing::Engine;
using testing::HostTensor;

/// Compiles for Hopper where there is a compiler; that it spills or serializes products is an
/// error.
void expect_compiles(const std::string& source) {
  if (!compiler_problem(DeviceKind::cuda).empty()) return;
  const detail::Code code =
      detail::compile_source(expand(source), "test kernel", cuda_target("sm_90a"));
  EXPECT_EQ(code.resources.spill_bytes, 0);
}

void run(const std::string& source, std::int64_t threads, std::int64_t shared_bytes,
         const std::vector<void*>& arguments, Schedule schedule) {
  emulate(source, Geometry{.threads = threads, .shared_bytes = shared_bytes}, Extents{}, arguments,
          schedule);
}

constexpr Schedule kSchedules[] = {Schedule::first_warp, Schedule::last_warp};

// ---- products -----------------------------------------------------------------------------------

/// out = c + a b^T for a of 64 x D, b of N x D; tiles hold them from row FIRST_A or FIRST_B and
/// depth DEPTH on, along the columns with Major::k, down the rows with Major::mn.
constexpr const char* kProduct = R"(
#include "device/cuda/sm90/product.cuh"
using namespace wyvern::cuda::sm90;
template <Major M, int Rows, int First>
struct Placed {
  static constexpr int kAcross = round_up(First + Rows, 64);
  static constexpr int kDeep = round_up(DEPTH + D, 64);
  static constexpr bool kByRows = M == Major::k;
  using Tile = SwizzledTile<T, kByRows ? kAcross : kDeep, kByRows ? kDeep : kAcross>;
  static void fill(const Tile& tile, const T* from) {
    for (int i = thread_index(); i < Rows * D; i += 128) {
      const int row = First + i / D;
      const int depth = DEPTH + i % D;
      *(kByRows ? tile.at(row, depth) : tile.at(depth, row)) = from[i];
    }
  }
};
#undef WYVERN_PARAMETERS
#define WYVERN_PARAMETERS const T* a, const T* b, const float* c, float* out, Extents e
WYVERN_KERNEL(128, 1) {
  using A = Placed<A_MAJOR, 64, FIRST_A>;
  using B = Placed<B_MAJOR, N, FIRST_B>;
  const typename A::Tile left{swizzled_memory()};
  const typename B::Tile right{swizzled_memory() + A::Tile::kBytes};
  A::fill(left, a);
  B::fill(right, b);
  fence_proxy_async();
  sync_block();
  Accumulator<N> sum;
  for (int i = 0; i < sum.kCount; ++i) sum.x[i] = c[sum.row(i) * N + sum.col(i)];
  const Operand<A_MAJOR, typename A::Tile> a_operand{left, FIRST_A, DEPTH};
  const Operand<B_MAJOR, typename B::Tile> b_operand{right, FIRST_B, DEPTH};
  if constexpr (IN_REGISTERS) {
    Accumulator<D> numbers;
    for (int i = 0; i < numbers.kCount; ++i)
      numbers.x[i] = to_float(a[numbers.row(i) * D + numbers.col(i)]);
    FragmentA<T, D> operand(numbers);
    begin_products(sum);
    multiply(sum, operand, b_operand, true);
    wgmma_commit();
    end_products<0>(sum);
    operand.hold();
  } else {
    begin_products(sum);
    multiply<D>(sum, a_operand, b_operand, true);
    wgmma_commit();
    end_products<0>(sum);
  }
  for (int i = 0; i < sum.kCount; ++i) out[sum.row(i) * N + sum.col(i)] = sum.x[i];
}
)";

struct ProductCase {
  DType dtype;
  int N, D;
  bool a_mn, b_mn, in_registers;
  int first_a, first_b, depth;
};

std::string product_source(const ProductCase& p) {
  return fmt::format(
             "using T = {}; constexpr int N = {}, D = {}, FIRST_A = {}, FIRST_B = {}, DEPTH = {};\n"
             "constexpr bool IN_REGISTERS = {};\n"
             "#define A_MAJOR Major::{}\n#define B_MAJOR Major::{}\n",
             to_string(p.dtype), p.N, p.D, p.first_a, p.first_b, p.depth, p.in_registers,
             p.a_mn ? "mn" : "k", p.b_mn ? "mn" : "k") +
         kProduct;
}

void expect_product(const ProductCase& p) {
  SCOPED_TRACE(fmt::format("{} N={} D={} A {} B {} from {}, {}, depth {}", to_string(p.dtype), p.N,
                           p.D,
                           p.in_registers ? "in registers"
                           : p.a_mn       ? "mn"
                                          : "k",
                           p.b_mn ? "mn" : "k", p.first_a, p.first_b, p.depth));
  Engine engine(static_cast<std::uint64_t>(p.N + p.D));
  const HostTensor a = testing::normal(engine, p.dtype, {64, p.D});
  const HostTensor b = testing::normal(engine, p.dtype, {p.N, p.D});
  const HostTensor c = testing::normal(engine, DType::fp32, {64, p.N});
  std::vector<double> expected(static_cast<std::size_t>(64 * p.N));
  for (int row = 0; row < 64; ++row)
    for (int col = 0; col < p.N; ++col) {
      double& sum = expected[static_cast<std::size_t>(row * p.N + col)];
      sum = c.at(row * p.N + col);
      for (int k = 0; k < p.D; ++k) sum += a.at(row * p.D + k) * b.at(col * p.D + k);
    }
  const std::string source = product_source(p);
  for (const Schedule schedule : kSchedules) {
    HostTensor out(DType::fp32, {64, p.N});
    out.poison(testing::kNanPoison);
    run(source, 128, 160 * 1024, {a.data(), b.data(), c.data(), out.data()}, schedule);
    EXPECT_LT(testing::rms_error(out, expected), 1e-6);
  }
}

TEST(Wgmma, EveryShapeAndOperand) {
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int N : {16, 32, 64, 128, 256})
      for (const auto& [a_mn, b_mn, in_registers] :
           {std::tuple{false, false, false}, {true, true, false}, {false, true, true}})
        expect_product({dtype, N, 64, a_mn, b_mn, in_registers, 0, 0, 0});
}

TEST(Wgmma, PartsOfTiles) {
  expect_product({DType::bf16, 32, 128, false, false, false, 64, 8, 0});
  expect_product({DType::bf16, 32, 64, false, false, true, 0, 16, 48});
  expect_product({DType::fp16, 32, 64, true, true, false, 64, 16, 48});
  expect_product({DType::bf16, 128, 128, true, false, false, 64, 0, 16});
  expect_product({DType::bf16, 128, 64, false, true, false, 8, 64, 0});
}

TEST(Wgmma, CompilesForHopper) {
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int N : {16, 32, 64, 128, 256}) {
      expect_compiles(product_source({dtype, N, 64, true, true, false, 0, 0, 0}));
      expect_compiles(product_source({dtype, N, 64, false, false, true, 0, 0, 0}));
    }
}

/// Reads accumulators of a product that runs: ptxas makes the products wait for one another.
TEST(Wgmma, SerializedProductsAreACompileError) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  constexpr const char* kSource = R"(
#include "device/cuda/sm90/product.cuh"
using namespace wyvern::cuda::sm90;
#undef WYVERN_PARAMETERS
#define WYVERN_PARAMETERS float* out, Extents e
WYVERN_KERNEL(128, 1) {
  const SwizzledTile<bf16, 64, 64> tile{swizzled_memory()};
  Accumulator<64> sum;
  wgmma_fence();
  multiply<64>(sum, rows_of(tile), rows_of(tile), false);
  wgmma_commit();
  for (int i = 0; i < sum.kCount; ++i) out[i * 128 + thread_index()] = sum.x[i];
  wgmma_wait<0>();
}
)";
  try {
    expect_compiles(kSource);
    FAIL() << "it compiles";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("(C75"), std::string::npos) << error.what();
  }
}

// ---- TMA copies ---------------------------------------------------------------------------------

/// Copies the box at (`column`, `token`, ...) to shared memory and from there to `out`.
constexpr const char* kLoad = R"(
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/tile.cuh"
using namespace wyvern::cuda::sm90;
using Box = SwizzledTile<bf16, 32, 128>;
#undef WYVERN_PARAMETERS
#define WYVERN_PARAMETERS const __grid_constant__ TensorMap map, const int* what, bf16* out, Extents e
WYVERN_KERNEL(32, 1) {
  const int rank = what[0];
  const int token = what[1];
  const bool swizzle = what[2] != 0;
  const Box tile{swizzled_memory()};
  Barrier* const arrived = reinterpret_cast<Barrier*>(swizzled_memory() + Box::kBytes);
  if (thread_index() == 0) {
    prefetch(map);
    barrier_init(arrived, 1);
    fence_barrier_init();
    barrier_arrive_expect(arrived, Box::kBytes);
    if (rank == 2) {
      tensor_load(tile.data, map, {0, token}, arrived);
      tensor_load(tile.data + Box::kPanelBytes, map, {64, token}, arrived);
    } else if (rank == 3) {
      tensor_load(tile.data, map, {0, token, 0}, arrived);
    } else {
      tensor_load(tile.data, map, {0, token, 0, 1}, arrived);
    }
  }
  sync_block();
  barrier_wait(arrived, 0);
  const bf16* const plain = reinterpret_cast<const bf16*>(tile.data);
  for (int i = thread_index(); i < 32 * 128; i += 32) {
    const int row = i / 128;
    const int col = i % 128;
    out[i] = swizzle ? *tile.at(row, col) : plain[col / 64 * 32 * 64 + row * 64 + col % 64];
  }
}
)";

/// k [tokens, heads, 128] as rank 2: all columns; rank 3: panels of all heads; rank 4: panels of
/// each head.
TiledView view_of(const HostTensor& k, int rank, bool swizzle, std::int64_t box_rows) {
  const std::int64_t tokens = k.shape()[0];
  const std::int64_t heads = k.shape()[1];
  const std::int64_t row = heads * 256;
  TiledView view;
  view.swizzle = swizzle ? Swizzle::bytes128 : Swizzle::none;
  if (rank == 2) {
    view.dims = {heads * 128, tokens}, view.strides = {row}, view.box = {64, box_rows};
  } else if (rank == 3) {
    view.dims = {64, tokens, heads * 2}, view.strides = {row, 128};
    view.box = {64, box_rows, 2};
  } else {
    view.dims = {64, tokens, 2, heads}, view.strides = {row, 128, 256};
    view.box = {64, box_rows, 2, 1};
  }
  return view;
}

/// 64 rows of 64 columns, in one box.
constexpr TiledView kSquare{.dims = {64, 64, 1, 1},
                            .strides = {128, 128, 128},
                            .box = {64, 64, 1, 1},
                            .swizzle = Swizzle::bytes128};

TEST(TmaCopy, LoadsBoxesAndZerosOutside) {
  Engine engine(3);
  const HostTensor k = testing::normal(engine, DType::bf16, {50, 2, 128});
  for (const int rank : {2, 3, 4})
    for (const bool swizzle : {false, true})
      for (const int token : {7, 30, -3}) {
        SCOPED_TRACE(fmt::format("rank {} swizzle {} token {}", rank, swizzle, token));
        TensorMap map = encode(view_of(k, rank, swizzle, 32), 2, k.data());
        HostTensor out(DType::bf16, {32, 128});
        out.poison(testing::kNanPoison);
        int what[] = {rank, token, swizzle ? 1 : 0};
        run(kLoad, 32, 32 * 256 + 8, {&map, what, out.data()}, Schedule::first_warp);
        const int head = rank == 4 ? 1 : 0;
        int wrong = 0;
        for (int row = 0; row < 32; ++row)
          for (int col = 0; col < 128; ++col) {
            const int from = token + row;
            const double expected =
                from < 0 || from >= 50 ? 0 : k.at((from * 2 + head) * 128 + col);
            wrong += out.at(row * 128 + col) == expected ? 0 : 1;
          }
        EXPECT_EQ(wrong, 0);
      }
}

TEST(TmaCopy, CompilesForHopper) { expect_compiles(kLoad); }

TEST(TensorMap, RefusesTheDriversIllegalMaps) {
  const HostTensor k(DType::bf16, {50, 2, 128});
  const TiledView good = view_of(k, 4, true, 32);
  EXPECT_NO_THROW(encode(good, 2, k.data()));
  const auto refused = [&](const std::function<void(TiledView&)>& spoil, int offset = 0) {
    TiledView view = good;
    spoil(view);
    try {
      encode(view, 2, k.data() + offset);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  EXPECT_TRUE(refused([](TiledView&) {}, 8));
  EXPECT_TRUE(refused([](TiledView& v) { v.strides = {520, 128, 256}; }));
  EXPECT_TRUE(refused([](TiledView& v) { v.box = {64, 257, 2, 1}; }));
  EXPECT_TRUE(refused([](TiledView& v) { v.box = {32, 32, 2, 1}; }));
  EXPECT_TRUE(refused([](TiledView& v) { v.dims = {64, 0, 2, 2}; }));
  EXPECT_TRUE(refused([](TiledView& v) { v.box = {64, 32, 2}; }));
  EXPECT_TRUE(refused([](TiledView& v) { v.swizzle = Swizzle::bytes64; }));
}

// ---- a pipeline and an epilogue -----------------------------------------------------------------

/// One warp brings TILES tiles of k through two buffers, a warpgroup sums the products of their
/// left halves with their right ones, and the sum, or its transpose, leaves by stmatrix and a
/// TMA copy.
constexpr const char* kPipeline = R"(
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/product.cuh"
using namespace wyvern::cuda::sm90;
using Keys = SwizzledTile<T, 64, 128>;
using Result = SwizzledTile<T, 64, 64>;
using Buffers = Pipeline<2>;
#undef WYVERN_PARAMETERS
#define WYVERN_PARAMETERS const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap out_map, Extents e
WYVERN_KERNEL(256, 1) {
  unsigned char* const memory = swizzled_memory();
  const Result result{memory + 2 * Keys::kBytes};
  const Buffers pipeline{reinterpret_cast<Barrier*>(memory + 2 * Keys::kBytes + Result::kBytes)};
  if (thread_index() == 0) pipeline.init(1, 4);
  sync_block();
  Buffers::Position at;
  if (warp_index() >= 4) {
    lower_registers<40>();
    for (int tile = 0; tile < TILES && warp_index() == 4; ++tile, at.advance()) {
      pipeline.wait_empty(at);
      if (lane_index() != 0) continue;
      barrier_arrive_expect(pipeline.full(at), Keys::kBytes);
      tensor_load(memory + at.buffer * Keys::kBytes, k_map, {0, tile * 64, 0, 1}, pipeline.full(at));
    }
    return;
  }
  raise_registers<168>();
  Accumulator<64> sum;
  for (int i = 0; i < sum.kCount; ++i) sum.x[i] = 0.0f;
  for (int tile = 0; tile < TILES; ++tile, at.advance()) {
    pipeline.wait_full(at);
    const Keys keys{memory + at.buffer * Keys::kBytes};
    begin_products(sum);
    multiply<64>(sum, rows_of(keys), rows_of(keys, 0, 64), true);
    wgmma_commit();
    end_products<0>(sum);
    sync_warp();
    if (lane_index() == 0) barrier_arrive(pipeline.empty(at));
  }
  FragmentA<T, 64> rounded(sum);
  const int lane = lane_index();
  for (int step = 0; step < 4; ++step) {
    if constexpr (TRANSPOSED)
      store_matrix_x4_transposed(
          result.at(step * 16 + lane / 16 * 8 + lane % 8, warp_index() * 16 + lane / 8 % 2 * 8),
          rounded.x[step]);
    else
      store_matrix_x4(result.at(warp_index() * 16 + lane % 16, step * 16 + lane / 16 * 8),
                      rounded.x[step]);
  }
  fence_proxy_async();
  arrive_named(2, 256);
  sync_named(1, 128);
  arrive_named(2, 256);
  if (thread_index() != 0) return;
  tensor_store(out_map, {0, -8, 0, 0}, result.data);
  bulk_commit();
  bulk_wait_read<0>();
}
)";

std::string pipeline_source(DType dtype, int tiles, bool transposed) {
  return fmt::format("using T = {}; constexpr int TILES = {}; constexpr bool TRANSPOSED = {};\n",
                     to_string(dtype), tiles, transposed) +
         kPipeline;
}

TEST(Pipeline, ProducerAndConsumersMeet) {
  for (const bool transposed : {false, true})
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      constexpr int kTiles = 5;
      Engine engine(4);
      const HostTensor k = testing::normal(engine, dtype, {kTiles * 64, 2, 128});
      TensorMap k_map = encode(view_of(k, 4, true, 64), 2, k.data());
      const std::string source = pipeline_source(dtype, kTiles, transposed);
      for (const Schedule schedule : kSchedules) {
        // Eight rows of the box lie before the tensor, eight of the tensor behind the box.
        HostTensor out(dtype, {64, 64});
        out.poison(testing::kFinitePoison);
        TensorMap out_map = encode(kSquare, 2, out.data());
        run(source, 256, 2 * 64 * 256 + 64 * 128 + 32, {&k_map, &out_map}, schedule);
        double difference = 0;
        for (int row = 0; row < 56; ++row)
          for (int col = 0; col < 64; ++col) {
            const int left = transposed ? col : row + 8;
            const int right = transposed ? row + 8 : col;
            double sum = 0;
            for (int token = 0; token < kTiles * 64; token += 64)
              for (int i = 0; i < 64; ++i)
                sum += k.at(((token + left) * 2 + 1) * 128 + i) *
                       k.at(((token + right) * 2 + 1) * 128 + 64 + i);
            difference = std::max(difference, std::abs(out.at(row * 64 + col) - sum));
          }
        EXPECT_LT(difference, dtype == DType::bf16 ? 0.5 : 0.06);
        for (std::int64_t i = 56 * 64 * 2; i < 64 * 64 * 2; ++i)
          ASSERT_EQ(out.data()[i], testing::kFinitePoison);
      }
    }
}

TEST(Pipeline, CompilesForHopper) {
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const bool transposed : {false, true})
      expect_compiles(pipeline_source(dtype, 5, transposed));
}

// ---- misuse -------------------------------------------------------------------------------------

const std::vector<std::string> kMistakes{"none",
                                         "registers_left_out",
                                         "no_copy_wait",
                                         "few_bytes",
                                         "many_bytes",
                                         "parity",
                                         "two_arrivals",
                                         "alignment",
                                         "no_barrier_fence",
                                         "no_fence",
                                         "no_product_wait",
                                         "descriptor",
                                         "overwrite",
                                         "warp_left_out",
                                         "named_barrier",
                                         "copy_left_behind"};

/// out = k k^T for 64 rows of 64 columns, with one mistake.
constexpr const char* kMistaken = R"(

#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/product.cuh"
using namespace wyvern::cuda::sm90;
using Keys = SwizzledTile<bf16, 64, 64>;
#undef WYVERN_PARAMETERS
#define WYVERN_PARAMETERS const __grid_constant__ TensorMap k_map, const Mistake* what, float* out, Extents e
WYVERN_KERNEL(128, 1) {
  const Mistake mistake = *what;
  const bool waits = mistake != Mistake::no_copy_wait && mistake != Mistake::copy_left_behind;
  const int expected = Keys::kBytes - (mistake == Mistake::few_bytes ? 128 : 0) +
                            (mistake == Mistake::many_bytes ? 128 : 0);
  const Keys keys{swizzled_memory() + (mistake == Mistake::alignment ? 128 : 0)};
  Barrier* const arrived = reinterpret_cast<Barrier*>(swizzled_memory() + 2 * Keys::kBytes);
  if (thread_index() == 0) {
    barrier_init(arrived, mistake == Mistake::two_arrivals ? 2 : 1);
    if (mistake != Mistake::no_barrier_fence) fence_barrier_init();
    barrier_arrive_expect(arrived, expected);
    tensor_load(keys.data, k_map, {0, 0, 0, 0}, arrived);
  }
  sync_block();
  if (waits) barrier_wait(arrived, mistake == Mistake::parity ? 1 : 0);
  Accumulator<64> sum;
  if (mistake != Mistake::no_fence) begin_products(sum);
  if (mistake != Mistake::warp_left_out || warp_index() != 2) {
    if (mistake == Mistake::descriptor)
      multiply<64>(sum, rows_of(keys), columns_of(keys), false);
    else
      multiply<64>(sum, rows_of(keys), rows_of(keys), false);
  }
  wgmma_commit();
  if (mistake == Mistake::overwrite) {
    sync_block();
    *keys.at(thread_index() / 2, 0) = bf16{0};
  }
  if (mistake == Mistake::no_product_wait) {
    for (int i = 0; i < sum.kCount; ++i) out[sum.row(i) * 64 + sum.col(i)] = sum.x[i];
    wgmma_wait<0>();
    return;
  }
  end_products<0>(sum);
  if (mistake == Mistake::registers_left_out && warp_index() != 1) raise_registers<64>();
  if (mistake == Mistake::named_barrier && warp_index() < 3) sync_named(1, 128);
  for (int i = 0; i < sum.kCount; ++i) out[sum.row(i) * 64 + sum.col(i)] = sum.x[i];
  if (mistake == Mistake::no_copy_wait || mistake == Mistake::parity) barrier_wait(arrived, 0);
}
)";

struct Outcome {
  std::string failure;
  int nans = 0;
  double error = 0;
};

Outcome outcome_of(const std::string& mistake, Schedule schedule) {
  Engine engine(5);
  const HostTensor k = testing::normal(engine, DType::bf16, {64, 1, 64});
  TensorMap map = encode(kSquare, 2, k.data());
  HostTensor out(DType::fp32, {64, 64});
  Outcome outcome;
  try {
    const std::string source =
        fmt::format("enum class Mistake {{ {} }};\n", fmt::join(kMistakes, ", ")) + kMistaken;
    const auto found = std::find(kMistakes.begin(), kMistakes.end(), mistake);
    auto what = static_cast<int>(found - kMistakes.begin());
    run(source, 128, 2 * 8192 + 8, {&map, &what, out.data()}, schedule);
  } catch (const std::runtime_error& error) {
    outcome.failure = error.what();
    return outcome;
  }
  for (int row = 0; row < 64; ++row)
    for (int col = 0; col < 64; ++col) {
      double sum = 0;
      for (int i = 0; i < 64; ++i) sum += k.at(row * 64 + i) * k.at(col * 64 + i);
      const double got = out.at(row * 64 + col);
      outcome.nans += std::isnan(got) ? 1 : 0;
      outcome.error = std::max(outcome.error, std::abs(got - sum));
    }
  return outcome;
}

class Mistaken : public ::testing::TestWithParam<Schedule> {
 protected:
  Outcome outcome(const std::string& mistake) { return outcome_of(mistake, GetParam()); }
  void expect_failure(const std::string& mistake, const std::string& reason) {
    const std::string failure = outcome(mistake).failure;
    EXPECT_NE(failure.find(reason), std::string::npos) << mistake << ": " << failure;
  }
};

TEST_P(Mistaken, NoneIsRight) {
  const Outcome right = outcome("none");
  EXPECT_EQ(right.failure, "");
  EXPECT_LT(right.error, 1e-4);
}

TEST_P(Mistaken, ReadingBeforeTheWaitGivesNaNs) {
  EXPECT_GT(outcome("no_copy_wait").nans, 0);
  EXPECT_GT(outcome("parity").nans, 0);
  EXPECT_EQ(outcome("no_product_wait").nans, 64 * 64);
}

TEST_P(Mistaken, WrongByteCountsAreReported) {
  expect_failure("few_bytes", "128 bytes more than it expects");
  expect_failure("many_bytes", "lacks 0 of 1 arrivals and 128 bytes");
  expect_failure("two_arrivals", "lacks 1 of 2 arrivals and 0 bytes");
}

TEST_P(Mistaken, MissingFencesAreReported) {
  expect_failure("no_fence", "without a wgmma.fence");
  expect_failure("no_barrier_fence", "no fence has made visible");
}

TEST_P(Mistaken, WrongDescriptorsReadOtherBytes) {
  EXPECT_GT(outcome("descriptor").error, 1);
  expect_failure("alignment", "not aligned to 1024 bytes");
}

TEST_P(Mistaken, WarpsThatDoNotMeetAreReported) {
  expect_failure("warp_left_out", "warps of a warpgroup started different products");
  expect_failure("registers_left_out", "different numbers of registers");
  expect_failure("named_barrier", "96 wait at a named barrier");
}

TEST_P(Mistaken, CopiesLeftBehindAreReported) {
  expect_failure("copy_left_behind", "before its TMA copies have arrived");
}

INSTANTIATE_TEST_SUITE_P(, Mistaken, ::testing::ValuesIn(kSchedules), [](const auto& each) {
  return each.param == Schedule::first_warp ? "FirstWarp" : "LastWarp";
});

TEST(Products, OperandsWrittenBeforeTheWaitShow) {
  EXPECT_GT(std::max(outcome_of("overwrite", Schedule::first_warp).error,
                     outcome_of("overwrite", Schedule::last_warp).error),
            0.1);
}

// ---- ordinary accesses before those of TMA copies and products
// --------------------------------

/// A tile that was read (READS) or written by stmatrix is then copied to, or copied from, or
/// multiplied, with a fence in between or without.
constexpr const char* kProxies = R"(
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/product.cuh"
using namespace wyvern::cuda::sm90;
using Keys = SwizzledTile<bf16, 64, 64>;
#undef WYVERN_PARAMETERS
#define WYVERN_PARAMETERS const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap out_map, float* out, Extents e
WYVERN_KERNEL(128, 1) {
  const Keys keys{swizzled_memory()};
  Barrier* const arrived = reinterpret_cast<Barrier*>(swizzled_memory() + Keys::kBytes);
  if (thread_index() == 0) {
    barrier_init(arrived, 1);
    fence_barrier_init();
  }
  const uint32 ones[4] = {0x3F803F80U, 0x3F803F80U, 0x3F803F80U, 0x3F803F80U};
  float first = 0.0f;
  if (READS)
    first = to_float(*keys.at(thread_index() / 2, 0));
  else
    for (int col = 0; col < 64; col += 16)
      store_matrix_x4(keys.at(warp_index() * 16 + lane_index() % 16, col + lane_index() / 16 * 8), ones);
  if (FENCES) fence_proxy_async();
  sync_block();
  if (NEXT == 0) {
    if (thread_index() == 0) {
      barrier_arrive_expect(arrived, Keys::kBytes);
      tensor_load(keys.data, k_map, {0, 0, 0, 0}, arrived);
    }
    barrier_wait(arrived, 0);
  } else if (NEXT == 1) {
    if (thread_index() == 0) {
      tensor_store(out_map, {0, 0, 0, 0}, keys.data);
      bulk_commit();
      bulk_wait_read<0>();
    }
  } else {
    Accumulator<64> sum;
    begin_products(sum);
    multiply<64>(sum, rows_of(keys), rows_of(keys), false);
    wgmma_commit();
    end_products<0>(sum);
    first = sum.x[0];
  }
  out[thread_index()] = first;
}
)";

/// What the emulator says to it.
std::string failure_of_proxies(bool reads, int next, bool fences, Schedule schedule) {
  const HostTensor k(DType::bf16, {64, 1, 64});
  HostTensor to(DType::bf16, {64, 1, 64});
  HostTensor out(DType::fp32, {128});
  TensorMap map = encode(kSquare, 2, k.data());
  TensorMap out_map = encode(kSquare, 2, to.data());
  try {
    run(fmt::format("constexpr bool READS = {}, FENCES = {}; constexpr int NEXT = {};\n", reads,
                    fences, next) +
            kProxies,
        128, 8192 + 8, {&map, &out_map, out.data()}, schedule);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

TEST(Proxies, FencesThatAreMissingAreReported) {
  const char* const reports[] = {"a TMA copy to shared memory that thread",
                                 "a TMA copy from shared memory that thread",
                                 "was written without a fence.proxy.async"};
  for (const Schedule schedule : kSchedules)
    for (int next = 0; next < 3; ++next) {
      EXPECT_EQ(failure_of_proxies(false, next, true, schedule), "") << next;
      // A product's operands are looked at as it begins where they are read then.
      if (next == 2 && schedule == Schedule::first_warp) continue;
      const std::string failure = failure_of_proxies(false, next, false, schedule);
      EXPECT_NE(failure.find(reports[next]), std::string::npos) << failure;
    }
}

/// What was only read needs a fence before a copy overwrites it, but not to be read again.
TEST(Proxies, ReadsComeBeforeCopiesByAFence) {
  for (const Schedule schedule : kSchedules) {
    EXPECT_NE(failure_of_proxies(true, 0, false, schedule).find("accessed"), std::string::npos);
    EXPECT_EQ(failure_of_proxies(true, 0, true, schedule), "");
    EXPECT_EQ(failure_of_proxies(true, 1, false, schedule), "");
    EXPECT_EQ(failure_of_proxies(true, 2, false, schedule), "");
  }
}

}  // namespace
}  // namespace wyvern::emulator
