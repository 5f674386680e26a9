// The building blocks of kernels: a kernel may include any of them, in any order, and take two of
// them at once, each with its own sizes.

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <algorithm>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/backend.hpp"
#include "compiler/compiler.hpp"
#include "templates/embedded.hpp"
#include "templates/source.hpp"

namespace wyvern {
namespace {

/// The Specs of two kernels that have little in common.
constexpr std::string_view kTwoSizes = R"(
struct Narrow {
  static constexpr int K = 60, V = 100, BT = 16, BK = 64, BV = 32, SEG = 8, STEPS = 2;
  static constexpr int num_warps = 2, num_stages = 1;
  static constexpr Precision precision = Precision::tf32;
  static constexpr DType DTYPE = DType::bf16, U_DTYPE = DType::fp32, BETA_DTYPE = DType::fp32;
  static constexpr bool VARLEN = true, SCALAR_GATE = false, VECTOR_GATE = true, SAFE_GATE = false,
                        QK_L2NORM = true, BETA_SIGMOID = true, NEG_EIGVAL = true,
                        STATE_V_FIRST = true, STATE_UNIT = false;
};
struct Wide {
  static constexpr int K = 128, V = 64, BT = 64, BK = 128, BV = 64, STEPS = 1;
  static constexpr int num_warps = 4, num_stages = 2;
  static constexpr Precision precision = Precision::tf32x3;
  static constexpr DType DTYPE = DType::fp32, U_DTYPE = DType::fp32, BETA_DTYPE = DType::bf16;
  static constexpr bool VARLEN = false, SCALAR_GATE = true, VECTOR_GATE = false, SAFE_GATE = true,
                        QK_L2NORM = false, BETA_SIGMOID = false, NEG_EIGVAL = false,
                        STATE_V_FIRST = false, STATE_UNIT = true;
};
)";

constexpr std::string_view kCpuBlocks = R"(
#define INSTANTIATE(S)                  \
  template struct wyvern::cpu::CallerState<S>;   \
  template struct wyvern::cpu::ForwardScan<S>;   \
  template struct wyvern::cpu::ReverseScan<S>;   \
  template struct wyvern::cpu::SegmentStates<S>; \
  template struct wyvern::cpu::ChunkBackward<S>; \
  template struct wyvern::cpu::IntraProducts<S>; \
  template struct wyvern::cpu::StateBackward<S>;
INSTANTIATE(Narrow)
INSTANTIATE(Wide)

// A layout behind another one: neither has a place in scratch of its own.
constexpr ForwardScanLayout<Narrow> kScan{Narrow{}};
constexpr StateBackwardLayout<Wide> kState{Wide{}, LayoutBuilder{kScan.bytes}};
static_assert(kState.dO.offset * 4 == kScan.bytes && kState.bytes > kScan.bytes);
float* use_both(void* memory) {
  const auto scan = ForwardScan<Narrow>::work_at<kScan>(memory);
  const auto state = StateBackward<Wide>::at<kState>(memory);
  return scan.state.data < state.dO.data ? scan.decay : state.end;
}
)";

constexpr std::string_view kCudaBlocks = R"(
#define INSTANTIATE(S)                             \
  template struct wyvern::cuda::ForwardScan<S>;    \
  template struct wyvern::cuda::ReverseScan<S>;    \
  template struct wyvern::cuda::SegmentCombine<S>;
INSTANTIATE(Narrow)
INSTANTIATE(Wide)

// Buffers behind another block's: neither assumes a place in shared memory.
__device__ float* use_both(unsigned char* shared) {
  const typename ForwardScan<Narrow>::Buffer first(shared, 1);
  const typename ReverseScan<Wide>::Buffer second(shared + ForwardScan<Narrow>::kLayout.bytes, 1);
  return first.Gk_end < second.G ? first.Gk_end : second.G;
}
)";

struct Blocks {
  DeviceKind kind;
  const char* target;
  std::string_view folder;  ///< of the headers
  std::string_view entry;   ///< an empty entry point
  std::string_view use;     ///< several blocks at once, over both of kTwoSizes
};

/// Tests are listed by name and parameter, so neither may change from run to run.
void PrintTo(const Blocks& blocks, std::ostream* out) { *out << blocks.folder; }

class DeviceHeaders : public ::testing::TestWithParam<Blocks> {
 protected:
  void SetUp() override {
    if (const std::string problem = compiler_problem(GetParam().kind); !problem.empty())
      GTEST_SKIP() << problem;
  }

  static std::vector<std::string_view> headers() {
    std::vector<std::string_view> found;
    for (const detail::EmbeddedSource& source : detail::embedded_sources())
      if (source.path.starts_with(GetParam().folder)) found.push_back(source.path);
    return found;
  }

  /// Compiles a kernel that is specialized on nothing, includes these headers and goes on with
  /// `text`; throws Error(kCompile) where it does not.
  static void compile_without_constants(const std::vector<std::string_view>& included,
                                        std::string_view text = {}) {
    Template t;
    t.name = "probe";
    t.variant = "probe";
    t.device = GetParam().kind;
    t.source = "probe";
    std::string source;
    for (const std::string_view header : included)
      source.append("#include \"").append(header).append("\"\n");
    source.append(text).append(GetParam().entry);
    const detail::Backend& backend = detail::backend(t.device);
    const std::string whole =
        specialize(t, Constants(), Config(), backend.dialect(), {{t.source, source}});
    detail::compile_source(whole, t.id(), *backend.find_target(GetParam().target));
  }
};

/// Of two headers, each comes before the other in some of these orders, and each comes first in
/// one, so that it has to include what it needs.
TEST_P(DeviceHeaders, AreIncludedInAnyOrderWithoutConstants) {
  std::vector<std::string_view> order = headers();
  ASSERT_GT(order.size(), 20U);
  for (std::size_t i = 0; i < order.size(); ++i) {
    EXPECT_NO_THROW(compile_without_constants(order)) << order.front() << " first";
    std::rotate(order.begin(), order.begin() + 1, order.end());
  }
}

TEST_P(DeviceHeaders, BlocksOfTwoSizesStandInOneKernel) {
  EXPECT_NO_THROW(
      compile_without_constants(headers(), std::string(kTwoSizes) + std::string(GetParam().use)));
}

TEST_P(DeviceHeaders, AHeaderThatReadsAConstantDoesNotCompile) {
  EXPECT_THROW(compile_without_constants(headers(), "constexpr int kRow = BT;\n"), Error);
}

INSTANTIATE_TEST_SUITE_P(, DeviceHeaders,
                         ::testing::Values(Blocks{DeviceKind::cpu, "native-cpu", "device/cpu/",
                                                  "WYVERN_BLOCK {}\n", kCpuBlocks},
                                           Blocks{DeviceKind::cuda, "sm_90a", "device/cuda/",
                                                  "WYVERN_KERNEL(32, 0) {}\n", kCudaBlocks}),
                         [](const auto& blocks) {
                           return std::string(to_string(blocks.param.kind));
                         });

}  // namespace
}  // namespace wyvern
