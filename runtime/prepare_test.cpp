// What prepare() does while others compile, and when a stored plan or artifact is of no use.
#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache_testing.hpp"
#include "runtime/bind.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/kernel_store.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

using namespace std::chrono_literals;

/// The CPU, with a say in what loads.
class WatchedCpu final : public DeviceImpl {
 public:
  WatchedCpu() : cpu_(Device::open("cpu")) {
    info_ = cpu_.info();
    target_ = real().target();
  }

  /// Called before each load; its exceptions propagate to load().
  std::function<void(const Artifact&)> before_load;

  void* allocate(std::size_t bytes) override { return real().allocate(bytes); }
  void free(void* pointer) noexcept override { real().free(pointer); }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    real().copy_in(device, host, bytes);
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    real().copy_out(host, device, bytes);
  }
  void fill(void* device, unsigned char byte, std::size_t bytes, Stream stream) override {
    real().fill(device, byte, bytes, stream);
  }
  void synchronize(Stream stream) override { real().synchronize(stream); }
  std::shared_ptr<const Kernel> load(const Artifact& artifact, const Geometry& block) override {
    if (before_load) before_load(artifact);
    return real().load(artifact, block);
  }
  std::unique_ptr<Timer> make_timer() override { return real().make_timer(); }
  std::shared_ptr<void> make_stream() override { return real().make_stream(); }
  std::unique_ptr<Replay> capture(const std::function<void(Stream)>& record) override {
    return real().capture(record);
  }
  std::int64_t cache_bytes() const override { return real().cache_bytes(); }
  bool host_memory() const override { return real().host_memory(); }
  Measuring measuring() const override { return real().measuring(); }
  Rates rates() const override { return real().rates(); }

 private:
  DeviceImpl& real() const { return cpu_.impl(); }
  Device cpu_;
};

/// Always the same answer.
class OnePlan final : public PlanSource {
 public:
  explicit OnePlan(Plan plan) : plan_(std::move(plan)) {}
  std::optional<PlanChoice> find(const DeviceInfo&, const ProblemKey&, const PlanCheck&) override {
    return PlanChoice{plan_, Origin::exact};
  }
  void set(Plan plan) { plan_ = std::move(plan); }

 private:
  Plan plan_;
};

/// Decodes a token with values of V channels, by one kernel that no other V has.
Problem problem(std::int64_t V) {
  Problem p;
  p.op = "delta_rule";
  p.pass = Pass::recurrent;
  p.T = 1, p.K = 16, p.V = V;
  return p;
}

void wait_until(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(1ms);
}

/// How many open files of this process are `path`.
int times_open(const std::filesystem::path& path) {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += std::filesystem::read_symlink(entry.path(), ignored) == path;
  return count;
}

bool is_asleep(long thread) {
  std::ifstream file(fmt::format("/proc/self/task/{}/stat", thread));
  std::string line;
  std::getline(file, line);
  return line.find(") S ") != std::string::npos;
}

class PrepareTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = compiler_problem(DeviceKind::cpu); !problem.empty())
      GTEST_SKIP() << problem;
  }

  RuntimeOptions options(std::shared_ptr<PlanSource> plans = nullptr) {
    RuntimeOptions options;
    options.cache = std::make_shared<Cache>(directory_.path());
    options.plans = std::move(plans);
    options.on_degraded = [this](const std::string& sentence) { said_.push_back(sentence); };
    return options;
  }

  Plan default_plan_of(const Problem& p) const { return default_plan(p, device_.impl().target()); }
  /// A legal plan that is not the default.
  Plan other_plan_of(const Problem& p) const {
    const Plan plan = default_plan_of(p);
    const auto op = bind_operator(device_, p, plan);
    const BoundStep& step = op->steps.front();
    for (const Tunable& tunable : step.source_template->tunables)
      for (const Value& value : tunable.values) {
        Plan other = plan;
        other.front().config.set(tunable.name, value);
        if (other != plan && step.source_template
                                 ->problem(Spec(step.constants, other.front().config),
                                           device_.impl().target().limits)
                                 .empty())
          return other;
      }
    ADD_FAILURE() << "the template has one config";
    return plan;
  }
  std::string artifact_key_of(const Problem& p) const {
    const auto op = bind_operator(device_, p, default_plan_of(p));
    EXPECT_EQ(op->steps.size(), 1U);
    const BoundStep& step = op->steps.front();
    return artifact_key(
        {step.source_template, step.constants, step.step.config, device_.impl().target()});
  }

  testing::TempDirectory directory_;
  std::shared_ptr<WatchedCpu> cpu_ = std::make_shared<WatchedCpu>();
  Device device_{cpu_};
  std::vector<std::string> said_;
};

TEST_F(PrepareTest, WaitsForAnotherProcessOnlyWithWhoNeedsItsKernel) {
  // Who waits in vain gives up and compiles, which the count would show.
  KernelStore store(std::make_shared<Cache>(directory_.path()), 0, 1h);
  const auto kernel_of = [&](const Problem& p) {
    const auto op = bind_operator(device_, p, default_plan_of(p));
    store.load(*op);
    return op->steps.front().kernel;
  };
  const std::shared_ptr<const Kernel> loaded = kernel_of(problem(16));
  ASSERT_EQ(store.compiled(), 1);
  const Cache elsewhere(directory_.path());
  std::optional<ArtifactClaim> claim =
      elsewhere.claim_artifact(artifact_key_of(problem(32)), testing::kFar);
  auto waiting = std::async(std::launch::async, kernel_of, problem(32));
  wait_until([&] { return times_open(elsewhere.file().string() + ".claims") == 2; });

  EXPECT_EQ(kernel_of(problem(16)), loaded);
  EXPECT_EQ(store.compiled(), 1);
  EXPECT_NE(kernel_of(problem(48)), nullptr);
  EXPECT_EQ(store.compiled(), 2);

  claim.reset();
  EXPECT_NE(waiting.get(), nullptr);
  EXPECT_EQ(store.compiled(), 3);
}

/// Kernels that were compiled elsewhere are loaded without a compiler, and a damaged one is
/// compiled.
TEST_F(PrepareTest, TakesShippedCode) {
  const auto cache = std::make_shared<Cache>(directory_.path() / "own");
  const auto prepare = [&](KernelStore& store, const Problem& p) {
    const auto op = bind_operator(device_, p, default_plan_of(p));
    store.load(*op);
    return op;
  };
  const std::filesystem::path folder = directory_.path() / "code";
  std::filesystem::path file;
  std::string compiled_key;
  {
    KernelStore store(cache, 1);
    const auto op = prepare(store, problem(16));
    const BoundStep& step = op->steps.front();
    compiled_key = step.artifact_key;
    const std::string key =
        code_key({step.source_template, step.constants, step.step.config, device_.impl().target()});
    ShippedCode::write(folder, key, cache->find_artifact(compiled_key).value());
    file = folder / device_.impl().target().name() / (key + ".kernel");
    ASSERT_TRUE(std::filesystem::exists(file));
  }
  std::string said;
  const auto shipped =
      std::make_shared<const ShippedCode>(std::vector{directory_.path() / "none", folder},
                                          [&](const std::string& sentence) { said += sentence; });
  const auto other = std::make_shared<Cache>(directory_.path() / "other");
  {
    KernelStore store(other, 1, KernelStore::kPatience, shipped);
    EXPECT_EQ(prepare(store, problem(16))->steps.front().artifact_key, compiled_key);
    EXPECT_EQ(store.compiled(), 0);
    EXPECT_TRUE(other->list_artifacts().empty());
    prepare(store, problem(32));  // not shipped
    EXPECT_EQ(store.compiled(), 1);
  }
  EXPECT_EQ(said, "");
  {  // the last byte of the code
    std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekg(-1, std::ios::end);
    const char last = static_cast<char>(damaged.get());
    damaged.seekp(-1, std::ios::end);
    damaged.put(static_cast<char>(~last));
  }
  KernelStore store(other, 1, KernelStore::kPatience, shipped);
  EXPECT_NE(prepare(store, problem(16))->steps.front().kernel, nullptr);
  EXPECT_EQ(store.compiled(), 1);
  EXPECT_NE(said.find("is damaged"), std::string::npos) << said;
}

/// What is compiled ahead is not compiled again, in whatever order the two come, also where the
/// cache keeps nothing; and it is not loaded before it is asked for.
TEST_F(PrepareTest, CompilesAheadAndLoadsNothing) {
  std::atomic<int> loads = 0;
  cpu_->before_load = [&](const Artifact&) { ++loads; };
  const auto bound = [&](const Problem& p) {
    return bind_operator(device_, p, default_plan_of(p));
  };
  for (const auto& folder : {directory_.path(), std::filesystem::path("/dev/null/none")}) {
    loads = 0;
    const auto cache = std::make_shared<Cache>(folder);
    cache->on_degraded([](const std::string&) {});
    KernelStore store(cache, 0);
    for (int i = 0; i < 2; ++i) {
      const auto op = bound(problem(16));
      store.compile_ahead(*op);
      EXPECT_EQ(op->steps.front().kernel, nullptr);
    }
    EXPECT_EQ(store.compiled(), 1) << folder;
    EXPECT_EQ(loads, 0) << folder;
    const auto op = bound(problem(16));
    store.load(*op);
    store.compile_ahead(*op);
    EXPECT_NE(op->steps.front().kernel, nullptr);
    EXPECT_EQ(op->steps.front().artifact_key, artifact_key_of(problem(16)));
    EXPECT_EQ(store.compiled(), 1) << folder;
    EXPECT_EQ(loads, 1) << folder;
  }
  KernelStore store(std::make_shared<Cache>(directory_.path()), 0);
  for (std::int64_t V = 32; V < 48; ++V) {
    const auto op = bound(problem(V));
    std::thread ahead([&] { store.compile_ahead(*bound(problem(V))); });
    store.load(*op);
    ahead.join();
    EXPECT_NE(op->steps.front().kernel, nullptr);
    EXPECT_EQ(store.compiled(), V - 31);
  }
}

TEST_F(PrepareTest, CompilesAheadThePlanThatPrepareTakes) {
  for (const bool tuned : {false, true}) {
    const Problem p = problem(tuned ? 128 : 32);
    Runtime runtime(options(tuned ? std::make_shared<OnePlan>(other_plan_of(p)) : nullptr));
    runtime.compile_ahead(device_, p);
    EXPECT_EQ(runtime.compiled(), 1);
    const Plan plan = runtime.prepare(device_, p).plan();
    EXPECT_EQ(plan, tuned ? other_plan_of(p) : default_plan_of(p))
        << ::testing::PrintToString(said_);
    EXPECT_EQ(runtime.compiled(), 1);
  }
  Problem illegal = problem(16);
  illegal.T = -1;
  EXPECT_THROW(Runtime(options()).compile_ahead(device_, illegal), Error);
}

TEST_F(PrepareTest, ClaimsThatNeverEndDelayACallOnceAndLaterOnesLess) {
  const Cache stopped(directory_.path());
  std::vector<ArtifactClaim> held;
  for (const std::int64_t V : {16, 32, 48, 64})
    held.push_back(stopped.claim_artifact(artifact_key_of(problem(V)), testing::kFar));

  constexpr auto kPatience = 200ms;
  constexpr auto kLongestNap = 20ms;
  KernelStore store(std::make_shared<Cache>(directory_.path()), 1, kPatience);
  // Three kernels of one call.
  const auto op = bind_operator(device_, problem(16), default_plan_of(problem(16)));
  for (const std::int64_t V : {32, 48}) {
    const auto other = bind_operator(device_, problem(V), default_plan_of(problem(V)));
    op->steps.push_back(other->steps.front());
  }
  store.load(*op);
  EXPECT_EQ(store.compiled(), 3);
  for (const BoundStep& step : op->steps) EXPECT_NE(step.kernel, nullptr);
  // What it asked to sleep, which no other load of the machine makes longer.
  const auto slept = store.slept();
  EXPECT_GT(slept, 0ms);
  EXPECT_LE(slept, kPatience + kLongestNap);

  const auto next = bind_operator(device_, problem(64), default_plan_of(problem(64)));
  store.load(*next);
  EXPECT_EQ(store.compiled(), 4);
  EXPECT_LE(store.slept() - slept, KernelStore::kShortPatience + kLongestNap);
}

TEST_F(PrepareTest, AChildCanPrepareWhateverOtherThreadsDidAtTheFork) {
  KernelStore store(std::make_shared<Cache>(directory_.path()), 0, 1h);
  const auto prepares = [&](const Problem& p) {
    const auto op = bind_operator(device_, p, default_plan_of(p));
    store.load(*op);
    return op->steps.front().kernel != nullptr;
  };
  const Cache elsewhere(directory_.path());
  std::optional<ArtifactClaim> claim =
      elsewhere.claim_artifact(artifact_key_of(problem(32)), testing::kFar);
  // In the middle of its work, which ends after the fork has begun.
  auto waiting = std::async(std::launch::async, prepares, problem(32));
  wait_until([&] { return times_open(elsewhere.file().string() + ".claims") == 2; });
  auto release = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(200ms);
    claim.reset();
  });
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(prepares(problem(32)) && prepares(problem(48)) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  release.get();
  EXPECT_TRUE(waiting.get());
}

/// Files without a name that hold kernels' code in this process's memory.
std::set<std::string> mapped_kernels() {
  std::set<std::string> inodes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string range, mode, offset, device, inode, name;
    fields >> range >> mode >> offset >> device >> inode >> name;
    if (name == "/memfd:wyvern-kernel") inodes.insert(inode);
  }
  return inodes;
}

TEST_F(PrepareTest, ALoadedKernelIsItsOwnAndTakesNoDescriptor) {
  Runtime runtime(options());
  std::vector<Operator> loaded;
  const std::size_t before = mapped_kernels().size();
  for (const std::int64_t V : {16, 32, 48, 64, 80})
    loaded.push_back(runtime.prepare(device_, problem(V)));
  EXPECT_EQ(mapped_kernels().size(), before + 5);
  EXPECT_EQ(times_open("/memfd:wyvern-kernel (deleted)"), 0);
}

TEST_F(PrepareTest, AForkByWhoPreparesDoesNotWaitForItself) {
  // The device's own code stands for whatever calls fork() from inside.
  pid_t child = -1;
  cpu_->before_load = [&](const Artifact&) {
    if (child < 0 && (child = ::fork()) == 0) ::_exit(0);
  };
  Runtime runtime(options());
  EXPECT_EQ(runtime.prepare(device_, problem(16)).origin(), Origin::fallback);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(PrepareTest, OneThreadMakesAKernelThatSeveralNeed) {
  Runtime runtime(options());
  const Operator loaded = runtime.prepare(device_, problem(16));
  std::promise<void> go;
  std::atomic<int> loads = 0;
  cpu_->before_load = [&, gate = go.get_future().share()](const Artifact&) {
    ++loads;
    gate.wait();
  };
  const auto prepare = [&] { return runtime.prepare(device_, problem(32)); };
  auto first = std::async(std::launch::async, prepare);
  wait_until([&] { return loads == 1; });
  auto second = std::async(std::launch::async, prepare);
  auto third = std::async(std::launch::async, prepare);
  // Meanwhile nothing keeps what is loaded.
  EXPECT_EQ(runtime.prepare(device_, problem(16)).impl().steps.front().kernel,
            loaded.impl().steps.front().kernel);
  go.set_value();
  const auto kernel = first.get().impl().steps.front().kernel;
  EXPECT_EQ(second.get().impl().steps.front().kernel, kernel);
  EXPECT_EQ(third.get().impl().steps.front().kernel, kernel);
  EXPECT_EQ(loads, 1);
  EXPECT_EQ(runtime.compiled(), 2);
}

TEST_F(PrepareTest, AFailureReachesAllWhoWaitAndIsNotKept) {
  Runtime runtime(options());
  const Problem p = problem(32);
  const Plan plan = default_plan_of(p);
  std::promise<void> go;
  std::atomic<int> loads = 0;
  cpu_->before_load = [&, gate = go.get_future().share()](const Artifact&) {
    ++loads;
    gate.wait();
    throw Error(ErrorKind::kUnavailable, "the device is full");
  };
  std::atomic<long> second_thread = 0;
  const auto failure = [&](bool is_second) -> std::string {
    if (is_second) second_thread = ::syscall(SYS_gettid);
    try {
      (void)runtime.prepare(device_, p, plan);
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  };
  auto first = std::async(std::launch::async, failure, false);
  wait_until([&] { return loads == 1; });
  auto second = std::async(std::launch::async, failure, true);
  wait_until([&] { return second_thread != 0 && is_asleep(second_thread); });
  go.set_value();
  EXPECT_EQ(first.get(), "the device is full");
  EXPECT_EQ(second.get(), "the device is full");
  EXPECT_EQ(loads, 1);

  cpu_->before_load = {};
  EXPECT_NE(runtime.prepare(device_, p, plan).impl().steps.front().kernel, nullptr);
}

TEST_F(PrepareTest, AnArtifactThatDoesNotLoadIsCompiledAnew) {
  const std::string key = artifact_key_of(problem(16));
  const auto cache = std::make_shared<Cache>(directory_.path());
  (void)Runtime(options()).prepare(device_, problem(16));
  const std::optional<ArtifactRow> good = cache->find_artifact(key);
  ASSERT_TRUE(good);

  ArtifactRow no_code = *good, no_entry = *good;
  no_code.code = "not a shared object";
  const std::string entry = from_row(*good)->entry;
  no_entry.metadata.replace(no_entry.metadata.find(entry), entry.size(), "another_name");
  std::vector<ArtifactRow> rows{no_code, no_entry};
  // Cut where the headers still read well, in the code, and by a byte.
  for (const std::size_t size :
       {std::size_t{64}, std::size_t{600}, good->code.size() / 2, good->code.size() - 1}) {
    rows.push_back(*good);
    rows.back().code.resize(size);
  }
  for (const ArtifactRow& bad : rows) {
    SCOPED_TRACE(bad.code.size());
    ASSERT_TRUE(cache->store_artifact(bad));
    Runtime runtime(options());
    EXPECT_NE(runtime.prepare(device_, problem(16)).impl().steps.front().kernel, nullptr);
    EXPECT_EQ(runtime.compiled(), 1);
    const std::optional<ArtifactRow> repaired = cache->find_artifact(key);
    ASSERT_TRUE(repaired);
    EXPECT_EQ(from_row(*repaired)->entry, entry);
    EXPECT_EQ(repaired->code.size(), good->code.size());
  }
}

TEST_F(PrepareTest, AStoredPlanThatDoesNotBindIsReplacedWithOneWarning) {
  const Problem p = problem(16);
  Runtime runtime(options(std::make_shared<OnePlan>(Plan{{"no_such_template", {}}})));
  for (int i = 0; i < 2; ++i) {
    const Operator op = runtime.prepare(device_, p);
    EXPECT_EQ(op.origin(), Origin::fallback);
    EXPECT_EQ(op.plan(), default_plan_of(p));
  }
  ASSERT_EQ(said_.size(), 1U);
  for (const std::string& part : {problem_key(p).to_string(), std::string("no_such_template"),
                                  std::string("default plan"), std::string("tune")})
    EXPECT_NE(said_.front().find(part), std::string::npos) << said_.front();
}

TEST_F(PrepareTest, AStoredPlanOutsideItsSpaceIsReplacedWithOneWarning) {
  const Problem p = problem(16);
  const ProblemKey key = problem_key(p);
  WinnerRow row;
  row.device = device_.info().key;
  row.driver = device_.info().driver;
  row.family = key.family;
  row.tokens = key.tokens, row.sequences = key.sequences;
  const std::string good = plan_to_json(default_plan_of(p));
  const std::string value = "BV=64";
  ASSERT_NE(good.find(value), std::string::npos) << good;
  // 128 columns are legal elsewhere, the other values nowhere.
  for (const char* bad : {"BV=0", "BV=-1", "BV=128", "BV=32", "BV=64,BK=64", "BV=true"}) {
    said_.clear();
    row.plan = good;
    row.plan.replace(row.plan.find(value), value.size(), bad);
    const RuntimeOptions with_cache = options();
    ASSERT_TRUE(with_cache.cache->store_winner(row));
    Runtime runtime(with_cache);
    for (int i = 0; i < 2; ++i) {
      const Operator op = runtime.prepare(device_, p);
      EXPECT_EQ(op.origin(), Origin::fallback) << bad;
      EXPECT_EQ(op.plan(), default_plan_of(p)) << bad;
    }
    ASSERT_EQ(said_.size(), 1U) << bad;
    for (const std::string& part :
         {key.to_string(), std::string("step 1 of the plan"), std::string("BV")})
      EXPECT_NE(said_.front().find(part), std::string::npos) << said_.front();
    const std::optional<Plan> given = plan_from_json(row.plan);
    ASSERT_TRUE(given) << bad;
    EXPECT_THROW((void)runtime.prepare(device_, p, *given), Error) << bad;
  }
}

TEST_F(PrepareTest, AStoredPlanThatDoesNotLoadIsReplacedWithOneWarning) {
  const Problem p = problem(128);
  const Plan stored = other_plan_of(p);
  const auto source = std::make_shared<OnePlan>(stored);
  cpu_->before_load = [config = stored.front().config.to_string()](const Artifact& artifact) {
    if (artifact.config == config)
      throw Error(ErrorKind::kUnavailable, "too many registers\nof a block");
  };
  Runtime runtime(options(source));
  for (int i = 0; i < 2; ++i) {
    const Operator op = runtime.prepare(device_, p);
    EXPECT_EQ(op.origin(), Origin::fallback);
    EXPECT_EQ(op.plan(), default_plan_of(p));
    // Not once more for the second call.
    EXPECT_EQ(runtime.compiled(), 2);
  }
  ASSERT_EQ(said_.size(), 1U);
  for (const std::string& part :
       {problem_key(p).to_string(), std::string("(too many registers)"), std::string("tune")})
    EXPECT_NE(said_.front().find(part), std::string::npos) << said_.front();

  // Tuned again: the new plan counts.
  source->set(default_plan_of(p));
  EXPECT_EQ(runtime.prepare(device_, p).origin(), Origin::exact);
  // A caller's own plan has no substitute.
  EXPECT_THROW((void)runtime.prepare(device_, p, stored), Error);
}

TEST_F(PrepareTest, APlanIsToldOfOnStderrUnlessTheCallerListens) {
  RuntimeOptions silent = options(std::make_shared<OnePlan>(Plan{{"no_such_template", {}}}));
  silent.on_degraded = {};
  Runtime runtime(silent);
  ::testing::internal::CaptureStderr();
  (void)runtime.prepare(device_, problem(16));
  (void)runtime.prepare(device_, problem(16));
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.rfind("wyvern: the tuned plan for delta_rule", 0), 0U) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

TEST_F(PrepareTest, WhereTheDefaultPlanFailsTooItsErrorIsThrown) {
  cpu_->before_load = [](const Artifact&) {
    throw Error(ErrorKind::kUnavailable, "the device is full");
  };
  Runtime runtime(options(std::make_shared<OnePlan>(other_plan_of(problem(128)))));
  EXPECT_THROW((void)runtime.prepare(device_, problem(128)), Error);
  EXPECT_TRUE(said_.empty());
}

}  // namespace
}  // namespace wyvern
