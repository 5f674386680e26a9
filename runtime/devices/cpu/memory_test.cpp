#include "runtime/devices/cpu/memory.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>

namespace wyvern {
namespace {

namespace fs = std::filesystem;

/// A machine's files in a folder of its own.
class AvailableMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "wyvern-memory-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\nSwapFree: 96 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::uint64_t available() const { return available_memory(root_); }

  fs::path root_;
};

constexpr std::uint64_t kMachine = 4096 * 1024;

TEST_F(AvailableMemory, IsTheMachinesWhereNoGroupSaysLess) {
  EXPECT_EQ(available(), kMachine);
  write("proc/self/cgroup", "0::/user\n");
  EXPECT_EQ(available(), kMachine);
  write("sys/fs/cgroup/user/memory.max", "max\n");
  write("sys/fs/cgroup/user/memory.current", "5\n");
  EXPECT_EQ(available(), kMachine);
  EXPECT_EQ(available_memory("/no/such/root"), std::numeric_limits<std::uint64_t>::max());
}

TEST_F(AvailableMemory, IsLimitedByTheNarrowestGroup) {
  write("proc/self/cgroup", "0::/slice/job\n");
  write("sys/fs/cgroup/slice/job/memory.max", "3000000\n");
  write("sys/fs/cgroup/slice/job/memory.current", "1000000\n");
  EXPECT_EQ(available(), 2000000U);
  // Pages of files are given back before anybody is killed.
  write("sys/fs/cgroup/slice/job/memory.stat", "active_file 7\ninactive_file 400000\n");
  EXPECT_EQ(available(), 2400000U);
  write("sys/fs/cgroup/slice/memory.max", "1500000\n");
  write("sys/fs/cgroup/slice/memory.current", "1000000\n");
  EXPECT_EQ(available(), 500000U);
  write("sys/fs/cgroup/slice/memory.current", "1600000\n");
  EXPECT_EQ(available(), 0U);
}

TEST_F(AvailableMemory, KnowsTheFirstVersionAndContainersThatSeeTheirGroupAsTheRoot) {
  write("proc/self/cgroup", "9:cpu,cpuacct:/a\n4:memory:/docker/0123\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "700000\n");
  write("sys/fs/cgroup/memory/memory.stat", "inactive_file 5\ntotal_inactive_file 100000\n");
  EXPECT_EQ(available(), 1400000U);
}

}  // namespace
}  // namespace wyvern
