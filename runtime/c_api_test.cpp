// The C API: what it refuses and how it says so, structs of other versions, lives of handles.
#include <wyvern/wyvern.h>

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cache/cache_testing.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "runtime/problem_fields.hpp"

namespace wyvern {
namespace {

// Structs as programs that are compiled have them: what changes here, but for an end that is added,
// breaks them.
static_assert(WYVERN_API_VERSION == 2);
static_assert(sizeof(wyvern_device_info) == 96 && offsetof(wyvern_device_info, units) == 64);
static_assert(sizeof(wyvern_field_info) == 48 && offsetof(wyvern_field_info, type) == 40);
static_assert(sizeof(wyvern_tensor_spec) == 104 && offsetof(wyvern_tensor_spec, shape) == 24);
static_assert(offsetof(wyvern_tensor_spec, strided) == 96);
static_assert(sizeof(wyvern_runtime_options) == 48);
static_assert(offsetof(wyvern_runtime_options, on_degraded) == 24);
static_assert(offsetof(wyvern_runtime_options, command) == 40);
static_assert(sizeof(wyvern_prepare_options) == 32 && offsetof(wyvern_prepare_options, plan) == 16);
static_assert(offsetof(wyvern_prepare_options, tuning_budget_s) == 24);
static_assert(sizeof(wyvern_tensor) == 40 && offsetof(wyvern_tensor, dtype) == 32);
static_assert(sizeof(wyvern_launch) == 80 && offsetof(wyvern_launch, stream) == 48);
static_assert(offsetof(wyvern_launch, shown_name) == 72);

/// A struct as a later version has it.
template <class T>
struct Later {
  T known;
  std::uint64_t unknown = 0;
};

/// Whether the call failed so, its message having all the parts.
void expect_failure(wyvern_status got, wyvern_status wanted,
                    std::initializer_list<std::string_view> parts, int line) {
  const ::testing::ScopedTrace trace(__FILE__, line, "");
  EXPECT_EQ(got, wanted);
  const std::string message = wyvern_last_error();
  for (const std::string_view part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nhas no '" << part << "'";
}
#define EXPECT_BAD(call, ...) expect_failure(call, WYVERN_BAD_INPUT, {__VA_ARGS__}, __LINE__)
#define ASSERT_GOOD(call) ASSERT_EQ(call, WYVERN_OK) << wyvern_last_error()
#define EXPECT_GOOD(call) EXPECT_EQ(call, WYVERN_OK) << wyvern_last_error()

std::string text_of(const wyvern_problem* problem, const char* field) {
  std::array<char, 64> text{};
  EXPECT_GOOD(wyvern_problem_get_text(problem, field, text.data(), text.size(), nullptr));
  return text.data();
}

class CApiTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_GOOD(wyvern_device_open("cpu", &device_));
    wyvern_runtime_options options = WYVERN_RUNTIME_OPTIONS_INIT;
    const std::string folder = directory_.path().string();
    options.cache_directory = folder.c_str();
    options.on_degraded = [](const char* sentence, void* user) {
      static_cast<std::vector<std::string>*>(user)->emplace_back(sentence);
    };
    options.user = &said_;
    ASSERT_GOOD(wyvern_runtime_create(&options, &runtime_));
    ASSERT_GOOD(wyvern_problem_create("delta_rule", &problem_));
    set("T", 1), set("K", 16), set("V", 16);
    ASSERT_GOOD(wyvern_problem_set_text(problem_, "pass", "recurrent"));
  }
  void TearDown() override {
    wyvern_operator_destroy(op_);
    wyvern_problem_destroy(problem_);
    wyvern_runtime_destroy(runtime_);
    wyvern_device_destroy(device_);
  }

  void set(const char* field, std::int64_t value) {
    ASSERT_GOOD(wyvern_problem_set_int(problem_, field, value));
  }
  static bool can_compile() { return compiler_problem(DeviceKind::cpu).empty(); }
  void prepare(const wyvern_prepare_options* options = nullptr) {
    wyvern_operator_destroy(op_);
    ASSERT_GOOD(wyvern_prepare(runtime_, device_, problem_, options, &op_));
  }
  std::int32_t origin() const {
    std::int32_t origin = 0;
    EXPECT_GOOD(wyvern_operator_origin(op_, &origin));
    return origin;
  }
  /// The names of what the plan takes strided.
  std::string strided() const {
    std::array<wyvern_tensor_spec, 64> specs{};
    size_t count = 0;
    EXPECT_GOOD(wyvern_operator_tensors(op_, specs.data(), sizeof(wyvern_tensor_spec), specs.size(),
                                        &count));
    std::string names;
    for (size_t i = 0; i < count; ++i)
      if (specs[i].strided != 0) names += std::string(specs[i].name) + " ";
    return names;
  }
  std::string plan() const {
    const char* json = nullptr;
    EXPECT_GOOD(wyvern_operator_plan(op_, &json));
    return json;
  }

  testing::TempDirectory directory_;
  std::vector<std::string> said_;
  wyvern_device* device_ = nullptr;
  wyvern_runtime* runtime_ = nullptr;
  wyvern_problem* problem_ = nullptr;
  wyvern_operator* op_ = nullptr;
};

/// What a launch takes, in memory of the host, filled with numbers that follow from `seed`.
class Launch {
 public:
  Launch(const wyvern_operator* op, int seed) {
    size_t count = 0, bytes = 0;
    EXPECT_GOOD(wyvern_operator_tensors(op, nullptr, sizeof(wyvern_tensor_spec), 0, &count));
    std::vector<wyvern_tensor_spec> specs(count);
    EXPECT_GOOD(
        wyvern_operator_tensors(op, specs.data(), sizeof(wyvern_tensor_spec), count, nullptr));
    for (const wyvern_tensor_spec& spec : specs)
      if (spec.present != 0) specs_.push_back(spec);
    memory_.resize(specs_.size());
    for (std::size_t i = 0; i < specs_.size(); ++i) add(specs_[i], memory_[i], seed);
    EXPECT_GOOD(wyvern_operator_workspace_bytes(op, &bytes));
    workspace_.resize(bytes / sizeof(Block) + 1);
    what = WYVERN_LAUNCH_INIT;
    what.tensors = tensors.data();
    what.tensor_count = tensors.size();
    what.workspace = workspace_.data();
    what.workspace_bytes = bytes;
  }

  wyvern_tensor& tensor(std::string_view name) {
    for (wyvern_tensor& one : tensors)
      if (one.name == name) return one;
    ADD_FAILURE() << name;
    return tensors.front();
  }
  std::string bytes_of(std::string_view name) {
    for (const wyvern_tensor_spec& spec : specs_)
      if (spec.name == name) return {static_cast<const char*>(tensor(name).data), spec.bytes};
    return {};
  }

  std::vector<wyvern_tensor> tensors;
  wyvern_launch what{};

 private:
  struct alignas(256) Block {
    std::array<unsigned char, 256> bytes;
  };

  void add(const wyvern_tensor_spec& spec, std::vector<Block>& memory, int seed) {
    memory.resize(spec.bytes / sizeof(Block) + 1);
    auto* const values = reinterpret_cast<std::uint16_t*>(memory.data());
    for (std::size_t i = 0; i < spec.bytes / 2; ++i)
      values[i] = float_to_bf16(std::sin(static_cast<float>(seed + 1) * static_cast<float>(i + 1)));
    tensors.push_back({spec.name, memory.data(), spec.shape, nullptr, spec.dtype, spec.rank});
  }

  std::vector<wyvern_tensor_spec> specs_;
  std::vector<std::vector<Block>> memory_;
  std::vector<Block> workspace_;
};

TEST(CApi, SaysItsVersions) {
  EXPECT_EQ(wyvern_api_version(), WYVERN_API_VERSION);
  EXPECT_NE(std::string(wyvern_version()), "");
}

TEST_F(CApiTest, RefusesNullPointersByName) {
  wyvern_device_info info = WYVERN_DEVICE_INFO_INIT;
  wyvern_field_info field = WYVERN_FIELD_INFO_INIT;
  wyvern_launch launch = WYVERN_LAUNCH_INIT;
  wyvern_device* device = device_;
  wyvern_operator* op = nullptr;
  wyvern_problem* problem = nullptr;
  wyvern_memory* memory = nullptr;
  size_t bytes = 0;
  std::int32_t origin = 0;
  const char* json = nullptr;
  EXPECT_BAD(wyvern_device_open("cpu", nullptr), "device is null");
  EXPECT_BAD(wyvern_device_open(nullptr, &device), "name is null");
  EXPECT_EQ(device, nullptr);
  EXPECT_BAD(wyvern_device_open_best(nullptr), "device is null");
  EXPECT_BAD(wyvern_device_get_info(nullptr, &info), "device is null");
  EXPECT_BAD(wyvern_device_get_info(device_, nullptr), "info is null");
  EXPECT_BAD(wyvern_device_list_create(nullptr), "list is null");
  EXPECT_BAD(wyvern_device_list_get(nullptr, 0, &info), "list is null");
  EXPECT_BAD(wyvern_memory_create(nullptr, 1, &memory), "device is null");
  EXPECT_BAD(wyvern_memory_create(device_, 1, nullptr), "memory is null");
  EXPECT_BAD(wyvern_device_copy_in(nullptr, &bytes, &bytes, 1), "device is null");
  EXPECT_BAD(wyvern_device_copy_in(device_, nullptr, &bytes, 1), "null");
  EXPECT_BAD(wyvern_device_copy_out(device_, &bytes, nullptr, 1), "null");
  EXPECT_BAD(wyvern_device_fill(device_, nullptr, 0, 1, nullptr), "null");
  EXPECT_BAD(wyvern_device_synchronize(nullptr, nullptr), "device is null");
  EXPECT_BAD(wyvern_field_get(0, nullptr), "info is null");
  EXPECT_BAD(wyvern_field_get(wyvern_field_count(), &field), "index is");
  EXPECT_BAD(wyvern_problem_create(nullptr, &problem), "op is null");
  EXPECT_BAD(wyvern_problem_create("kda", nullptr), "problem is null");
  EXPECT_BAD(wyvern_problem_copy(nullptr, &problem), "from is null");
  EXPECT_BAD(wyvern_problem_set_int(nullptr, "T", 1), "problem is null");
  EXPECT_BAD(wyvern_problem_set_int(problem_, nullptr, 1), "field is null");
  EXPECT_BAD(wyvern_problem_set_text(problem_, "pass", nullptr), "value is null");
  EXPECT_BAD(wyvern_problem_get_text(problem_, "pass", nullptr, 1, nullptr), "text is null");
  EXPECT_BAD(wyvern_problem_validate(nullptr), "problem is null");
  EXPECT_BAD(wyvern_problem_key(nullptr, nullptr, 0, nullptr), "problem is null");
  EXPECT_BAD(wyvern_problem_tensors(problem_, nullptr, sizeof(wyvern_tensor_spec), 1, nullptr),
             "specs is null");
  EXPECT_BAD(wyvern_runtime_create(nullptr, nullptr), "runtime is null");
  EXPECT_BAD(wyvern_prepare(nullptr, device_, problem_, nullptr, &op), "runtime is null");
  EXPECT_BAD(wyvern_prepare(runtime_, nullptr, problem_, nullptr, &op), "device is null");
  EXPECT_BAD(wyvern_prepare(runtime_, device_, nullptr, nullptr, &op), "problem is null");
  EXPECT_BAD(wyvern_prepare(runtime_, device_, problem_, nullptr, nullptr), "op is null");
  EXPECT_BAD(wyvern_operator_workspace_bytes(nullptr, &bytes), "op is null");
  EXPECT_BAD(wyvern_operator_origin(nullptr, &origin), "op is null");
  EXPECT_BAD(wyvern_operator_plan(nullptr, &json), "op is null");
  EXPECT_BAD(wyvern_operator_tensors(nullptr, nullptr, 0, 0, nullptr), "op is null");
  EXPECT_BAD(wyvern_operator_launch(nullptr, &launch), "op is null");

  wyvern_device_destroy(nullptr);
  wyvern_device_list_destroy(nullptr);
  wyvern_memory_destroy(nullptr);
  wyvern_problem_destroy(nullptr);
  wyvern_runtime_destroy(nullptr);
  wyvern_operator_destroy(nullptr);
  EXPECT_EQ(wyvern_memory_data(nullptr), nullptr);
  EXPECT_EQ(wyvern_device_list_count(nullptr), 0U);
  EXPECT_EQ(wyvern_runtime_compiled(nullptr), 0);
}

TEST_F(CApiTest, TellsOfDevices) {
  wyvern_device* device = device_;
  EXPECT_BAD(wyvern_device_open("tpu", &device), "device is 'tpu'", "cuda:N");
  EXPECT_EQ(device, nullptr);

  wyvern_device_info opened = WYVERN_DEVICE_INFO_INIT, listed = WYVERN_DEVICE_INFO_INIT;
  ASSERT_GOOD(wyvern_device_get_info(device_, &opened));
  EXPECT_STREQ(opened.name, "cpu");
  EXPECT_STREQ(opened.problem, "");
  EXPECT_GT(opened.units, 0);
  wyvern_device_list* list = nullptr;
  ASSERT_GOOD(wyvern_device_list_create(&list));
  const size_t count = wyvern_device_list_count(list);
  ASSERT_GE(count, 1U);
  ASSERT_GOOD(wyvern_device_list_get(list, 0, &listed));
  EXPECT_STREQ(listed.key, opened.key);
  EXPECT_BAD(wyvern_device_list_get(list, count, &listed), "index is");
  wyvern_device_list_destroy(list);
}

TEST_F(CApiTest, MemoryKeepsItsDevice) {
  wyvern_device* device = nullptr;
  wyvern_memory* memory = nullptr;
  ASSERT_GOOD(wyvern_device_open("cpu", &device));
  expect_failure(wyvern_memory_create(device, SIZE_MAX, &memory), WYVERN_UNAVAILABLE, {}, __LINE__);
  EXPECT_EQ(memory, nullptr);
  ASSERT_GOOD(wyvern_memory_create(device, 3, &memory));
  void* const data = wyvern_memory_data(memory);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 256, 0U);
  ASSERT_GOOD(wyvern_device_fill(device, data, 'x', 3, nullptr));
  std::array<char, 3> host{};
  ASSERT_GOOD(wyvern_device_copy_out(device, host.data(), data, 3));
  EXPECT_EQ(std::string_view(host.data(), 3), "xxx");
  wyvern_device_destroy(device);
  static_cast<char*>(data)[2] = 'y';
  wyvern_memory_destroy(memory);
}

TEST(CApiProblem, HasEveryFieldOfTheTable) {
  wyvern_problem* problem = nullptr;
  ASSERT_GOOD(wyvern_problem_create("kda", &problem));
  ASSERT_EQ(wyvern_field_count(), problem_fields().size());
  for (size_t i = 0; i < wyvern_field_count(); ++i) {
    wyvern_field_info info = WYVERN_FIELD_INFO_INIT;
    ASSERT_GOOD(wyvern_field_get(i, &info));
    SCOPED_TRACE(info.name);
    EXPECT_EQ(info.name, problem_fields()[i].name);
    EXPECT_EQ(info.help, problem_fields()[i].help);
    EXPECT_EQ(info.scope, scope_text(problem_fields()[i].scope));
    if (std::string_view(info.name) != "op") {
      EXPECT_EQ(text_of(problem, info.name), info.value);
    }
    const bool integer = info.type == WYVERN_FIELD_INT, real = info.type == WYVERN_FIELD_REAL;
    const bool boolean = info.type == WYVERN_FIELD_BOOL, text = info.type == WYVERN_FIELD_TEXT;
    EXPECT_TRUE(integer || real || boolean || text);
    // Each is set by the function of its type and by no other.
    EXPECT_EQ(wyvern_problem_set_int(problem, info.name, 1),
              integer || boolean ? WYVERN_OK : WYVERN_BAD_INPUT);
    if (integer || boolean) {
      EXPECT_EQ(text_of(problem, info.name), boolean ? "true" : "1");
    }
    EXPECT_EQ(wyvern_problem_set_int(problem, info.name, 77),
              integer ? WYVERN_OK : WYVERN_BAD_INPUT);
    EXPECT_EQ(wyvern_problem_set_real(problem, info.name, 0.25),
              real ? WYVERN_OK : WYVERN_BAD_INPUT);
    if (real) {
      EXPECT_EQ(text_of(problem, info.name), "0.25");
    }
    const wyvern_status named = wyvern_problem_set_text(problem, info.name, "no such name");
    EXPECT_EQ(named, std::string_view(info.name) == "op" ? WYVERN_OK : WYVERN_BAD_INPUT);
    EXPECT_EQ(wyvern_problem_unset(problem, info.name),
              info.may_be_unset != 0 ? WYVERN_OK : WYVERN_BAD_INPUT);
    if (info.may_be_unset != 0) {
      EXPECT_EQ(text_of(problem, info.name), "");
    }
  }
  wyvern_problem_destroy(problem);
}

TEST_F(CApiTest, SaysWhatIsWrongWithAField) {
  wyvern_problem* problem = problem_;
  EXPECT_BAD(wyvern_problem_create("conv", &problem), "'conv'", "delta_rule");
  EXPECT_EQ(problem, nullptr);
  EXPECT_BAD(wyvern_problem_set_int(problem_, "householder", 1), "'householder'",
             "one of: num_householder, ", " more");
  EXPECT_BAD(wyvern_problem_set_int(problem_, "packed", 2), "packed is 2", "0 or 1");
  EXPECT_BAD(wyvern_problem_set_int(problem_, "dtype", 2), "dtype", "wyvern_problem_set_text()");
  EXPECT_BAD(wyvern_problem_set_text(problem_, "T", "8"), "T is", "wyvern_problem_set_int()");
  EXPECT_BAD(wyvern_problem_set_real(problem_, "T", 8), "T is", "wyvern_problem_set_int()");
  EXPECT_BAD(wyvern_problem_set_text(problem_, "dtype", "fp8"), "dtype is 'fp8'", "bf16");
  EXPECT_BAD(wyvern_problem_set_text(problem_, "pass", "back"), "pass is 'back'", "backward");
  EXPECT_BAD(wyvern_problem_set_text(problem_, "precision", ""), "precision is ''", "tf32x3");
  EXPECT_BAD(wyvern_problem_set_real(problem_, "scale", 1e300), "scale", "fp32");
  EXPECT_BAD(wyvern_problem_unset(problem_, "T"), "T is");
  EXPECT_EQ(text_of(problem_, "T"), "1");
  EXPECT_EQ(text_of(problem_, "dtype"), "bf16");

  EXPECT_GOOD(wyvern_problem_validate(problem_));
  set("K", 257);
  EXPECT_BAD(wyvern_problem_validate(problem_), "K is 257", "256");
  size_t length = 7;
  EXPECT_BAD(wyvern_problem_key(problem_, nullptr, 0, &length), "K is 257");
  EXPECT_BAD(wyvern_problem_tensors(problem_, nullptr, sizeof(wyvern_tensor_spec), 0, &length),
             "K is 257");
  EXPECT_EQ(length, 7U);
  EXPECT_BAD(wyvern_prepare(runtime_, device_, problem_, nullptr, &op_), "K is 257");
  EXPECT_EQ(op_, nullptr);
}

TEST_F(CApiTest, CutsTextsThatDoNotFit) {
  std::array<char, 6> text{'?', '?', '?', '?', '?', '?'};
  size_t length = 0;
  ASSERT_GOOD(wyvern_problem_get_text(problem_, "op", text.data(), 6, &length));
  EXPECT_STREQ(text.data(), "delta");
  EXPECT_EQ(length, std::strlen("delta_rule"));
  std::array<char, 256> key{};
  ASSERT_GOOD(wyvern_problem_key(problem_, key.data(), key.size(), nullptr));
  EXPECT_TRUE(std::string_view(key.data()).starts_with("delta_rule/recurrent/")) << key.data();
}

TEST(CApiProblem, AHintOfTheLongestSequenceIsPartOfTheKey) {
  wyvern_problem* problem = nullptr;
  ASSERT_GOOD(wyvern_problem_create("gated_delta_rule", &problem));
  const auto key = [&] {
    std::array<char, 256> text{};
    EXPECT_GOOD(wyvern_problem_key(problem, text.data(), text.size(), nullptr));
    return std::string(text.data());
  };
  ASSERT_GOOD(wyvern_problem_set_int(problem, "packed", 1));
  ASSERT_GOOD(wyvern_problem_set_int(problem, "T", 36864));
  ASSERT_GOOD(wyvern_problem_set_int(problem, "N", 65));
  const std::string plain = key();
  ASSERT_GOOD(wyvern_problem_set_int(problem, "seqlens_hint", 32768));
  EXPECT_GOOD(wyvern_problem_validate(problem));
  EXPECT_NE(key().find("/longest=32768/"), std::string::npos) << key();
  ASSERT_GOOD(wyvern_problem_unset(problem, "seqlens_hint"));
  EXPECT_EQ(key(), plain);
  ASSERT_GOOD(wyvern_problem_set_int(problem, "seqlens_hint", -1));
  EXPECT_BAD(wyvern_problem_validate(problem), "seqlens_hint is -1");
  wyvern_problem_destroy(problem);
}

TEST(CApiProblem, ANormOfOIsNamedByItsActivation) {
  wyvern_problem* problem = nullptr;
  ASSERT_GOOD(wyvern_problem_create("kda", &problem));
  ASSERT_GOOD(wyvern_problem_set_text(problem, "pass", "recurrent"));
  EXPECT_BAD(wyvern_problem_set_text(problem, "output_norm", "relu"), "output_norm is 'relu'",
             "silu");
  ASSERT_GOOD(wyvern_problem_set_text(problem, "output_norm", "sigmoid"));
  ASSERT_GOOD(wyvern_problem_set_real(problem, "norm_eps", 1e-5));
  EXPECT_GOOD(wyvern_problem_validate(problem));
  EXPECT_BAD(wyvern_problem_set_text(problem, "output_dtype", "fp8"), "output_dtype is 'fp8'",
             "float8_e4m3");
  ASSERT_GOOD(wyvern_problem_set_text(problem, "output_dtype", "float8_e4m3"));
  EXPECT_GOOD(wyvern_problem_validate(problem));
  ASSERT_GOOD(wyvern_problem_unset(problem, "output_dtype"));
  ASSERT_GOOD(wyvern_problem_unset(problem, "output_norm"));
  EXPECT_BAD(wyvern_problem_validate(problem), "norm_eps is 1e-05", "output_norm is set");
  wyvern_problem_destroy(problem);
}

TEST(CApiProblem, ACopyIsItsOwn) {
  wyvern_problem *first = nullptr, *second = nullptr;
  ASSERT_GOOD(wyvern_problem_create("kda", &first));
  ASSERT_GOOD(wyvern_problem_set_int(first, "T", 5));
  ASSERT_GOOD(wyvern_problem_copy(first, &second));
  ASSERT_GOOD(wyvern_problem_set_int(first, "T", 6));
  wyvern_problem_destroy(first);
  EXPECT_EQ(text_of(second, "T"), "5");
  wyvern_problem_destroy(second);
}

TEST(CApiProblem, ListsTheTensorsOfEveryOperator) {
  ASSERT_EQ(wyvern_operator_name_count(), operators().size());
  EXPECT_EQ(wyvern_operator_name(operators().size()), nullptr);
  for (size_t i = 0; i < wyvern_operator_name_count(); ++i) {
    SCOPED_TRACE(wyvern_operator_name(i));
    wyvern_problem* problem = nullptr;
    ASSERT_GOOD(wyvern_problem_create(wyvern_operator_name(i), &problem));
    Problem same;
    same.op = wyvern_operator_name(i);
    same.pass = Pass::backward;
    same.T = 5, same.H = 2, same.HV = 4, same.initial_state = true;
    ASSERT_GOOD(wyvern_problem_set_text(problem, "pass", "backward"));
    for (const auto& [name, value] : {std::pair("T", 5), {"H", 2}, {"HV", 4}, {"initial_state", 1}})
      ASSERT_GOOD(wyvern_problem_set_int(problem, name, value));
    const std::vector<TensorSpec> wanted = tensor_specs(same);
    // As a later version's caller asks, one struct less than there are.
    std::vector<Later<wyvern_tensor_spec>> specs(wanted.size());
    for (auto& spec : specs) spec.unknown = 1;
    size_t count = 0;
    ASSERT_GOOD(wyvern_problem_tensors(problem, &specs.front().known, sizeof(specs.front()),
                                       wanted.size() - 1, &count));
    ASSERT_EQ(count, wanted.size());
    EXPECT_EQ(specs.back().unknown, 1U);
    for (std::size_t t = 0; t + 1 < count; ++t) {
      const wyvern_tensor_spec& spec = specs[t].known;
      ASSERT_EQ(spec.name, wanted[t].name);
      EXPECT_EQ(specs[t].unknown, 0U);
      EXPECT_EQ(spec.present != 0, wanted[t].present);
      if (spec.present == 0) continue;
      ASSERT_EQ(spec.rank, wanted[t].rank);
      EXPECT_TRUE(std::equal(spec.shape, spec.shape + spec.rank, wanted[t].shape.begin()));
      EXPECT_EQ(spec.access, wanted[t].access == TensorAccess::in ? WYVERN_READ : WYVERN_WRITE);
      EXPECT_EQ(spec.dtype - 1, static_cast<int>(wanted[t].dtype));
      EXPECT_EQ(spec.bytes % size_of(wanted[t].dtype), 0U);
    }
    EXPECT_BAD(wyvern_problem_tensors(problem, &specs.front().known,
                                      offsetof(wyvern_tensor_spec, bytes), 1, &count),
               "spec_size is 88");
    wyvern_problem_destroy(problem);
  }
}

TEST_F(CApiTest, TakesStructsOfLaterVersionsWhereTheyAskForNothingNew) {
  Later<wyvern_runtime_options> options{WYVERN_RUNTIME_OPTIONS_INIT};
  const std::string folder = directory_.path().string();
  options.known.cache_directory = folder.c_str();
  options.known.struct_size = sizeof(options);
  wyvern_runtime* runtime = nullptr;
  ASSERT_GOOD(wyvern_runtime_create(&options.known, &runtime));
  wyvern_runtime_destroy(runtime);
  options.unknown = 1;
  EXPECT_BAD(wyvern_runtime_create(&options.known, &runtime), "options", "version 2");
  EXPECT_EQ(runtime, nullptr);
  options.known.struct_size = 0;
  EXPECT_BAD(wyvern_runtime_create(&options.known, &runtime), "options.struct_size is 0", "40");
  options.known.struct_size = 39;
  EXPECT_BAD(wyvern_runtime_create(&options.known, &runtime), "options.struct_size is 39", "40");
  options.known.struct_size = SIZE_MAX;  // never set: must not be read as far as that
  EXPECT_BAD(wyvern_runtime_create(&options.known, &runtime), "options.struct_size is", "40");
  options.known = WYVERN_RUNTIME_OPTIONS_INIT;
  options.known.compile_jobs = UINT64_MAX;
  EXPECT_BAD(wyvern_runtime_create(&options.known, &runtime), "compile_jobs");

  Later<wyvern_device_info> info{WYVERN_DEVICE_INFO_INIT, 1};
  info.known.struct_size = sizeof(info);
  ASSERT_GOOD(wyvern_device_get_info(device_, &info.known));
  EXPECT_EQ(info.unknown, 0U);
  EXPECT_EQ(info.known.struct_size, sizeof(info));
  info.known.struct_size = 8;
  EXPECT_BAD(wyvern_device_get_info(device_, &info.known), "info.struct_size is 8", "96");
}

TEST_F(CApiTest, ReadsNothingBeyondTheStructsOfTheFirstVersion) {
  wyvern_runtime_options options = WYVERN_RUNTIME_OPTIONS_INIT;
  const std::string folder = directory_.path().string();
  options.struct_size = 40;
  options.cache_directory = folder.c_str();
  std::memset(&options.command, 0x5a, sizeof options.command);
  wyvern_runtime* runtime = nullptr;
  ASSERT_GOOD(wyvern_runtime_create(&options, &runtime));
  wyvern_prepare_options choice = WYVERN_PREPARE_OPTIONS_INIT;
  choice.struct_size = 24;
  choice.tuning_budget_s = -1;
  wyvern_operator* op = nullptr;
  if (can_compile()) {
    EXPECT_GOOD(wyvern_prepare(runtime, device_, problem_, &choice, &op));
  }
  wyvern_operator_destroy(op);
  wyvern_runtime_destroy(runtime);
}

TEST_F(CApiTest, LaunchesWhateverTheOrderAndTheVersion) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  prepare();
  Launch first(op_, 1), second(op_, 1);
  const std::string before = first.bytes_of("o");
  ASSERT_GOOD(wyvern_operator_launch(op_, &first.what));
  EXPECT_NE(first.bytes_of("o"), before);

  std::reverse(second.tensors.begin(), second.tensors.end());
  std::vector<Later<wyvern_tensor>> later;
  for (const wyvern_tensor& tensor : second.tensors) later.push_back({tensor});
  later.push_back({{"g", nullptr, nullptr, nullptr, 0, 0}});  // said not to be there
  second.what.tensors = &later.front().known;
  second.what.tensor_size = sizeof(later.front());
  second.what.tensor_count = later.size();
  ASSERT_GOOD(wyvern_operator_launch(op_, &second.what));
  EXPECT_EQ(first.bytes_of("o"), second.bytes_of("o"));

  // Strides that say what is so without them.
  const std::array<std::int64_t, 4> strides{16, 16, 16, 1};
  first.tensor("q").strides = strides.data();
  ASSERT_GOOD(wyvern_operator_launch(op_, &first.what));
  later[2].unknown = 1;
  EXPECT_BAD(wyvern_operator_launch(op_, &second.what), "launch.tensors", "version 2");
  second.what.tensor_size = 39;
  EXPECT_BAD(wyvern_operator_launch(op_, &second.what), "launch.tensor_size is 39", "40");
  second.what.struct_size = 64;
  EXPECT_BAD(wyvern_operator_launch(op_, &second.what), "launch.struct_size is 64", "72");
  EXPECT_BAD(wyvern_operator_launch(op_, nullptr), "launch is null");
}

/// Slices of one projection, by plans that take them so; gradients are dense.
TEST_F(CApiTest, TakesStridedRowsWhereThePlanDoes) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  constexpr std::int64_t kTokens = 3, kRow = 16, kStride = 3 * kRow;
  set("T", kTokens);
  prepare();
  EXPECT_EQ(strided(), "q k v beta o ");
  Launch dense(op_, 1), apart(op_, 1);
  ASSERT_GOOD(wyvern_operator_launch(op_, &dense.what));
  const std::array<std::int64_t, 4> strides{7, kStride, kRow, 1};  // of one sequence any
  struct alignas(16) Projection {
    std::array<std::uint16_t, kTokens * kStride> elements;
  };
  Projection inputs, outputs;
  inputs.elements.fill(0xFFFF), outputs.elements.fill(0xFFFF);  // NaNs
  const auto slice = [&](const char* name, Projection& of, std::int64_t first) {
    wyvern_tensor& tensor = apart.tensor(name);
    const auto* const from = static_cast<const std::uint16_t*>(tensor.data);
    tensor.data = of.elements.data() + first;
    tensor.strides = strides.data();
    for (std::int64_t t = 0; t < kTokens; ++t)
      std::copy_n(from + t * kRow, kRow, of.elements.data() + first + t * kStride);
    std::int32_t takes = 0;
    EXPECT_GOOD(wyvern_operator_takes(op_, &tensor, sizeof tensor, &takes));
    EXPECT_EQ(takes, 1) << name;
  };
  slice("q", inputs, 0), slice("k", inputs, kRow), slice("o", outputs, kRow);
  ASSERT_GOOD(wyvern_operator_launch(op_, &apart.what));
  const std::string rows = dense.bytes_of("o");
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (std::int64_t i = 0; i < kStride; ++i) {
      std::uint16_t wanted = 0xFFFF;
      if (i / kRow == 1) std::memcpy(&wanted, rows.data() + (t * kRow + i % kRow) * 2, 2);
      EXPECT_EQ(outputs.elements[static_cast<std::size_t>(t * kStride + i)], wanted);
    }

  const auto takes_of = [&](Launch& launch, const char* name,
                            const std::array<std::int64_t, 4>& by) {
    wyvern_tensor tensor = launch.tensor(name);
    tensor.strides = by.data();
    std::int32_t yes = -1;
    EXPECT_GOOD(wyvern_operator_takes(op_, &tensor, sizeof tensor, &yes));
    return yes;
  };
  const auto takes = [&](const char* name, const std::array<std::int64_t, 4>& by) {
    return takes_of(dense, name, by);
  };
  EXPECT_EQ(takes("v", strides), 1);
  EXPECT_EQ(takes("v", {7, kStride + 1, kRow, 1}), 0);
  EXPECT_EQ(takes("v", {7, kRow / 2, kRow, 1}), 0);
  EXPECT_EQ(takes("v", {7, kStride, kRow, 2}), 0);
  // Between the rows of an output may be others at the same distances.
  slice("v", outputs, 0);
  ASSERT_GOOD(wyvern_operator_launch(op_, &apart.what));
  for (std::int64_t t = 0; t < kTokens; ++t)
    EXPECT_EQ(std::memcmp(outputs.elements.data() + kRow + t * kStride, rows.data() + t * kRow * 2,
                          kRow * 2),
              0);
  apart.tensor("v").data = outputs.elements.data() + kRow / 2;
  EXPECT_BAD(wyvern_operator_launch(op_, &apart.what), "o overlaps v");

  ASSERT_GOOD(wyvern_problem_set_text(problem_, "pass", "backward"));
  prepare();
  EXPECT_EQ(strided(), "q k v beta do ");
  Launch gradients(op_, 1);
  EXPECT_EQ(takes_of(gradients, "do", strides), 1);
  EXPECT_EQ(takes_of(gradients, "dv", strides), 0);
  EXPECT_EQ(takes_of(gradients, "dv", {kTokens * kRow, kRow, kRow, 1}), 1);
  wyvern_tensor unknown = dense.tensor("v");
  unknown.name = "Q";
  std::int32_t yes = 0;
  EXPECT_BAD(wyvern_operator_takes(op_, &unknown, sizeof unknown, &yes), "'Q'");
  EXPECT_BAD(wyvern_operator_takes(op_, nullptr, sizeof unknown, &yes), "tensor is null");
  EXPECT_BAD(wyvern_operator_takes(op_, &unknown, 39, &yes), "tensor_size is 39");
}

TEST_F(CApiTest, RefusesWrongTensorsByName) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  prepare();
  const std::array<std::int64_t, 4> other_shape{1, 1, 1, 17}, other_strides{16, 16, 16, 2};
  const auto refused = [&](std::initializer_list<std::string_view> parts, const auto& change,
                           int line) {
    Launch launch(op_, 1);
    const std::string before = launch.bytes_of("o");
    change(launch);
    expect_failure(wyvern_operator_launch(op_, &launch.what), WYVERN_BAD_INPUT, parts, line);
    EXPECT_EQ(Launch(op_, 1).bytes_of("o"), before);
  };
  refused({"'Q'"}, [](Launch& l) { l.tensor("q").name = "Q"; }, __LINE__);
  refused({"name"}, [](Launch& l) { l.tensor("q").name = nullptr; }, __LINE__);
  refused({"k is given twice"}, [](Launch& l) { l.tensor("q").name = "k"; }, __LINE__);
  refused(
      {"beta is missing"},
      [](Launch& l) {
        l.tensors.erase(l.tensors.begin() + (&l.tensor("beta") - l.tensors.data()));
        --l.what.tensor_count;
      },
      __LINE__);
  refused(
      {"g was given", "leave it out"},
      [](Launch& l) {
        l.tensors.push_back(l.tensor("beta"));
        l.tensors.back().name = "g";
        l.what.tensors = l.tensors.data();
        ++l.what.tensor_count;
      },
      __LINE__);
  refused({"v has dtype 0"}, [](Launch& l) { l.tensor("v").dtype = 0; }, __LINE__);
  refused({"v has dtype 9"}, [](Launch& l) { l.tensor("v").dtype = 9; }, __LINE__);
  refused({"v is fp32", "bf16"}, [](Launch& l) { l.tensor("v").dtype = WYVERN_FP32; }, __LINE__);
  refused({"k has rank -1"}, [](Launch& l) { l.tensor("k").rank = -1; }, __LINE__);
  refused({"k has rank 6"}, [](Launch& l) { l.tensor("k").rank = 6; }, __LINE__);
  refused({"k has shape", "[1, 1, 1, 16]"}, [](Launch& l) { l.tensor("k").rank = 3; }, __LINE__);
  refused(
      {"k has a shape that is null"}, [](Launch& l) { l.tensor("k").shape = nullptr; }, __LINE__);
  refused(
      {"k has shape [1, 1, 1, 17]"}, [&](Launch& l) { l.tensor("k").shape = other_shape.data(); },
      __LINE__);
  refused(
      {"k has strides", "contiguous"},
      [&](Launch& l) { l.tensor("k").strides = other_strides.data(); }, __LINE__);
  refused({"o has no data"}, [](Launch& l) { l.tensor("o").data = nullptr; }, __LINE__);
  refused({"o overlaps q"}, [](Launch& l) { l.tensor("o").data = l.tensor("q").data; }, __LINE__);
  refused(
      {"keys has shape"},
      [&](Launch& l) {
        l.tensor("k").shape = other_shape.data();
        l.what.shown_name = [](const char* name) {
          return std::string_view(name) == "k" ? "keys" : name;
        };
      },
      __LINE__);
  refused(
      {"out overlaps q"},
      [](Launch& l) {
        l.tensor("o").data = l.tensor("q").data;
        l.what.shown_name = [](const char* name) {
          return std::string_view(name) == "o" ? "out" : name;
        };
      },
      __LINE__);
  refused({"launch.tensors is null"}, [](Launch& l) { l.what.tensors = nullptr; }, __LINE__);
  refused(
      {"cu_seqlens_host is null"}, [](Launch& l) { l.what.cu_seqlens_host_count = 2; }, __LINE__);
}

TEST_F(CApiTest, RefusesAWorkspaceThatIsTooSmall) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  ASSERT_GOOD(wyvern_problem_set_text(problem_, "pass", "forward"));
  set("T", 20);
  prepare();
  Launch launch(op_, 1);
  ASSERT_GT(launch.what.workspace_bytes, 0U);
  EXPECT_GOOD(wyvern_operator_launch(op_, &launch.what));
  --launch.what.workspace_bytes;
  EXPECT_BAD(wyvern_operator_launch(op_, &launch.what), "workspace_bytes is");
  ++launch.what.workspace_bytes;
  launch.what.workspace = nullptr;
  EXPECT_BAD(wyvern_operator_launch(op_, &launch.what), "workspace is");
}

TEST_F(CApiTest, ChecksTheHostsSequenceLengths) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  set("T", 4), set("N", 2), set("packed", 1);
  prepare();
  Launch launch(op_, 1);
  launch.tensor("cu_seqlens").data = nullptr;
  EXPECT_BAD(wyvern_operator_launch(op_, &launch.what), "cu_seqlens has no data");
  alignas(16) std::array<std::int32_t, 3> seqlens{0, 3, 4};
  launch.tensor("cu_seqlens").data = seqlens.data();
  EXPECT_GOOD(wyvern_operator_launch(op_, &launch.what));
  const std::array<std::int64_t, 3> wrong{0, 3, 5};
  launch.what.cu_seqlens_host = wrong.data();
  launch.what.cu_seqlens_host_count = wrong.size();
  EXPECT_BAD(wyvern_operator_launch(op_, &launch.what), "cu_seqlens[2] is 5");
}

TEST_F(CApiTest, AnOperatorOutlivesWhatItWasMadeOf) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  prepare();
  Launch before(op_, 1), after(op_, 1);
  EXPECT_GOOD(wyvern_operator_launch(op_, &before.what));
  wyvern_problem_destroy(problem_);
  wyvern_device_destroy(device_);
  wyvern_runtime_destroy(runtime_);
  problem_ = nullptr, device_ = nullptr, runtime_ = nullptr;
  EXPECT_GOOD(wyvern_operator_launch(op_, &after.what));
  EXPECT_EQ(before.bytes_of("o"), after.bytes_of("o"));
  EXPECT_NE(plan(), "");
}

TEST_F(CApiTest, SeveralThreadsLaunchAndEachHasItsErrors) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  prepare();
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  std::array<bool, kThreads> good{};
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      Launch alone(op_, t);
      good[t] = std::string_view(wyvern_last_error()).empty();
      good[t] &= wyvern_operator_launch(op_, &alone.what) == WYVERN_OK;
      const std::string field = "field" + std::to_string(t);
      for (int i = 0; i < 200; ++i) {
        Launch launch(op_, t);
        good[t] &= wyvern_operator_launch(op_, &launch.what) == WYVERN_OK;
        good[t] &= launch.bytes_of("o") == alone.bytes_of("o");
        good[t] &= wyvern_problem_get_text(problem_, field.c_str(), nullptr, 0, nullptr) ==
                   WYVERN_BAD_INPUT;
        good[t] &= std::string_view(wyvern_last_error()).find(field) != std::string_view::npos;
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const bool one : good) EXPECT_TRUE(one);
}

TEST_F(CApiTest, ThePolicySaysWhereThePlanComesFrom) {
  if (!can_compile()) GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
  wyvern_operator* none = nullptr;
  prepare();
  EXPECT_EQ(origin(), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(wyvern_runtime_compiled(runtime_), 1);
  const std::string default_plan = plan();

  // A tuned plan, the default one by chance.
  const Device cpu = Device::open("cpu");
  Problem same;
  same.op = "delta_rule", same.pass = Pass::recurrent, same.T = 1, same.K = same.V = 16;
  WinnerRow row;
  row.device = cpu.info().key, row.driver = cpu.info().driver;
  row.family = problem_key(same).family, row.tokens = problem_key(same).tokens;
  row.sequences = problem_key(same).sequences;
  row.plan = default_plan;
  Cache cache(directory_.path());
  ASSERT_TRUE(cache.store_winner(row));
  prepare();
  EXPECT_EQ(origin(), WYVERN_ORIGIN_EXACT);
  wyvern_prepare_options options = WYVERN_PREPARE_OPTIONS_INIT;
  options.policy = WYVERN_POLICY_OFF;
  prepare(&options);
  EXPECT_EQ(origin(), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(plan(), default_plan);
  options.policy = WYVERN_POLICY_FIXED;  // whatever this machine's cache holds
  prepare(&options);
  EXPECT_EQ(origin(), WYVERN_ORIGIN_DEFAULT);
  options.policy = WYVERN_POLICY_OFF;
  options.plan = default_plan.c_str();
  EXPECT_BAD(wyvern_prepare(runtime_, device_, problem_, &options, &none), "options.policy is 1");
  options.policy = WYVERN_POLICY_CACHED;
  prepare(&options);
  EXPECT_EQ(origin(), WYVERN_ORIGIN_GIVEN);
  EXPECT_EQ(wyvern_runtime_compiled(runtime_), 1);
  options.plan = "[{}]";
  EXPECT_BAD(wyvern_prepare(runtime_, device_, problem_, &options, &none), "options.plan is [{}]");
  const std::string longer = "[\n{}" + std::string(5000, ' ') + ']';
  options.plan = longer.c_str();
  EXPECT_BAD(wyvern_prepare(runtime_, device_, problem_, &options, &none), "options.plan is [?{} ");
  EXPECT_LT(std::strlen(wyvern_last_error()), 250U);
  EXPECT_EQ(std::strchr(wyvern_last_error(), '\n'), nullptr);
  options.plan = nullptr;
  options.policy = 5;
  EXPECT_BAD(wyvern_prepare(runtime_, device_, problem_, &options, &none), "options.policy is 5");

  // One that cannot be used gives way, which the caller hears of.
  EXPECT_TRUE(said_.empty());
  ASSERT_TRUE(cache.clear());
  row.plan = plan_to_json(
      {{plan_from_json(default_plan)->front().template_id, Config{{"colour", std::int64_t{1}}}}});
  ASSERT_TRUE(cache.store_winner(row));
  prepare();
  EXPECT_EQ(origin(), WYVERN_ORIGIN_DEFAULT);
  ASSERT_EQ(said_.size(), 1U);
  EXPECT_NE(said_.front().find("default plan"), std::string::npos) << said_.front();
}

}  // namespace
}  // namespace wyvern
