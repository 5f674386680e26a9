#include "tests/emulator/block.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>

#include "tests/emulator/warp.hpp"

namespace wyvern::emulator {
namespace {

bool aligned(const void* pointer, int bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<unsigned>(bytes) == 0;
}

}  // namespace

thread_local Block* Block::running = nullptr;

GuardedMemory::GuardedMemory(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t used = (bytes + 15) / 16 * 16;
  const std::size_t pages = (used + page - 1) / page * page;
  mapped_bytes_ = pages + 2 * page;
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  auto* const first = static_cast<unsigned char*>(mapping_) + page;
  if (pages > 0 && mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  data_ = first + pages - used;
}

GuardedMemory::~GuardedMemory() { munmap(mapping_, mapped_bytes_); }

Block::Block(int threads, std::int64_t shared_bytes, Schedule schedule)
    : schedule_(schedule),
      shared_bytes_(static_cast<std::size_t>(shared_bytes)),
      shared_(shared_bytes_),
      warps_(static_cast<std::size_t>(threads) / 32) {
  for (int i = 0; i < threads; ++i) threads_.push_back(std::make_unique<Thread>());
  machine_.shared = shared_.data();
  machine_.shared_bytes = static_cast<long>(shared_bytes_);
  machine_.sync_block = sync_block;
  machine_.sync_named = sync_named;
  machine_.collective = collective;
  machine_.copy_async = copy_async;
  machine_.copy_async_commit = copy_async_commit;
  machine_.copy_async_wait = copy_async_wait;
  machine_.hopper = hopper_machine();
}

void Block::run(std::int64_t index, const std::function<void()>& body) {
  std::memset(shared_.data(), 0xFF, shared_bytes_);
  machine_.block = index;
  body_ = &body;
  at_barrier_ = 0;
  ended_ = 0;
  for (Warp& warp : warps_) warp.arrived = 0;
  for (const auto& thread : threads_) {
    thread->state = State::ready;
    thread->copies.assign(1, {});
    thread->stores.assign(1, {});
    thread->fiber.start(enter, this);
  }
  start_hopper();
  running = this;
  machine_.thread = schedule_ == Schedule::first_warp ? 0 : static_cast<int>(threads_.size()) - 32;
  Fiber::switch_to(host_, current().fiber);
  running = nullptr;
  if (!failure_.empty()) throw std::runtime_error(failure_);
}

void Block::enter(void* block) {
  auto& self = *static_cast<Block*>(block);
  (*self.body_)();
  ++self.ended_;
  if (self.ended_ == static_cast<int>(self.threads_.size())) {
    self.require(self.unfinished());
    self.current().state = State::ended;
    Fiber::switch_to(self.current().fiber, self.host_);
  }
  self.suspend(State::ended);
}

int Block::next_ready() const {
  const int lane = machine_.thread % 32;
  const int warp = machine_.thread / 32;
  for (int i = 1; i <= 32; ++i) {
    const int thread = warp * 32 + (lane + i) % 32;
    if (threads_[static_cast<std::size_t>(thread)]->state == State::ready) return thread;
  }
  const int count = static_cast<int>(threads_.size());
  for (int i = 0; i < count; ++i) {
    const int thread = schedule_ == Schedule::first_warp ? i : count - 1 - i;
    if (threads_[static_cast<std::size_t>(thread)]->state == State::ready) return thread;
  }
  return -1;
}

void Block::switch_to(int thread) {
  Thread& from = current();
  machine_.thread = thread;
  Fiber::switch_to(from.fiber, current().fiber);
}

void Block::suspend(State state) {
  current().state = state;
  int thread = next_ready();
  // TMA copies arrive when nothing else can happen: as late as they may.
  while (thread < 0 && land()) thread = next_ready();
  if (thread < 0) fail(deadlock());
  if (thread != machine_.thread) switch_to(thread);
}

void Block::require(std::string problem) {
  if (!problem.empty()) fail(std::move(problem));
}

void Block::fail(std::string reason) {
  failure_ = fmt::format("block {}, thread {}: {}", machine_.block, machine_.thread, reason);
  Fiber::switch_to(current().fiber, host_);
  std::abort();  // a failed block is not resumed
}

std::string Block::deadlock() const {
  int in_warp = 0;
  for (const auto& thread : threads_) in_warp += thread->state == State::in_warp ? 1 : 0;
  return fmt::format(
      "no thread can go on: {} wait at a block barrier, {} for lanes of their warp, {} have "
      "ended{}",
      at_barrier_, in_warp, ended_, describe_waiting());
}

void Block::sync_block() {
  Block& self = *running;
  if (++self.at_barrier_ < static_cast<int>(self.threads_.size())) {
    self.suspend(State::at_barrier);
    return;
  }
  self.at_barrier_ = 0;
  for (const auto& thread : self.threads_) thread->state = State::ready;
}

void Block::collective(Collective operation, LaneOperands& operands) {
  Block& self = *running;
  const int warp_index = self.machine_.thread / 32;
  Warp& warp = self.warps_[static_cast<std::size_t>(warp_index)];
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation) self.fail("lanes of a warp meet in different instructions");
  warp.operands[static_cast<std::size_t>(self.machine_.thread % 32)] = &operands;
  if (++warp.arrived < 32) {
    self.suspend(State::in_warp);
    return;
  }
  const bool of_warpgroup = operation >= Collective::wgmma_fence;
  self.require(of_warpgroup ? self.products_[static_cast<std::size_t>(warp_index)].execute(
                                  operation, warp.operands)
                            : execute(operation, warp.operands));
  warp.arrived = 0;
  if (operation == Collective::store_matrix_x4 ||
      operation == Collective::store_matrix_x4_transposed)
    for (int lane = 0; lane < 32; ++lane)
      self.proxies_.write(warp_index * 32 + lane,
                          self.shared_offset(warp.operands[static_cast<std::size_t>(lane)]->to));
  for (int lane = 0; lane < 32; ++lane)
    self.threads_[static_cast<std::size_t>(warp_index * 32 + lane)]->state = State::ready;
}

void Block::copy_async(void* destination, const void* source, int bytes, bool valid) {
  Block& self = *running;
  if (!aligned(destination, bytes) || !aligned(source, bytes))
    self.fail(fmt::format("an asynchronous copy of {} bytes is not aligned to them", bytes));
  std::memset(destination, 0xFF, static_cast<std::size_t>(bytes));
  self.current().copies.back().push_back({destination, source, bytes, valid});
}

void Block::copy_async_commit() { running->current().copies.emplace_back(); }

void Block::copy_async_wait(int pending) {
  auto& groups = running->current().copies;
  while (static_cast<int>(groups.size()) - 1 > pending) {
    for (const Copy& copy : groups.front()) {
      if (copy.valid)
        std::memcpy(copy.destination, copy.source, static_cast<std::size_t>(copy.bytes));
      else
        std::memset(copy.destination, 0, static_cast<std::size_t>(copy.bytes));
    }
    groups.erase(groups.begin());
  }
}

}  // namespace wyvern::emulator
