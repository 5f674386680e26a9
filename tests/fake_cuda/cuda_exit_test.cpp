// The end of a process that keeps what it got from the runtime in static objects, as a Python
// extension does: they go after everything that was made later than themselves.
#include <gtest/gtest.h>
#include <wyvern/device.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/devices/device_impl.hpp"
#include "tests/fake_cuda/fake_cuda.hpp"

namespace wyvern {
namespace {

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

int keep_all() {
  kept_device = Device::open("cuda:0");
  Artifact artifact;
  artifact.template_id = "probe.portable";
  artifact.entry = "wyvern_kernel";
  artifact.code = "code";
  Geometry geometry;
  geometry.grid = {8, 4, 2};
  geometry.threads = 128;
  kept_kernel = kept_device->impl().load(artifact, geometry);
  kept_memory = kept_device->allocate(1000);
  last_look.armed = fake_cuda::open_objects() != 0;
  return last_look.armed ? 0 : 4;
}

// The allocator overwrites what is freed, so that a table of functions in freed memory is no longer
// one: without it such a call goes well by luck.
TEST(ProcessEnd, GivesBackWhatStaticObjectsHold) {
  std::string program = "/proc/self/exe", role = "--keep";
  char* arguments[] = {program.data(), role.data(), nullptr};
  std::string overwrite = "GLIBC_TUNABLES=glibc.malloc.perturb=165:glibc.malloc.tcache_count=0";
  char* environment[] = {overwrite.data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(::posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environment), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace wyvern

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--keep") == 0) return wyvern::keep_all();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
