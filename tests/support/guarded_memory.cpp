#include "tests/support/guarded_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace wyvern::testing {
namespace {

const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

/// A block as the signal's handler reports it. A slot belongs to one block from acquire_slot() to
/// release_slot(); `live` says that its fields are all there.
struct Slot {
  std::atomic<bool> taken{false}, live{false};
  std::array<char, 64> name{};
  std::uintptr_t first = 0, data = 0;
  std::size_t accessible = 0, size = 0;
};

/// More than a launch has tensors, several times.
std::array<Slot, 1024> slots;

std::size_t acquire_slot() {
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (!slots[i].taken.exchange(true)) return i;
  throw std::runtime_error("too much guarded memory at a time");
}

void release_slot(std::size_t slot) {
  slots[slot].live = false;
  slots[slot].taken = false;
}

/// Text put together without allocating, as a handler must.
class Line {
 public:
  void add(const char* text) {
    while (*text != '\0' && used_ + 1 < text_.size()) text_[used_++] = *text++;
  }
  void add(std::uintptr_t number) {
    std::array<char, 24> digits{};
    std::size_t at = digits.size() - 1;
    do {
      digits[--at] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    add(digits.data() + at);
  }
  void print() const {
    if (write(STDERR_FILENO, text_.data(), used_) < 0) return;  // no other place to report it
  }

 private:
  std::array<char, 256> text_{};
  std::size_t used_ = 0;
};

bool tell(const Slot& slot, std::uintptr_t address) {
  if (address < slot.first - kPage || address >= slot.first + slot.accessible + kPage) return false;
  Line line;
  line.add("\n");
  line.add(slot.name.data());
  if (address < slot.first) {
    line.add(" was touched ");
    line.add(slot.data - address);
    line.add(" bytes before its start");
  } else if (address >= slot.first + slot.accessible) {
    line.add(" was touched ");
    line.add(address - (slot.data + slot.size));
    line.add(" bytes past its end");
  } else {
    line.add(" was written at byte ");
    line.add(address - slot.data);
    line.add(", it may only be read");
  }
  line.add("\n");
  line.print();
  return true;
}

/// Reports the touched block; the access is then repeated and ends the process.
void on_fault(int signal, siginfo_t* info, void* /*context*/) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const Slot& slot : slots)
    if (slot.live && tell(slot, address)) break;
  std::signal(signal, SIG_DFL);
}

void install_handler() {
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

GuardedMemory::GuardedMemory(std::string name, std::size_t size, std::size_t alignment,
                             std::size_t slack, Against against)
    : accessible_(rounded_up(rounded_up(size, alignment) + slack, kPage)), slot_(acquire_slot()) {
  static const bool installed = (install_handler(), true);
  static_cast<void>(installed);
  void* const all = mmap(nullptr, accessible_ + 2 * kPage, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  first_ = static_cast<std::byte*>(all) + kPage;
  if (all == MAP_FAILED || mprotect(first_, accessible_, PROT_READ | PROT_WRITE) != 0)
    throw std::runtime_error("no memory for guard pages");
  data_ = against == Against::start ? first_ : first_ + accessible_ - rounded_up(size, alignment);
  Slot& slot = slots[slot_];
  slot.name = {};
  std::memcpy(slot.name.data(), name.data(), std::min(name.size(), slot.name.size() - 1));
  slot.first = reinterpret_cast<std::uintptr_t>(first_);
  slot.data = reinterpret_cast<std::uintptr_t>(data_);
  slot.accessible = accessible_;
  slot.size = size;
  slot.live = true;
}

GuardedMemory::~GuardedMemory() {
  release_slot(slot_);
  munmap(first_ - kPage, accessible_ + 2 * kPage);
}

void GuardedMemory::make_read_only() { mprotect(first_, accessible_, PROT_READ); }

}  // namespace wyvern::testing
