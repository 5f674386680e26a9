#include "tests/support/guarded_memory.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace wyvern::testing {
namespace {

using Against = GuardedMemory::Against;

void write_byte(std::byte* at) { *static_cast<volatile std::byte*>(at) = std::byte{1}; }
void read_byte(const std::byte* at) {
  static_cast<void>(*static_cast<const volatile std::byte*>(at));
}

TEST(GuardedMemory, HoldsItsBytesAndTheSlack) {
  for (const Against against : {Against::start, Against::end})
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{100},
                                   std::size_t{4096}, std::size_t{10000}}) {
      const GuardedMemory memory("x", size, 256, 1024, against);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 256, 0U);
      std::memset(memory.first(), 1, memory.accessible());
      EXPECT_GE(memory.data(), memory.first());
      EXPECT_GE(memory.accessible(), size + 1024);
      const std::byte* const end = memory.first() + memory.accessible();
      if (against == Against::start)
        EXPECT_EQ(memory.data(), memory.first());
      else
        EXPECT_LT(end - (memory.data() + size), 256);
    }
}

using GuardedMemoryDeathTest = ::testing::Test;

TEST_F(GuardedMemoryDeathTest, NamesTheTensorTouchedBeyondItsEnd) {
  const GuardedMemory q("q", 96, 16, 1024, Against::end);
  EXPECT_DEATH(write_byte(q.data() + 96), "q was touched 0 bytes past its end");
  EXPECT_DEATH(read_byte(q.data() + 96 + 8), "q was touched 8 bytes past its end");
  const GuardedMemory k("k", 96, 16, 1024, Against::start);
  EXPECT_DEATH(write_byte(k.data() - 1), "k was touched 1 bytes before its start");
  EXPECT_DEATH(read_byte(k.data() - 64), "k was touched 64 bytes before its start");
}

TEST_F(GuardedMemoryDeathTest, OfAnInputMayBeReadOnly) {
  GuardedMemory q("q", 96, 16, 1024, Against::end);
  write_byte(q.data() + 95);
  q.make_read_only();
  read_byte(q.data() + 95);
  EXPECT_DEATH(write_byte(q.data() + 95), "q was written at byte 95, it may only be read");
}

/// More in a row than there are at a time.
TEST(GuardedMemory, IsGivenBack) {
  std::vector<std::unique_ptr<GuardedMemory>> many;
  for (int i = 0; i < 3000; ++i) {
    if (many.size() == 500) many.clear();
    many.push_back(std::make_unique<GuardedMemory>("x", 16, 16, 0, Against::end));
    write_byte(many.back()->data());
  }
}

}  // namespace
}  // namespace wyvern::testing
