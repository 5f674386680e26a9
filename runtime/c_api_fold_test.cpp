// The C API's folds, by numbers worked out by hand.
#include <wyvern/wyvern.h>

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/cache_testing.hpp"
#include "compiler/compiler.hpp"

namespace wyvern {
namespace {

class CApiFoldTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(wyvern_device_open("cpu", &device_), WYVERN_OK) << wyvern_last_error();
    wyvern_runtime_options options = WYVERN_RUNTIME_OPTIONS_INIT;
    const std::string folder = directory_.path().string();
    options.cache_directory = folder.c_str();
    ASSERT_EQ(wyvern_runtime_create(&options, &runtime_), WYVERN_OK) << wyvern_last_error();
  }
  void TearDown() override {
    wyvern_fold_destroy(fold_);
    wyvern_runtime_destroy(runtime_);
    wyvern_device_destroy(device_);
  }

  wyvern_status launch(const std::vector<wyvern_tensor>& tensors, std::int32_t backwards) {
    wyvern_launch what = WYVERN_LAUNCH_INIT;
    what.tensors = tensors.data();
    what.tensor_count = tensors.size();
    return wyvern_fold_launch(fold_, &what, backwards);
  }
  static void expect_bad(wyvern_status status, std::string_view part) {
    EXPECT_EQ(status, WYVERN_BAD_INPUT);
    const std::string message = wyvern_last_error();
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nhas no '" << part << "'";
  }

  testing::TempDirectory directory_;
  wyvern_device* device_ = nullptr;
  wyvern_runtime* runtime_ = nullptr;
  wyvern_fold* fold_ = nullptr;
};

TEST_F(CApiFoldTest, LaunchesByTheNamesOfTensors) {
  if (!compiler_problem(DeviceKind::cpu).empty()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  const wyvern_fold_options options{sizeof(wyvern_fold_options), 3, 1, 1, 1, 1};
  ASSERT_EQ(wyvern_prepare_fold(runtime_, device_, &options, &fold_), WYVERN_OK)
      << wyvern_last_error();
  alignas(64) std::array<float, 6> R_and_M{10, 2, 20, 3, 30, 5};
  alignas(64) std::array<std::int32_t, 3> places{2, 0, 1};
  alignas(64) std::array<float, 3> entering{};
  constexpr std::array<std::int64_t, 4> kSummaries{3, 1, 1, 2}, kStates{3, 1, 1, 1};
  constexpr std::array<std::int64_t, 1> kOrder{3};
  const wyvern_tensor summaries{"summaries", R_and_M.data(), kSummaries.data(),
                                nullptr,     WYVERN_FP32,    4};
  const wyvern_tensor order{"order", places.data(), kOrder.data(), nullptr, WYVERN_INT32, 1};
  const wyvern_tensor states{"states", entering.data(), kStates.data(), nullptr, WYVERN_FP32, 4};

  ASSERT_EQ(launch({states, order, summaries}, 0), WYVERN_OK) << wyvern_last_error();
  EXPECT_EQ(entering, (std::array<float, 3>{30, 10 + 2 * 30, 0}));
  ASSERT_EQ(launch({summaries, order, states}, 1), WYVERN_OK) << wyvern_last_error();
  EXPECT_EQ(entering, (std::array<float, 3>{20, 0, 10 + 2 * 20}));

  expect_bad(launch({summaries, order}, 0), "states is missing");
  expect_bad(launch({summaries, order, order}, 0), "order is given twice");
  wyvern_tensor other = states;
  other.name = "o";
  expect_bad(launch({summaries, order, other}, 0), "'o' is not the name of a tensor of a fold");
  other.name = nullptr;
  expect_bad(launch({summaries, order, other}, 0), "the name of a tensor is null");
  expect_bad(launch({summaries, order, states}, 2), "backwards is 2; it must be 0 or 1");
  expect_bad(wyvern_fold_launch(fold_, nullptr, 0), "launch is null");
}

TEST_F(CApiFoldTest, RefusesWrongOptions) {
  wyvern_fold_options options = WYVERN_FOLD_OPTIONS_INIT;
  const auto prepare = [&] { return wyvern_prepare_fold(runtime_, device_, &options, &fold_); };
  expect_bad(prepare(), "ranges is 0; it must be between 1 and 65535");
  options = {sizeof options, 2, 1, 16, 16, 2};
  expect_bad(prepare(), "options.transition is 2; it must be 0 or 1");
  options = {8, 2, 1, 16, 16, 1};
  expect_bad(prepare(), "options.struct_size is 8");
  EXPECT_EQ(fold_, nullptr);
  expect_bad(wyvern_prepare_fold(runtime_, device_, nullptr, &fold_), "options is null");
  expect_bad(wyvern_prepare_fold(nullptr, device_, &options, &fold_), "runtime is null");
  expect_bad(wyvern_prepare_fold(runtime_, device_, &options, nullptr), "fold is null");
  wyvern_launch none = WYVERN_LAUNCH_INIT;
  expect_bad(wyvern_fold_launch(nullptr, &none, 0), "fold is null");
  wyvern_fold_destroy(nullptr);
}

/// On a CPU no plans are ever cheaper with segments that they share.
TEST_F(CApiFoldTest, SaysWhichSegmentsToShare) {
  wyvern_problem* problem = nullptr;
  ASSERT_EQ(wyvern_problem_create("gated_delta_rule", &problem), WYVERN_OK);
  for (const char* const field : {"T", "K", "V"})
    ASSERT_EQ(wyvern_problem_set_int(problem, field, 64), WYVERN_OK) << wyvern_last_error();
  std::int64_t chunk = -1, segment = -1;
  const auto ask = [&](std::int32_t transition) {
    return wyvern_shared_segments(device_, problem, transition, &chunk, &segment);
  };
  for (const std::int32_t transition : {0, 1}) {
    chunk = segment = -1;
    EXPECT_EQ(ask(transition), WYVERN_OK) << wyvern_last_error();
    EXPECT_EQ(std::pair(chunk, segment), std::pair(std::int64_t{0}, std::int64_t{0}));
  }
  expect_bad(ask(2), "transition is 2; it must be 0 or 1");
  expect_bad(wyvern_shared_segments(nullptr, problem, 1, &chunk, &segment), "device is null");
  expect_bad(wyvern_shared_segments(device_, nullptr, 1, &chunk, &segment), "problem is null");
  expect_bad(wyvern_shared_segments(device_, problem, 1, nullptr, &segment), "chunk_size is null");
  expect_bad(wyvern_shared_segments(device_, problem, 1, &chunk, nullptr),
             "segment_chunks is null");
  ASSERT_EQ(wyvern_problem_set_int(problem, "packed", 1), WYVERN_OK) << wyvern_last_error();
  expect_bad(ask(1), "segment_chunks is 8");
  wyvern_problem_destroy(problem);
}

}  // namespace
}  // namespace wyvern
