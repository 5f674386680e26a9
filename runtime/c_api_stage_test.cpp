// The C API's stages: found by name, launched by the names of their tensors, refused by name.
#include <wyvern/wyvern.h>

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache_testing.hpp"
#include "compiler/compiler.hpp"

namespace wyvern {
namespace {

#define ASSERT_GOOD(call) ASSERT_EQ(call, WYVERN_OK) << wyvern_last_error()
#define EXPECT_GOOD(call) EXPECT_EQ(call, WYVERN_OK) << wyvern_last_error()

constexpr std::int64_t kChunk = 16;
constexpr std::array<std::int64_t, 4> kShape{1, 2, 1, kChunk};

class CApiStageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_GOOD(wyvern_device_open("cpu", &device_));
    wyvern_runtime_options options = WYVERN_RUNTIME_OPTIONS_INIT;
    const std::string folder = directory_.path().string();
    options.cache_directory = folder.c_str();
    ASSERT_GOOD(wyvern_runtime_create(&options, &runtime_));
    ASSERT_GOOD(wyvern_problem_create("delta_rule", &problem_));
    for (const char* const field : {"K", "V", "chunk_size"})
      ASSERT_GOOD(wyvern_problem_set_int(problem_, field, kChunk));
    ASSERT_GOOD(wyvern_problem_set_int(problem_, "T", 2));
    for (const char* const field : {"dtype", "beta_dtype"})
      ASSERT_GOOD(wyvern_problem_set_text(problem_, field, "fp32"));
  }
  void TearDown() override {
    wyvern_stage_destroy(stage_);
    wyvern_problem_destroy(problem_);
    wyvern_runtime_destroy(runtime_);
    wyvern_device_destroy(device_);
  }

  wyvern_status prepare(const char* name) {
    return wyvern_prepare_stage(runtime_, device_, problem_, name, &stage_);
  }
  wyvern_status launch(const std::vector<wyvern_tensor>& tensors) {
    wyvern_launch what = WYVERN_LAUNCH_INIT;
    what.tensors = tensors.data();
    what.tensor_count = tensors.size();
    return wyvern_stage_launch(stage_, &what);
  }
  static wyvern_tensor tensor(const char* name, std::array<float, 2 * kChunk>& data) {
    return {name, data.data(), kShape.data(), nullptr, WYVERN_FP32, 4};
  }
  static void expect_bad(wyvern_status status, std::string_view part) {
    EXPECT_EQ(status, WYVERN_BAD_INPUT);
    const std::string message = wyvern_last_error();
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nhas no '" << part << "'";
  }

  testing::TempDirectory directory_;
  wyvern_device* device_ = nullptr;
  wyvern_runtime* runtime_ = nullptr;
  wyvern_problem* problem_ = nullptr;
  wyvern_stage* stage_ = nullptr;
};

TEST_F(CApiStageTest, LaunchesByTheNamesOfTensors) {
  if (!compiler_problem(DeviceKind::cpu).empty()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  ASSERT_GOOD(prepare("solve_tril"));
  std::array<wyvern_tensor_spec, 8> specs{};
  size_t count = 0;
  ASSERT_GOOD(wyvern_stage_tensors(stage_, specs.data(), sizeof specs[0], specs.size(), &count));
  std::string present;
  for (size_t i = 0; i < count; ++i)
    if (specs[i].present != 0) present += std::string(specs[i].name) + ' ';
  EXPECT_EQ(present, "A Tinv ");
  EXPECT_EQ(specs[0].shape[3], kChunk);

  alignas(64) std::array<float, 2 * kChunk> A{}, inverse{};
  A[kChunk] = 0.5F;  // row 1, column 0
  ASSERT_GOOD(launch({tensor("Tinv", inverse), tensor("A", A)}));
  EXPECT_EQ(inverse[0], 1.0F);
  EXPECT_EQ(inverse[1], 0.0F);
  EXPECT_EQ(inverse[kChunk], -0.5F);
  EXPECT_EQ(inverse[kChunk + 1], 1.0F);

  expect_bad(launch({tensor("A", A)}), "Tinv is missing");
  expect_bad(launch({tensor("A", A), tensor("A", A)}), "A is given twice");
  expect_bad(launch({tensor("B", A)}), "'B' is not the name of a tensor of solve_tril.cpu");
  expect_bad(launch({tensor("A", A), tensor("Tinv", A)}), "Tinv overlaps A");
}

/// What a binding asks instead of knowing itself which strides, addresses and dtypes will do.
TEST_F(CApiStageTest, SaysWhichTensorsItTakesAsTheyAre) {
  if (!compiler_problem(DeviceKind::cpu).empty()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  ASSERT_GOOD(prepare("l2norm"));
  constexpr std::int64_t kApart = 2 * kChunk;
  alignas(64) std::array<float, 2 * kApart> data{};
  const std::array<std::int64_t, 4> strided_rows{7, kApart, kChunk, 1}, too_near{7, 8, kChunk, 1},
      columns_apart{7, kApart, kChunk, 2};
  wyvern_tensor x{"x", data.data(), kShape.data(), nullptr, WYVERN_FP32, 4};
  const auto takes = [&](const wyvern_tensor& tensor) {
    std::int32_t yes = -1;
    EXPECT_GOOD(wyvern_stage_takes(stage_, &tensor, sizeof tensor, &yes));
    return yes;
  };
  EXPECT_EQ(takes(x), 1);
  x.strides = strided_rows.data();
  EXPECT_EQ(takes(x), 1);
  x.name = "y";
  EXPECT_EQ(takes(x), 0) << "outputs are contiguous";
  x.name = "x";
  x.strides = too_near.data();
  EXPECT_EQ(takes(x), 0);
  x.strides = columns_apart.data();
  EXPECT_EQ(takes(x), 0);
  x.strides = nullptr;
  x.data = data.data() + 1;
  EXPECT_EQ(takes(x), 0);
  x.data = data.data();
  x.dtype = WYVERN_BF16;
  EXPECT_EQ(takes(x), 0);

  std::int32_t yes = -1;
  x.name = "k";
  expect_bad(wyvern_stage_takes(stage_, &x, sizeof x, &yes), "'k' is not the name of a tensor of");
  x.name = nullptr;
  expect_bad(wyvern_stage_takes(stage_, &x, sizeof x, &yes), "tensor.name is null");
  expect_bad(wyvern_stage_takes(stage_, nullptr, sizeof x, &yes), "tensor is null");
  expect_bad(wyvern_stage_takes(stage_, &x, 8, &yes), "tensor_size is 8");
  expect_bad(wyvern_stage_takes(nullptr, &x, sizeof x, &yes), "stage is null");
  EXPECT_EQ(yes, -1);
}

TEST_F(CApiStageTest, RefusesUnknownStages) {
  expect_bad(prepare("solve"), "name is 'solve'; for cpu it must be one of");
  expect_bad(prepare(nullptr), "name is null");
  expect_bad(wyvern_prepare_stage(runtime_, device_, problem_, "solve_tril", nullptr),
             "stage is null");
  expect_bad(wyvern_prepare_stage(nullptr, device_, problem_, "solve_tril", &stage_),
             "runtime is null");
  expect_bad(wyvern_stage_tensors(nullptr, nullptr, sizeof(wyvern_tensor_spec), 0, nullptr),
             "stage is null");
  wyvern_launch none = WYVERN_LAUNCH_INIT;
  expect_bad(wyvern_stage_launch(nullptr, &none), "stage is null");
  EXPECT_GOOD(wyvern_problem_set_int(problem_, "T", -1));
  expect_bad(prepare("solve_tril"), "T is -1");
  EXPECT_EQ(stage_, nullptr);
  wyvern_stage_destroy(nullptr);
}

}  // namespace
}  // namespace wyvern
