// What compiling CPU kernels says on a machine that lacks something, each time in a process of its
// own: once opened the plugin stays.
#include <wyvern/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <optional>
#include <string>

#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "compiler/backend.hpp"
#include "compiler/compiler.hpp"
#include "compiler/sanitized.hpp"

namespace wyvern::detail {
namespace {

constexpr const char* kSource =
    "extern \"C\" void wyvern_kernel(void* const* a, const void*, const long*, void*) {\n"
    "  *(int*)a[0] = 1;\n}\n";
constexpr int kCannotSetUp = 77;

struct Outcome {
  int status = 0;    ///< as of waitpid()
  std::string said;  ///< the message; empty where it compiled
  bool unavailable = false;
  bool no_memory = false;
};

/// Compiles after `set_up` in a child process; nothing where that returns false.
std::optional<Outcome> compile_where(const std::function<bool()>& set_up) {
  struct Shared {
    bool unavailable, no_memory;
    char said[4000];
  };
  void* const memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  auto* const shared = new (memory) Shared{};
  const pid_t child = ::fork();
  if (child == 0) {
    if (!set_up()) ::_exit(kCannotSetUp);
    try {
      compile_source(kSource, "probe", host_target());
    } catch (const Error& error) {
      shared->unavailable = error.kind() == ErrorKind::kUnavailable;
      std::strncpy(shared->said, error.what(), sizeof(shared->said) - 1);
    } catch (const std::bad_alloc&) {
      shared->no_memory = true;
    }
    ::_exit(0);
  }
  Outcome outcome;
  const bool ended = ::waitpid(child, &outcome.status, 0) == child;
  outcome.said = shared->said;
  outcome.unavailable = shared->unavailable;
  outcome.no_memory = shared->no_memory;
  ::munmap(memory, sizeof(Shared));
  if (!ended || (WIFEXITED(outcome.status) && WEXITSTATUS(outcome.status) == kCannotSetUp))
    return {};
  return outcome;
}

bool limit(__rlimit_resource resource, rlim_t most) {
  const rlimit both{most, most};
  return ::setrlimit(resource, &both) == 0;
}

TEST(PoorMachine, WithoutProcIsToldSo) {
  const auto outcome = compile_where([] {
    return ::unshare(CLONE_NEWNS) == 0 &&
           ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           ::umount2("/proc", MNT_DETACH) == 0;
  });
  if (!outcome) GTEST_SKIP() << "this process may not unmount /proc for itself";
  EXPECT_EQ(outcome->status, 0);
  EXPECT_TRUE(outcome->unavailable);
  EXPECT_EQ(outcome->said.find("/proc is not mounted"), 0U) << outcome->said;
}

// Root may start processes without end, so it becomes nobody.
TEST(PoorMachine, WithoutAnotherThreadIsUnavailable) {
  const auto outcome = compile_where([] {
    constexpr uid_t kNobody = 65534;
    if (!limit(RLIMIT_NPROC, 1)) return false;
    return ::geteuid() != 0 || ::setuid(kNobody) == 0;
  });
  if (!outcome) GTEST_SKIP() << "this process may not limit its threads";
  EXPECT_EQ(outcome->status, 0);
  EXPECT_TRUE(outcome->unavailable) << outcome->said;
  EXPECT_NE(outcome->said.find("cannot be linked: there is no thread"), std::string::npos)
      << outcome->said;
  EXPECT_NE(outcome->said.find(std::strerror(EAGAIN)), std::string::npos) << outcome->said;
}

TEST(PoorMachine, WithTooLittleAddressSpaceSaysSoInAnyCase) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer takes more address space than any limit leaves";
  rlimit before{};
  ::getrlimit(RLIMIT_AS, &before);
  if (before.rlim_max != RLIM_INFINITY) GTEST_SKIP() << "the address space is limited already";
  constexpr rlim_t kMiB = 1 << 20;
  int told = 0, compiled = 0;
  for (rlim_t mib = 16; mib <= 640; mib += mib < 240 || mib > 320 ? 32 : 4) {
    SCOPED_TRACE(mib);
    const auto outcome = compile_where([mib] { return limit(RLIMIT_AS, mib * kMiB); });
    ASSERT_TRUE(outcome);
    EXPECT_EQ(outcome->status, 0);
    if (outcome->no_memory) continue;
    if (outcome->said.empty()) {
      ++compiled;
      continue;
    }
    ++told;
    EXPECT_TRUE(outcome->unavailable);
    EXPECT_NE(outcome->said.find("address space"), std::string::npos) << outcome->said;
  }
  EXPECT_GT(told, 0);
  EXPECT_GT(compiled, 0);
}

}  // namespace
}  // namespace wyvern::detail
