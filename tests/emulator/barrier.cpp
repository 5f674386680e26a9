#include "tests/emulator/barrier.hpp"

#include <fmt/format.h>

namespace wyvern::emulator {

std::string Barriers::init(long offset, unsigned arrivals, int thread) {
  if (offset % 8 != 0) return "an mbarrier that is not aligned to 8 bytes";
  if (arrivals == 0 || arrivals >= 1U << 20U)
    return fmt::format("an mbarrier of {} arrivals", arrivals);
  if (barriers_.contains(offset)) return "an mbarrier is initialized twice";
  barriers_[offset] = {.arrivals = arrivals, .missing = arrivals, .thread = thread};
  return {};
}

void Barriers::fence(int thread) {
  for (auto& [offset, barrier] : barriers_)
    if (barrier.thread == thread) barrier.fenced = true;
}

std::string Barriers::check(long offset) const {
  if (barriers_.contains(offset)) return {};
  return fmt::format("there is no mbarrier at {}: it is not initialized", offset);
}

std::string Barriers::check_copy(long offset) const {
  std::string problem = check(offset);
  if (problem.empty() && !barriers_.at(offset).fenced)
    problem = "a TMA copy on an mbarrier that no fence has made visible to it";
  return problem;
}

std::string Barriers::finish_phase(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes > 0) return {};
  if (barrier.bytes < 0)
    return fmt::format("a phase of an mbarrier got {} bytes more than it expects", -barrier.bytes);
  ++barrier.phase;
  barrier.missing = barrier.arrivals;
  return {};
}

std::string Barriers::arrive(long offset, unsigned bytes) {
  if (std::string problem = check(offset); !problem.empty()) return problem;
  Barrier& barrier = barriers_.at(offset);
  if (barrier.missing == 0) return "more arrivals than an mbarrier's phase takes";
  barrier.bytes += bytes;
  --barrier.missing;
  return finish_phase(barrier);
}

std::string Barriers::complete(long offset, std::int64_t bytes) {
  Barrier& barrier = barriers_.at(offset);
  barrier.bytes -= bytes;
  return finish_phase(barrier);
}

bool Barriers::passed(long offset, unsigned parity) const {
  return barriers_.at(offset).phase % 2 != parity % 2;
}

bool Barriers::begins(long offset) const {
  const Barrier& barrier = barriers_.at(offset);
  return barrier.missing == barrier.arrivals;
}

std::string Barriers::describe(long offset) const {
  const Barrier& barrier = barriers_.at(offset);
  return fmt::format("the mbarrier at {}, in phase {}, lacks {} of {} arrivals and {} bytes",
                     offset, barrier.phase, barrier.missing, barrier.arrivals, barrier.bytes);
}

}  // namespace wyvern::emulator
