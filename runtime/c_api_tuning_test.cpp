// The C API's policies that tune: when the program is asked, for what, and what becomes of a wait,
// a failure, a stop and a fork() meanwhile. The program is a script; python/tests has the real one.
#include <wyvern/wyvern.h>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache_testing.hpp"
#include "compiler/compiler.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

constexpr double kEver = std::numeric_limits<double>::infinity();

#define ASSERT_GOOD(call) ASSERT_EQ(call, WYVERN_OK) << wyvern_last_error()
#define EXPECT_GOOD(call) EXPECT_EQ(call, WYVERN_OK) << wyvern_last_error()

class CApiTuningTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!compiler_problem(DeviceKind::cpu).empty())
      GTEST_SKIP() << compiler_problem(DeviceKind::cpu);
    ASSERT_GOOD(wyvern_device_open("cpu", &device_));
    ASSERT_GOOD(wyvern_problem_create("delta_rule", &problem_));
    set("T", 1), set("K", 16), set("V", 16);
    ASSERT_GOOD(wyvern_problem_set_text(problem_, "pass", "recurrent"));
  }
  void TearDown() override {
    for (wyvern_operator* op : operators_) wyvern_operator_destroy(op);
    wyvern_problem_destroy(problem_);
    wyvern_runtime_destroy(runtime_);
    wyvern_device_destroy(device_);
  }

  void set(const char* field, std::int64_t value) {
    ASSERT_GOOD(wyvern_problem_set_int(problem_, field, value));
  }

  /// A runtime whose program writes down what it is asked, does `body`, and has ended.
  void start(const std::string& body) {
    const std::string program = (directory_.path() / "program").string();
    std::ofstream(program) << "#!/bin/sh\ncd " << directory_.path().string()
                           << "\necho \"$@\" \"cache=$WYVERN_CACHE_DIR\" >> asked\n"
                           << body << "\n";
    ASSERT_EQ(chmod(program.c_str(), 0700), 0);
    start_with(program);
  }
  void start_with(const std::string& program) {
    wyvern_runtime_options options = WYVERN_RUNTIME_OPTIONS_INIT;
    const std::string folder = cache_folder().string();
    options.cache_directory = folder.c_str();
    options.command = program.c_str();
    options.user = this;
    options.on_degraded = [](const char* sentence, void* user) {
      auto& test = *static_cast<CApiTuningTest*>(user);
      const std::scoped_lock lock(test.mutex_);
      test.said_ += sentence;
    };
    ASSERT_GOOD(wyvern_runtime_create(&options, &runtime_));
  }

  wyvern_operator* prepare(std::int64_t policy) {
    wyvern_prepare_options options = WYVERN_PREPARE_OPTIONS_INIT;
    options.policy = policy;
    options.tuning_budget_s = 2.5;
    wyvern_operator* op = nullptr;
    EXPECT_GOOD(wyvern_prepare(runtime_, device_, problem_, &options, &op));
    operators_.push_back(op);
    return op;
  }
  static std::int32_t origin(const wyvern_operator* op) {
    std::int32_t origin = 0;
    EXPECT_GOOD(wyvern_operator_origin(op, &origin));
    return origin;
  }
  std::size_t left(double seconds) {
    std::size_t count = 99;
    EXPECT_GOOD(wyvern_runtime_wait_for_tuning(runtime_, seconds, &count));
    return count;
  }

  /// What a tuner does for the problem: the winner is the plan of `op`.
  void store_winner(const wyvern_operator* op) {
    const char* plan = nullptr;
    ASSERT_GOOD(wyvern_operator_plan(op, &plan));
    const Device cpu = Device::open("cpu");
    Problem same;
    same.op = "delta_rule", same.pass = Pass::recurrent, same.T = 1, same.K = same.V = 16;
    WinnerRow row;
    row.device = cpu.info().key, row.driver = cpu.info().driver;
    row.family = problem_key(same).family, row.tokens = problem_key(same).tokens;
    row.sequences = problem_key(same).sequences;
    row.plan = plan;
    Cache cache(cache_folder());
    ASSERT_TRUE(cache.store_winner(row));
  }

  std::filesystem::path cache_folder() const { return directory_.path() / "cache"; }
  void let_go() { std::ofstream(directory_.path() / "go") << ""; }
  std::string asked() const {
    std::ostringstream text;
    text << std::ifstream(directory_.path() / "asked").rdbuf();
    return text.str();
  }
  void wait_until_asked() const {
    while (asked().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::string said() {
    const std::scoped_lock lock(mutex_);
    return said_;
  }

  testing::TempDirectory directory_;
  std::mutex mutex_;
  std::string said_;
  wyvern_device* device_ = nullptr;
  wyvern_runtime* runtime_ = nullptr;
  wyvern_problem* problem_ = nullptr;
  std::vector<wyvern_operator*> operators_;
};

constexpr const char* kWhenToldTo =
    "while [ ! -e go ]; do sleep 0.01; done; echo '{\"stored\": true}'";

TEST_F(CApiTuningTest, CompilesAheadOnAThreadOfTheRuntimes) {
  start("exit 1");
  for (const std::int64_t policy :
       {WYVERN_POLICY_OFF, WYVERN_POLICY_CACHED, WYVERN_POLICY_FIXED, WYVERN_POLICY_BACKGROUND}) {
    const std::int64_t before = wyvern_runtime_compiled(runtime_);
    set("V", 16 + policy);
    wyvern_prepare_options options = WYVERN_PREPARE_OPTIONS_INIT;
    options.policy = policy;
    ASSERT_GOOD(wyvern_compile_ahead(runtime_, device_, problem_, &options));
    while (wyvern_runtime_compiled(runtime_) == before)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (policy != WYVERN_POLICY_BACKGROUND) prepare(policy);
    EXPECT_EQ(wyvern_runtime_compiled(runtime_), before + 1) << "policy " << policy;
  }
  wyvern_prepare_options given = WYVERN_PREPARE_OPTIONS_INIT;
  given.plan = "[]";
  EXPECT_EQ(wyvern_compile_ahead(runtime_, device_, problem_, &given), WYVERN_BAD_INPUT);
  set("T", -1);
  EXPECT_EQ(wyvern_compile_ahead(runtime_, device_, problem_, nullptr), WYVERN_BAD_INPUT);
  EXPECT_EQ(wyvern_compile_ahead(nullptr, device_, problem_, nullptr), WYVERN_BAD_INPUT);
  set("T", 1), set("V", 64);
  const std::int64_t before = wyvern_runtime_compiled(runtime_);
  ASSERT_GOOD(wyvern_runtime_stop_tuning(runtime_));
  ASSERT_GOOD(wyvern_compile_ahead(runtime_, device_, problem_, nullptr));
  EXPECT_EQ(wyvern_runtime_compiled(runtime_), before);
  EXPECT_EQ(asked(), "");
}

/// A child of fork() has no thread of its parent's, and may begin one.
TEST_F(CApiTuningTest, AChildCompilesAheadAfterItsParentDid) {
  start("exit 1");
  ASSERT_GOOD(wyvern_compile_ahead(runtime_, device_, problem_, nullptr));
  const pid_t child = fork();
  if (child == 0) {
    ::alarm(60);
    const std::int64_t before = wyvern_runtime_compiled(runtime_);
    wyvern_problem_set_int(problem_, "V", 17);
    if (wyvern_compile_ahead(runtime_, device_, problem_, nullptr) != WYVERN_OK) _exit(1);
    while (wyvern_runtime_compiled(runtime_) == before) ::usleep(2000);
    wyvern_runtime_destroy(runtime_);
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

TEST_F(CApiTuningTest, InTheBackgroundOperatorsAreOutdatedWhenTheProblemIsTuned) {
  start(kWhenToldTo);
  wyvern_operator* const first = prepare(WYVERN_POLICY_BACKGROUND);
  wyvern_operator* const second = prepare(WYVERN_POLICY_BACKGROUND);
  EXPECT_EQ(origin(first), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(left(0), 1U);
  EXPECT_EQ(left(0.02), 1U);
  wait_until_asked();
  EXPECT_EQ(wyvern_operator_is_outdated(first), 0);
  store_winner(first);
  let_go();
  EXPECT_EQ(left(kEver), 0U);
  EXPECT_EQ(wyvern_operator_is_outdated(first), 1);
  EXPECT_EQ(wyvern_operator_is_outdated(second), 1);
  wyvern_operator* const tuned = prepare(WYVERN_POLICY_BACKGROUND);
  EXPECT_EQ(origin(tuned), WYVERN_ORIGIN_EXACT);
  EXPECT_EQ(wyvern_operator_is_outdated(tuned), 0);
  EXPECT_EQ(wyvern_operator_is_outdated(prepare(WYVERN_POLICY_CACHED)), 0);

  const std::string words = asked();
  EXPECT_EQ(std::count(words.begin(), words.end(), '\n'), 1) << words;
  for (const std::string& word :
       {std::string("tune delta_rule --problem "), std::string("pass=recurrent,"),
        std::string(",T=1,"), std::string(",K=16,"), std::string("--device cpu"),
        std::string("--budget 2.500s"), "--parent " + std::to_string(getpid()),
        std::string("--json"), "cache=" + cache_folder().string()})
    EXPECT_NE(words.find(word), std::string::npos) << words << " has no " << word;
  EXPECT_EQ(said(), "");
}

TEST_F(CApiTuningTest, OnAMissThePlanIsTheTunedOne) {
  start(kWhenToldTo);
  wyvern_operator* const known = prepare(WYVERN_POLICY_CACHED);
  std::thread tuner([&] {
    wait_until_asked();
    store_winner(known);
    let_go();
  });
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_ON_MISS)), WYVERN_ORIGIN_EXACT);
  tuner.join();
  EXPECT_EQ(wyvern_operator_is_outdated(operators_.back()), 0);
}

TEST_F(CApiTuningTest, AFailureIsSaidOnceAndTheDefaultPlanStays) {
  start("echo '{\"error\": {\"message\": \"no luck\"}}'; exit 3");
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_ON_MISS)), WYVERN_ORIGIN_DEFAULT);
  const std::string sentence = said();
  EXPECT_NE(sentence.find("was not tuned on cpu: no luck"), std::string::npos) << sentence;
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_ON_MISS)), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_BACKGROUND)), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(left(kEver), 0U);
  EXPECT_EQ(said(), sentence);
  EXPECT_EQ(wyvern_operator_is_outdated(operators_.back()), 0);
}

TEST_F(CApiTuningTest, APoorProgramIsNamed) {
  start_with("/nonexistent/wyvern");
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_BACKGROUND)), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(left(kEver), 0U);
  EXPECT_NE(said().find("'/nonexistent/wyvern', which tunes, cannot be started"), std::string::npos)
      << said();
  wyvern_runtime_destroy(runtime_);
  start_with("wyvern-that-no-path-has");
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_ON_MISS)), WYVERN_ORIGIN_DEFAULT);
  for (const char* const word : {"'wyvern-that-no-path-has', which tunes, cannot be started: it is "
                                 "neither installed with this library nor on PATH",
                                 "WYVERN_COMMAND=ON", "\"cached\""})
    EXPECT_NE(said().find(word), std::string::npos) << said();
  wyvern_runtime_destroy(runtime_);
  start("echo no JSON");
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_ON_MISS)), WYVERN_ORIGIN_DEFAULT);
  EXPECT_NE(said().find("program', which tunes, ended without a word"), std::string::npos)
      << said();
}

TEST_F(CApiTuningTest, StoppingEndsAProgramThatWouldGoOn) {
  start("trap '' INT; while :; do sleep 0.1; done");
  prepare(WYVERN_POLICY_BACKGROUND);
  set("K", 32);
  prepare(WYVERN_POLICY_BACKGROUND);
  EXPECT_EQ(left(0), 2U);
  wait_until_asked();
  // It returns at all: the program does not end by itself.
  ASSERT_GOOD(wyvern_runtime_stop_tuning(runtime_));
  EXPECT_EQ(left(kEver), 0U);
  set("K", 64);
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_BACKGROUND)), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(origin(prepare(WYVERN_POLICY_ON_MISS)), WYVERN_ORIGIN_DEFAULT);
  EXPECT_EQ(left(0), 0U);
  EXPECT_EQ(said(), "");
}

TEST_F(CApiTuningTest, AForkedChildLeavesTuningsToItsParent) {
  start(kWhenToldTo);
  wyvern_operator* const first = prepare(WYVERN_POLICY_BACKGROUND);
  wait_until_asked();
  const pid_t child = fork();
  if (child == 0) {
    bool good = left(kEver) == 0;
    prepare(WYVERN_POLICY_BACKGROUND);
    good &= left(0) == 0;
    // What is new to the child it tunes itself, by a thread of its own.
    EXPECT_EQ(wyvern_problem_set_int(problem_, "K", 32), WYVERN_OK);
    prepare(WYVERN_POLICY_BACKGROUND);
    good &= left(0) == 1;
    wyvern_runtime_destroy(runtime_);
    _exit(good && wyvern_operator_is_outdated(first) == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(left(0), 1U);
  let_go();
  EXPECT_EQ(left(kEver), 0U);
  EXPECT_EQ(wyvern_operator_is_outdated(first), 1);
}

TEST_F(CApiTuningTest, RefusesUnknownPoliciesBudgetsAndTimes) {
  start(kWhenToldTo);
  const auto refuses = [&](const wyvern_prepare_options& options, const std::string& part) {
    wyvern_operator* op = nullptr;
    EXPECT_EQ(wyvern_prepare(runtime_, device_, problem_, &options, &op), WYVERN_BAD_INPUT);
    EXPECT_NE(std::string(wyvern_last_error()).find(part), std::string::npos)
        << wyvern_last_error();
  };
  wyvern_prepare_options options = WYVERN_PREPARE_OPTIONS_INIT;
  options.policy = 5;
  refuses(options, "options.policy is 5");
  options.policy = WYVERN_POLICY_BACKGROUND;
  options.plan = "[]";
  refuses(options, "options.policy is 3");
  options.plan = nullptr;
  for (const double budget : {-1.0, std::numeric_limits<double>::quiet_NaN(), kEver}) {
    options.tuning_budget_s = budget;
    refuses(options, "options.tuning_budget_s is");
  }
  EXPECT_EQ(wyvern_runtime_wait_for_tuning(runtime_, -1, nullptr), WYVERN_BAD_INPUT);
  EXPECT_EQ(wyvern_runtime_wait_for_tuning(nullptr, 0, nullptr), WYVERN_BAD_INPUT);
  EXPECT_EQ(wyvern_runtime_stop_tuning(nullptr), WYVERN_BAD_INPUT);
  EXPECT_EQ(wyvern_operator_is_outdated(nullptr), 0);
  EXPECT_EQ(asked(), "");
}

}  // namespace
}  // namespace wyvern
