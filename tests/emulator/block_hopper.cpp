// A block's mbarriers, TMA loads and stores, named barriers and warpgroups.
#include <fmt/format.h>

#include <algorithm>

#include "tests/emulator/block.hpp"

namespace wyvern::emulator {

HopperMachine Block::hopper_machine() {
  return {.barrier_init = barrier_init,
          .fence_barrier_init = fence_barrier_init,
          .barrier_arrive = barrier_arrive,
          .barrier_wait = barrier_wait,
          .tensor_load = tensor_load,
          .tensor_store = tensor_store,
          .bulk_load = bulk_load,
          .bulk_store = bulk_store,
          .bulk_commit = bulk_commit,
          .bulk_wait = bulk_wait,
          .touch = touch,
          .fence_proxy_async = fence_proxy_async};
}

void Block::start_hopper() {
  barriers_.clear();
  loads_.clear();
  named_.fill({});
  products_.clear();
  proxies_ = ProxyOrder(threads_.size(), shared_bytes_);
  const ReadOperands reads =
      schedule_ == Schedule::first_warp ? ReadOperands::at_the_wait : ReadOperands::at_once;
  for (std::size_t warp = 0; warp < warps_.size(); ++warp)
    products_.emplace_back(static_cast<int>(warp % 4), std::span(shared_.data(), shared_bytes_),
                           reads, &proxies_);
}

void Block::barrier_init(void* barrier, unsigned arrivals) {
  Block& self = *running;
  self.require(self.barriers_.init(self.shared_offset(barrier), arrivals, self.machine_.thread));
}

void Block::fence_barrier_init() { running->barriers_.fence(running->machine_.thread); }

void Block::wake(long barrier) {
  if (!barriers_.begins(barrier)) return;
  for (const auto& thread : threads_)
    if (thread->state == State::at_mbarrier && thread->barrier == barrier &&
        barriers_.passed(barrier, thread->parity))
      thread->state = State::ready;
}

void Block::barrier_arrive(void* barrier, unsigned expected_bytes) {
  Block& self = *running;
  const long offset = self.shared_offset(barrier);
  self.require(self.barriers_.arrive(offset, expected_bytes));
  self.wake(offset);
}

void Block::barrier_wait(void* barrier, unsigned parity) {
  Block& self = *running;
  Thread& thread = self.current();
  thread.barrier = self.shared_offset(barrier);
  thread.parity = parity;
  self.require(self.barriers_.check(thread.barrier));
  // A thread that is woken may find that the next phase is over too, as one that asks too late.
  while (!self.barriers_.passed(thread.barrier, parity)) self.suspend(State::at_mbarrier);
}

void Block::start_load(TmaCopy copy, void* to, void* barrier) {
  const long offset = shared_offset(barrier);
  require(copy.check(shared_.data(), static_cast<std::int64_t>(shared_bytes_)));
  require(barriers_.check_copy(offset));
  require(proxies_.check_copy(shared_offset(to), copy.bytes(), /*into=*/true));
  copy.poison();
  loads_.push_back({std::move(copy), offset});
}

void Block::tensor_load(void* to, const void* map, const int* at, int rank, void* barrier) {
  running->start_load(
      TmaCopy(map, std::span(at, static_cast<std::size_t>(rank)), static_cast<unsigned char*>(to)),
      to, barrier);
}

void Block::bulk_load(void* to, const void* from, unsigned bytes, void* barrier) {
  // The copy only reads what is not shared memory.
  running->start_load(TmaCopy(const_cast<void*>(from), bytes, static_cast<unsigned char*>(to)), to,
                      barrier);
}

bool Block::land() {
  if (loads_.empty()) return false;
  if (schedule_ == Schedule::last_warp) std::swap(loads_.front(), loads_.back());
  const Load load = std::move(loads_.front());
  loads_.pop_front();
  load.copy.load();
  require(barriers_.complete(load.barrier, load.copy.bytes()));
  wake(load.barrier);
  return true;
}

void Block::start_store(TmaCopy copy, const void* from) {
  require(copy.check(shared_.data(), static_cast<std::int64_t>(shared_bytes_)));
  require(proxies_.check_copy(shared_offset(from), copy.bytes(), /*into=*/false));
  current().stores.back().push_back(std::move(copy));
}

void Block::tensor_store(const void* map, const int* at, int rank, const void* from) {
  // The copy only reads its shared memory.
  auto* const shared = static_cast<unsigned char*>(const_cast<void*>(from));
  running->start_store(TmaCopy(map, std::span(at, static_cast<std::size_t>(rank)), shared), from);
}

void Block::bulk_store(void* to, const void* from, unsigned bytes) {
  auto* const shared = static_cast<unsigned char*>(const_cast<void*>(from));
  running->start_store(TmaCopy(to, bytes, shared), from);
}

void Block::bulk_commit() { running->current().stores.emplace_back(); }

void Block::bulk_wait(int pending) {
  auto& groups = running->current().stores;
  while (static_cast<int>(groups.size()) - 1 > pending) {
    for (const TmaCopy& copy : groups.front()) copy.store();
    groups.erase(groups.begin());
  }
}

void Block::sync_named(int name, int threads, bool wait) {
  Block& self = *running;
  if (name < 1 || name > 15 || threads % 32 != 0 || threads <= 0)
    self.fail(fmt::format("named barrier {} of {} threads", name, threads));
  NamedBarrier& barrier = self.named_[static_cast<std::size_t>(name)];
  if (barrier.arrived > 0 && barrier.threads != threads)
    self.fail(fmt::format("named barrier {} is one of {} threads and of {}", name, barrier.threads,
                          threads));
  barrier.threads = threads;
  if (++barrier.arrived == threads) {
    barrier = {};
    for (const auto& thread : self.threads_)
      if (thread->state == State::at_named && thread->barrier == name) thread->state = State::ready;
  } else if (wait) {
    self.current().barrier = name;
    self.suspend(State::at_named);
  }
}

void Block::touch(const void* pointer) {
  Block& self = *running;
  self.proxies_.touch(self.machine_.thread, self.shared_offset(pointer));
}

void Block::fence_proxy_async() { running->proxies_.fence(running->machine_.thread); }

std::string Block::unfinished() const {
  if (!loads_.empty()) return "the block ends before its TMA copies have arrived";
  for (const auto& thread : threads_)
    if (thread->stores.size() > 1 || !thread->stores.back().empty())
      return "the block ends before its tensor stores have read shared memory";
  for (std::size_t warp = 0; warp < products_.size(); ++warp) {
    if (products_[warp].busy()) return "the block ends before the products of a warpgroup";
    const std::size_t first = warp / 4 * 4;
    if (products_[warp].started() != products_[first].started())
      return "warps of a warpgroup started different products";
    if (products_[warp].registers() != products_[first].registers())
      return "warps of a warpgroup asked for different numbers of registers";
    if (!products_[warp].started().empty() && first + 4 > products_.size())
      return "wgmma by less than four warps";
  }
  return {};
}

std::string Block::describe_waiting() const {
  int named = 0;
  int waiting = 0;
  std::string barriers;
  for (const auto& thread : threads_) {
    named += thread->state == State::at_named ? 1 : 0;
    if (thread->state != State::at_mbarrier) continue;
    ++waiting;
    const std::string text = barriers_.describe(thread->barrier);
    if (barriers.find(text) == std::string::npos) barriers += "; " + text;
  }
  std::string text;
  if (named > 0) text += fmt::format(", {} wait at a named barrier", named);
  if (waiting > 0) text += fmt::format(", {} at an mbarrier{}", waiting, barriers);
  return text;
}

}  // namespace wyvern::emulator
