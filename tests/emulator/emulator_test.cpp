// The emulator itself: what its instructions compute, and that misuse is an error.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/emulator/block.hpp"
#include "tests/emulator/warp.hpp"

namespace wyvern::emulator {
namespace {

/// What running `body` as every thread of one block throws; empty if nothing.
std::string failure(int threads, const std::function<void(Machine&)>& body) {
  Block block(threads, 256, Schedule::first_warp);
  try {
    block.run(0, [&] { body(block.machine()); });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

TEST(Block, BarriersSeparatePhases) {
  for (const Schedule schedule : {Schedule::first_warp, Schedule::last_warp}) {
    constexpr int kThreads = 128;
    Block block(kThreads, kThreads * 4, schedule);
    Machine& machine = block.machine();
    std::vector<int> neighbour(kThreads, -1);
    block.run(3, [&] {
      auto* const shared = reinterpret_cast<int*>(machine.shared);
      const int thread = machine.thread;
      shared[thread] = static_cast<int>(machine.block) * 1000 + thread;
      machine.sync_block();
      neighbour[static_cast<std::size_t>(thread)] = shared[(thread + 33) % kThreads];
    });
    for (int i = 0; i < kThreads; ++i)
      EXPECT_EQ(neighbour[static_cast<std::size_t>(i)], 3000 + (i + 33) % kThreads);
  }
}

TEST(Block, WarpsRunAheadInEitherOrder) {
  const auto first_to_run = [](Schedule schedule) {
    Block block(64, 0, schedule);
    int first = -1;
    block.run(0, [&] {
      if (first < 0) first = block.machine().thread / 32;
    });
    return first;
  };
  EXPECT_EQ(first_to_run(Schedule::first_warp), 0);
  EXPECT_EQ(first_to_run(Schedule::last_warp), 1);
}

TEST(Block, CopiesArriveWithTheWait) {
  const std::array<float, 4> source{1, 2, 3, 4};
  std::array<bool, 4> early{};
  std::array<float, 4> late{};
  EXPECT_EQ(failure(32,
                    [&](Machine& machine) {
                      if (machine.thread != 0) return;
                      const auto* const shared = reinterpret_cast<const float*>(machine.shared);
                      machine.copy_async(machine.shared, source.data(), 8, true);
                      machine.copy_async_commit();
                      machine.copy_async(machine.shared + 8, source.data() + 2, 8, false);
                      machine.copy_async_commit();
                      machine.copy_async_wait(1);
                      for (int i = 0; i < 4; ++i) early[i] = !std::isnan(shared[i]);
                      machine.copy_async_wait(0);
                      for (int i = 0; i < 4; ++i) late[i] = shared[i];
                    }),
            "");
  EXPECT_EQ(early, (std::array{true, true, false, false}));
  EXPECT_EQ(late, (std::array{1.0F, 2.0F, 0.0F, 0.0F}));
}

TEST(Block, SharedMemoryStartsAsNaNs) {
  Block block(32, 64, Schedule::first_warp);
  for (int run = 0; run < 2; ++run) {
    int numbers = 0;
    block.run(run, [&] {
      float& x = reinterpret_cast<float*>(block.machine().shared)[block.machine().thread % 16];
      if (block.machine().thread < 16 && !std::isnan(x)) ++numbers;
      x = 1;
    });
    EXPECT_EQ(numbers, 0);
  }
}

TEST(Block, MisuseIsAnError) {
  EXPECT_NE(failure(64,
                    [](Machine& machine) {
                      if (machine.thread < 32) machine.sync_block();
                    })
                .find("32 wait at a block barrier"),
            std::string::npos);
  EXPECT_NE(failure(32,
                    [](Machine& machine) {
                      LaneOperands lane;
                      if (machine.thread != 7) machine.collective(Collective::sync_warp, lane);
                    })
                .find("31 for lanes of their warp"),
            std::string::npos);
  EXPECT_NE(failure(32,
                    [](Machine& machine) {
                      LaneOperands lane;
                      unsigned result = 0;
                      lane.r = &result;
                      machine.collective(
                          machine.thread < 16 ? Collective::sync_warp : Collective::transpose_8x8,
                          lane);
                    })
                .find("different instructions"),
            std::string::npos);
  EXPECT_NE(failure(32,
                    [](Machine& machine) {
                      machine.copy_async(machine.shared + 4, machine.shared + 64, 8, true);
                    })
                .find("not aligned"),
            std::string::npos);
}

class Warp : public ::testing::Test {
 protected:
  Warp() {
    for (int i = 0; i < 32; ++i) {
      pointers[i] = &lanes[i];
      lanes[i].r = results[i].data();
      lanes[i].d = sums[i].data();
    }
  }

  std::array<LaneOperands, 32> lanes;
  std::array<LaneOperands*, 32> pointers{};
  std::array<std::array<unsigned, 4>, 32> results{};
  std::array<std::array<float, 4>, 32> sums{};
};

TEST_F(Warp, TransposeMovesRowsToColumns) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned row = lane / 4;
    const unsigned col = lane % 4 * 2;
    lanes[lane].a[0] = (row * 8 + col) | (row * 8 + col + 1) << 16;
  }
  ASSERT_EQ(execute(Collective::transpose_8x8, pointers), "");
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned row = lane / 4;
    const unsigned col = lane % 4 * 2;
    EXPECT_EQ(results[lane][0], (col * 8 + row) | ((col + 1) * 8 + row) << 16) << lane;
  }
}

TEST_F(Warp, LoadMatrixGivesEachLaneItsPairs) {
  alignas(16) std::array<std::uint16_t, 4 * 64> memory;
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::uint16_t>(i);
  for (int lane = 0; lane < 32; ++lane) lanes[lane].row = &memory[lane * 8];
  ASSERT_EQ(execute(Collective::load_matrix_x4, pointers), "");
  for (unsigned lane = 0; lane < 32; ++lane)
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      const unsigned first = matrix * 64 + lane / 4 * 8 + lane % 4 * 2;
      EXPECT_EQ(results[lane][matrix], first | (first + 1) << 16);
    }
  lanes[5].row = reinterpret_cast<const unsigned char*>(memory.data()) + 2;
  EXPECT_NE(execute(Collective::load_matrix_x4, pointers), "");
}

TEST_F(Warp, TensorCoresDropTheLastBitsOfTf32Operands) {
  for (int lane = 0; lane < 32; ++lane) {
    const float exact = 1.0F + 0x1p-10F;
    const float more = exact + 0x1p-20F;
    lanes[lane].a[0] = std::bit_cast<unsigned>(lane % 4 == 0 ? more : 0.0F);
    lanes[lane].b[0] = std::bit_cast<unsigned>(lane % 4 == 0 ? 1.0F : 0.0F);
    sums[lane].fill(2);
  }
  ASSERT_EQ(execute(Collective::mma_tf32, pointers), "");
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(sums[lane][0], 3.0F + 0x1p-10F);  // rows 0 to 7
    EXPECT_EQ(sums[lane][2], 2.0F);             // rows 8 to 15 have no left operand
  }
}

}  // namespace
}  // namespace wyvern::emulator
