// The end of a process whose other threads still prepare and launch: exit() destroys static objects
// while they run, so none that they use may be destroyed.
#include <wyvern/wyvern.h>
#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "compiler/compiler.hpp"
#include "compiler/sanitized.hpp"
#include "runtime/devices/cpu/thread_pool.hpp"
#include "runtime/launch_testing.hpp"

namespace wyvern {
namespace {

constexpr int kThreads = 3;
constexpr int kShapes = 4;
/// What a process of these ends with; nothing else does.
constexpr int kGood = 7, kBad = 8;
/// A process that hangs ends by SIGALRM, long after any other is done.
constexpr unsigned kHangs = 120;

/// One token, with values of V channels: one kernel that no other V has.
Problem problem(std::int64_t V) {
  Problem p;
  p.op = "delta_rule";
  p.pass = Pass::recurrent;
  p.T = 1, p.K = 16, p.V = V;
  return p;
}

// ---- In the process that ends

void prepare_and_launch(Runtime& runtime, std::int64_t V) {
  const Device device = Device::open("cpu");
  const Operator op = runtime.prepare(device, problem(V));
  const testing::LaunchMemory memory(device, op);
  op.launch(memory.arguments, memory.workspace.get(), op.workspace_bytes());
}

/// Prepares and launches until the process ends. With a warm cache every round loads kernels, with
/// a cold one it compiles them.
[[noreturn]] void work(const std::string& directory, int thread, bool warm) {
  try {
    for (std::int64_t round = 0;; ++round) {
      RuntimeOptions options;
      options.cache = std::make_shared<Cache>(directory);
      Runtime runtime(options);
      for (int i = 0; i < kShapes; ++i)
        prepare_and_launch(runtime, 1 + i + (warm ? 0 : kShapes * (thread + kThreads * round)));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "a thread failed: %s\n", error.what());
    std::_Exit(kBad);
  }
}

/// Made before all that the threads use, so that its end comes after theirs; takes its time, so
/// that the threads go on after that.
struct Linger {
  std::chrono::milliseconds time{0};
  ~Linger() { std::this_thread::sleep_for(time); }
};
Linger linger;

/// Ends in the middle of the threads' work: by `how`, after so many milliseconds.
int end_in_the_middle(std::string_view how, bool warm, const std::string& directory, int ms) {
  ::alarm(kHangs);
  linger.time = std::chrono::milliseconds(100);
  for (int i = 0; i < kThreads; ++i)
    std::thread([directory, i, warm] { work(directory, i, warm); }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  if (how == "exit") std::exit(kGood);
  if (how == "thread") std::thread([] { std::exit(kGood); }).join();
  return kGood;
}

/// What a static object's destructor uses, after the thread's own objects are gone.
struct Late {
  Runtime* runtime = nullptr;
  ThreadPool* pool = nullptr;
  ~Late() {
    if (runtime == nullptr) return;
    pool->run(
        64, 4096, [](const void*, std::int64_t, void* scratch) { std::memset(scratch, 1, 4096); },
        nullptr);
    for (int i = 0; i < 2; ++i) prepare_and_launch(*runtime, 1);
    if (std::string_view(wyvern_last_error()) != "") std::_Exit(kBad);
    if (wyvern_device_open("moon", nullptr) != WYVERN_BAD_INPUT) std::_Exit(kBad);
    if (std::string_view(wyvern_last_error()).find("device is null") != 0) std::_Exit(kBad);
    std::_Exit(kGood);
  }
};
Late late;

int use_at_the_end(const std::string& directory) {
  ::alarm(kHangs);
  RuntimeOptions options;
  options.cache = std::make_shared<Cache>(directory);
  late.runtime = new Runtime(options);
  late.pool = new ThreadPool(2);
  prepare_and_launch(*late.runtime, 1);
  late.pool->run(
      64, 4096, [](const void*, std::int64_t, void* scratch) { std::memset(scratch, 1, 4096); },
      nullptr);
  wyvern_device* device = nullptr;
  if (wyvern_device_open("moon", &device) == WYVERN_OK) return kBad;
  return std::string_view(wyvern_last_error()).empty() ? kBad : 0;
}

// ---- In the process that looks on

/// Runs this program in a role; how it ended, in words.
std::string end_of(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "/proc/self/exe");
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  pid_t child = 0;
  if (::posix_spawn(&child, pointers[0], nullptr, nullptr, pointers.data(), environ) != 0)
    return "not started";
  int status = 0;
  if (::waitpid(child, &status, 0) != child) return "lost";
  if (WIFSIGNALED(status)) return fmt::format("signal {}", WTERMSIG(status));
  return fmt::format("exit code {}", WEXITSTATUS(status));
}
const std::string kGoodEnd = fmt::format("exit code {}", kGood);

class ProcessEnd : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = compiler_problem(DeviceKind::cpu); !problem.empty())
      GTEST_SKIP() << problem;
  }
};

constexpr const char* kHows[] = {"return", "exit", "thread"};

TEST_F(ProcessEnd, WhileThreadsCompile) {
  if (detail::kSanitized)
    GTEST_SKIP() << "the plugin's LLVM keeps its static objects by RTLD_DEEPBIND";
  for (int ms = 0; ms < 480; ms += 20) {
    const testing::TempDirectory directory;
    const char* const how = kHows[ms / 20 % 3];
    EXPECT_EQ(end_of({"--cold", how, directory.path(), std::to_string(ms)}), kGoodEnd)
        << how << " after " << ms << " ms";
  }
}

TEST_F(ProcessEnd, WhileThreadsLoadAndLaunch) {
  const testing::TempDirectory directory;
  {
    RuntimeOptions options;
    options.cache = std::make_shared<Cache>(directory.path());
    Runtime runtime(options);
    for (int i = 0; i < kShapes; ++i) prepare_and_launch(runtime, 1 + i);
  }
  for (int ms = 0; ms < 72; ms += 3) {
    const char* const how = kHows[ms / 3 % 3];
    EXPECT_EQ(end_of({"--warm", how, directory.path(), std::to_string(ms)}), kGoodEnd)
        << how << " after " << ms << " ms";
  }
}

TEST_F(ProcessEnd, StaticObjectsMayUseAllOfItToTheEnd) {
  const testing::TempDirectory directory;
  EXPECT_EQ(end_of({"--late", directory.path()}), kGoodEnd);
}

}  // namespace
}  // namespace wyvern

int main(int argc, char** argv) {
  const std::string_view role = argc > 1 ? argv[1] : "";
  if (role == "--late") return wyvern::use_at_the_end(argv[2]);
  if (role == "--cold" || role == "--warm")
    return wyvern::end_in_the_middle(argv[2], role == "--warm", argv[3], std::atoi(argv[4]));
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
