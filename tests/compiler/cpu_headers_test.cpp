// The building blocks of CPU templates: a kernel may include any of them, in any order, and take
// two of them at once, each with its own sizes.

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/backend.hpp"
#include "compiler/compiler.hpp"
#include "templates/embedded.hpp"
#include "templates/source.hpp"

namespace wyvern {
namespace {

std::vector<std::string_view> device_headers() {
  std::vector<std::string_view> headers;
  for (const detail::EmbeddedSource& source : detail::embedded_sources())
    if (source.path.starts_with("device/cpu/")) headers.push_back(source.path);
  return headers;
}

std::string includes(const std::vector<std::string_view>& headers) {
  std::string text;
  for (const std::string_view header : headers)
    text.append("#include \"").append(header).append("\"\n");
  return text;
}

/// Compiles a kernel that is specialized on nothing; throws Error(kCompile) where it does not.
void compile_without_constants(const std::string& source) {
  Template t;
  t.name = "probe";
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "probe.cpp";
  const std::string text =
      specialize(t, Constants(), Config(), {{t.source, source + "WYVERN_BLOCK {}\n"}});
  detail::compile_source(text, t.id(), host_target());
}

class CpuHeaders : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = compiler_problem(DeviceKind::cpu); !problem.empty())
      GTEST_SKIP() << problem;
  }
};

/// Of two headers, each comes before the other in some of these orders, and each comes first in
/// one, so that it has to include what it needs.
TEST_F(CpuHeaders, AreIncludedInAnyOrderWithoutConstants) {
  std::vector<std::string_view> headers = device_headers();
  ASSERT_GT(headers.size(), 20U);
  for (std::size_t i = 0; i < headers.size(); ++i) {
    EXPECT_NO_THROW(compile_without_constants(includes(headers))) << headers.front() << " first";
    std::rotate(headers.begin(), headers.begin() + 1, headers.end());
  }
}

constexpr std::string_view kTwoSizes = R"(
struct Narrow {
  static constexpr int H = 1, HV = 2, K = 60, V = 100, BT = 16, BK = 64, BV = 32, SEG = 8;
  static constexpr DType DTYPE = DType::bf16, U_DTYPE = DType::fp32, BETA_DTYPE = DType::fp32;
  static constexpr bool VARLEN = true, SCALAR_GATE = false, VECTOR_GATE = true, SAFE_GATE = false,
                        QK_L2NORM = true, BETA_SIGMOID = true, NEG_EIGVAL = true,
                        STATE_V_FIRST = true;
};
struct Wide {
  static constexpr int H = 2, HV = 2, K = 128, V = 64, BT = 64, BK = 128, BV = 64, SEG = 16;
  static constexpr DType DTYPE = DType::fp32, U_DTYPE = DType::fp32, BETA_DTYPE = DType::bf16;
  static constexpr bool VARLEN = false, SCALAR_GATE = true, VECTOR_GATE = false, SAFE_GATE = true,
                        QK_L2NORM = false, BETA_SIGMOID = false, NEG_EIGVAL = false,
                        STATE_V_FIRST = false;
};
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
  return scan.state.data < state.dO.data ? scan.decay : state.rate;
}
)";

TEST_F(CpuHeaders, BlocksOfTwoSizesStandInOneKernel) {
  EXPECT_NO_THROW(compile_without_constants(includes(device_headers()) + std::string(kTwoSizes)));
}

TEST_F(CpuHeaders, AHeaderThatReadsAConstantDoesNotCompile) {
  const std::string reads = "constexpr long kRow = row_stride(BT);\n";
  EXPECT_THROW(compile_without_constants(includes(device_headers()) + reads), Error);
}

}  // namespace
}  // namespace wyvern
