#include "tests/emulator/fiber.hpp"

#include <ucontext.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace wyvern::emulator {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;

/// Memory that fibers of this thread take in turn: new memory of the hundreds of a launch would be
/// filled each time by tests that have malloc() poison it.
class Stack {
 public:
  Stack() {
    if (unused.empty()) {
      bytes_ = std::make_unique_for_overwrite<unsigned char[]>(kStackBytes);
    } else {
      bytes_ = std::move(unused.back());
      unused.pop_back();
    }
  }
  ~Stack() { unused.push_back(std::move(bytes_)); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  unsigned char* get() const { return bytes_.get(); }

 private:
  static thread_local std::vector<std::unique_ptr<unsigned char[]>> unused;
  std::unique_ptr<unsigned char[]> bytes_;
};
thread_local std::vector<std::unique_ptr<unsigned char[]>> Stack::unused;

}  // namespace

#if defined(__x86_64__)

// ucontext would do, but makes a system call a switch, and warps switch 32 times an instruction.
extern "C" void wyvern_emulator_switch(void** save, void* resume);
asm(R"(
.text
.type wyvern_emulator_switch, @function
wyvern_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size wyvern_emulator_switch, . - wyvern_emulator_switch
)");

struct Fiber::Context {
  void* stack_pointer = nullptr;
  std::unique_ptr<Stack> stack;
  Body body = nullptr;
  void* argument = nullptr;

  static thread_local Context* starting;
  static void enter() {
    Context* const self = starting;
    self->body(self->argument);
  }
};
thread_local Fiber::Context* Fiber::Context::starting = nullptr;

void Fiber::start(Body body, void* argument) {
  Context& c = *context_;
  if (!c.stack) c.stack = std::make_unique<Stack>();
  c.body = body;
  c.argument = argument;
  auto top = reinterpret_cast<std::uintptr_t>(c.stack->get() + kStackBytes) & ~std::uintptr_t{15};
  auto* slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // the stack is aligned as after a call
  *--slot = reinterpret_cast<void*>(&Context::enter);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;  // the registers that a switch restores
  c.stack_pointer = slot;
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
  Context::starting = to.context_.get();
  wyvern_emulator_switch(&from.context_->stack_pointer, to.context_->stack_pointer);
}

#else

struct Fiber::Context {
  ucontext_t state{};
  std::unique_ptr<Stack> stack;
  Body body = nullptr;
  void* argument = nullptr;

  static thread_local Context* starting;
  static void enter() {
    Context* const self = starting;
    self->body(self->argument);
  }
};
thread_local Fiber::Context* Fiber::Context::starting = nullptr;

void Fiber::start(Body body, void* argument) {
  Context& c = *context_;
  if (!c.stack) c.stack = std::make_unique<Stack>();
  c.body = body;
  c.argument = argument;
  getcontext(&c.state);
  c.state.uc_stack.ss_sp = c.stack->get();
  c.state.uc_stack.ss_size = kStackBytes;
  c.state.uc_link = nullptr;
  makecontext(&c.state, &Context::enter, 0);
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
  Context::starting = to.context_.get();
  swapcontext(&from.context_->state, &to.context_->state);
}

#endif

Fiber::Fiber() : context_(std::make_unique<Context>()) {}
Fiber::~Fiber() = default;

}  // namespace wyvern::emulator
