// What it costs to find a kernel that is loaded: from a call's tensors to the prepared operator, as
// every call of the Python package does. Prints a line of JSON.
//
//   lookup_time [DEVICE]    the number of a GPU, or -1 (default): the CPU
#include <wyvern/wyvern.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/python/extension/prepared.hpp"
#include "tools/benchmark/counted.hpp"

namespace {

using namespace wyvern;
using Clock = std::chrono::steady_clock;

/// A call's tensors without memory: a look-up reads shapes and dtypes.
class Call {
 public:
  Call(std::int64_t T, std::int32_t device) : shapes_{{{1, T, 4, 16}, {1, T, 4}}} {
    tensors_.resize(extension::kInputs.size());
    for (const std::size_t i : {0, 1, 2}) set(i, 0, 4, WYVERN_BF16);
    set(3, 1, 3, WYVERN_FP32);
    set(4, 1, 3, WYVERN_BF16);
    request_ = {.problem = "op=gated_delta_rule output_final_state=1",
                .cuda_device = device,
                .tensors = tensors_};
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const extension::Prepared& find() const { return extension::prepared(request_); }

 private:
  void set(std::size_t at, std::size_t shape, std::int32_t rank, std::int32_t dtype) {
    tensors_[at] = {.name = extension::kInputs[at],
                    .data = nullptr,
                    .shape = shapes_[shape].data(),
                    .strides = nullptr,
                    .dtype = dtype,
                    .rank = rank};
  }

  std::array<std::array<std::int64_t, 4>, 2> shapes_;
  std::vector<wyvern_tensor> tensors_;
  extension::Request request_;
};

struct Counts {
  std::int64_t allocations = wyvern_counted_allocations();
  std::int64_t locks = wyvern_counted_locks();
};

Counts since(const Counts& before) {
  const Counts now;
  return {now.allocations - before.allocations, now.locks - before.locks};
}

}  // namespace

int main(int argc, char** argv) {
  const std::int32_t device = argc > 1 ? std::stoi(argv[1]) : -1;
  // Two problems in turn, so that none is found by being the last one.
  const Call first(64, device), second(128, device);
  const Counts before;
  first.find(), second.find();
  const Counts prepared = since(before);

  constexpr int kCalls = 20000, kRepeats = 25;
  std::uintptr_t sink = 0;
  const Counts at_start;
  std::array<double, kRepeats> times{};
  for (double& time : times) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kCalls / 2; ++i) {
      sink ^= reinterpret_cast<std::uintptr_t>(&first.find());
      sink ^= reinterpret_cast<std::uintptr_t>(&second.find());
    }
    time = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kCalls;
  }
  const Counts found = since(at_start);
  std::sort(times.begin(), times.end());
  fmt::print(
      "{{\"lookups\": {}, \"median_us\": {:.4f}, \"least_us\": {:.4f}, \"allocations\": {}, "
      "\"locks\": {}, \"allocations_of_preparing\": {}, \"locks_of_preparing\": {}}}\n",
      kCalls * kRepeats, times[kRepeats / 2], times[0], found.allocations, found.locks,
      prepared.allocations, prepared.locks);
  return sink == 1 ? 1 : 0;
}
