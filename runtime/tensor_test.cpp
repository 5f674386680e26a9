// What TensorView and Device do with arguments that make no sense.
#include <wyvern/device.hpp>
#include <wyvern/error.hpp>
#include <wyvern/tensor.hpp>

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <string>

namespace wyvern {
namespace {

void expect_error(ErrorKind kind, const std::string& words, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error says: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(TensorView, HasFiveDimensionsAtMost) {
  EXPECT_EQ(TensorView(nullptr, DType::fp32, {}).elements(), 1);
  EXPECT_EQ(TensorView(nullptr, DType::fp32, {1, 2, 3, 4, 5}).elements(), 120);
  expect_error(ErrorKind::kBadInput, "rank is 6; it must be between 0 and 5",
               [] { (void)TensorView(nullptr, DType::fp32, {1, 2, 3, 4, 5, 6}); });
}

TEST(TensorView, CountsNoElementsOfARankThatNoTensorHas) {
  TensorView view(nullptr, DType::fp32, {2, 3});
  for (const int rank : {-1, 6, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    view.rank = rank;
    expect_error(ErrorKind::kBadInput, "rank is " + std::to_string(rank),
                 [&] { (void)view.elements(); });
  }
}

TEST(CpuMemory, ThatNoMachineHasIsRefused) {
  const Device cpu = Device::open("cpu");
  constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
  for (const std::size_t bytes :
       {kAll, kAll - 1, kAll - 255, kAll - (std::size_t{2} << 20), kAll / 2 + 1})
    expect_error(ErrorKind::kUnavailable, std::to_string(bytes) + " bytes",
                 [&] { (void)cpu.allocate(bytes); });
  EXPECT_NE(cpu.allocate(0), nullptr);
}

TEST(CpuMemory, NullIsNamedWhereThereAreBytesToMove) {
  const Device cpu = Device::open("cpu");
  std::array<char, 4> host{};
  expect_error(ErrorKind::kBadInput, "device is null", [&] { cpu.copy_in(nullptr, &host, 4); });
  expect_error(ErrorKind::kBadInput, "host is null", [&] { cpu.copy_in(&host, nullptr, 4); });
  expect_error(ErrorKind::kBadInput, "host is null", [&] { cpu.copy_out(nullptr, &host, 4); });
  expect_error(ErrorKind::kBadInput, "device is null", [&] { cpu.copy_out(&host, nullptr, 4); });
  expect_error(ErrorKind::kBadInput, "device is null", [&] { cpu.fill(nullptr, 0, 4); });
  EXPECT_NO_THROW(cpu.copy_in(nullptr, nullptr, 0));
  EXPECT_NO_THROW(cpu.fill(nullptr, 0, 0));
}

}  // namespace
}  // namespace wyvern
