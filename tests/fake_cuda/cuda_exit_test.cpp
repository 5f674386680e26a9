// The end of a process that keeps what it got from the runtime in static objects, as a Python
// extension does: they go after everything that was made later than themselves.
#include <gtest/gtest.h>
#include <wyvern/device.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/devices/device_impl.hpp"
#include "tests/fake_cuda/fake_cuda.hpp"

namespace wyvern {
namespace {

constexpr int kEndedInTheMiddle = 7;
/// A process that hangs ends by SIGALRM, long after any other is done.
constexpr unsigned kHangs = 120;

/// Made before what it looks at, so that it ends after it.
struct LastLook {
  bool armed = false;
  ~LastLook() {
    if (armed && fake_cuda::open_objects() != 0) std::_Exit(3);
  }
};
LastLook last_look;
std::optional<Device> kept_device;
std::shared_ptr<const Kernel> kept_kernel;
std::shared_ptr<void> kept_memory;

std::shared_ptr<const Kernel> load_kernel(const Device& device, Geometry& geometry) {
  Artifact artifact;
  artifact.template_id = "probe.portable";
  artifact.entry = "wyvern_kernel";
  artifact.code = "code";
  geometry.grid = {8, 4, 2};
  geometry.threads = 128;
  return device.impl().load(artifact, geometry);
}

int keep_all() {
  kept_device = Device::open("cuda:0");
  Geometry geometry;
  kept_kernel = load_kernel(*kept_device, geometry);
  kept_memory = kept_device->allocate(1000);
  last_look.armed = fake_cuda::open_objects() != 0;
  return last_look.armed ? 0 : 4;
}

/// Its end comes after that of all that the threads use, and takes its time, so that they go on.
struct Linger {
  std::chrono::milliseconds time{0};
  ~Linger() { std::this_thread::sleep_for(time); }
};
Linger linger;

/// Ends while other threads open the device, load kernels and launch them.
int end_in_the_middle() {
  ::alarm(kHangs);
  linger.time = std::chrono::milliseconds(30);
  for (int i = 0; i < 3; ++i)
    std::thread([] {
      for (;;) {
        const Device device = Device::open("cuda:0");
        Geometry geometry;
        const auto kernel = load_kernel(device, geometry);
        const auto memory = device.allocate(1000);
        void* const arguments[] = {memory.get()};
        kernel->launch(geometry, arguments, {}, {}, Extents{}, nullptr);
        device.synchronize();
      }
    }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return kEndedInTheMiddle;
}

/// The exit code of this program in a role; -1 where it did not exit. The allocator overwrites what
/// is freed, so that a table of functions in freed memory is no longer one: without it such a call
/// goes well by luck.
int end_of(std::string role) {
  std::string program = "/proc/self/exe";
  char* arguments[] = {program.data(), role.data(), nullptr};
  std::string overwrite = "GLIBC_TUNABLES=glibc.malloc.perturb=165:glibc.malloc.tcache_count=0";
  char* environment[] = {overwrite.data(), nullptr};
  pid_t child = 0;
  if (::posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environment) != 0)
    return -1;
  int status = 0;
  if (::waitpid(child, &status, 0) != child) return -1;
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(CudaProcessEnd, FreesResourcesOfStaticObjects) { EXPECT_EQ(end_of("--keep"), 0); }

TEST(CudaProcessEnd, WhileThreadsLoadAndLaunch) {
  for (int i = 0; i < 12; ++i) EXPECT_EQ(end_of("--work"), kEndedInTheMiddle);
}

}  // namespace
}  // namespace wyvern

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--keep") == 0) return wyvern::keep_all();
  if (argc > 1 && std::strcmp(argv[1], "--work") == 0) return wyvern::end_in_the_middle();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
