#include "compiler/llvm/link.hpp"

#include <lld/Common/Driver.h>
#include <llvm/ADT/StringSwitch.h>
#include <llvm/Object/ObjectFile.h>
#include <llvm/Support/raw_ostream.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

LLD_HAS_DRIVER(elf)

namespace wyvern::llvm_plugin {
namespace {

using llvm::object::ObjectFile;
using llvm::object::SymbolRef;

std::unique_ptr<ObjectFile> parse(const std::string& object) {
  return llvm::cantFail(ObjectFile::createObjectFile({object, "kernel.o"}));
}

/// The functions that loops and copies of aggregates compile to; every C library has them.
bool resolved_by_process(llvm::StringRef name) {
  return llvm::StringSwitch<bool>(name)
      .Cases("", "memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_", true)
      .Default(false);
}

/// Why the object cannot stand alone, or empty.
std::string symbol_problem(const std::string& object, const std::string& entry) {
  bool has_entry = false;
  std::string missing;
  const std::unique_ptr<ObjectFile> file = parse(object);
  for (const SymbolRef& symbol : file->symbols()) {
    const llvm::StringRef name = llvm::cantFail(symbol.getName());
    const bool undefined = (llvm::cantFail(symbol.getFlags()) & SymbolRef::SF_Undefined) != 0;
    if (!undefined && name == entry) has_entry = true;
    if (!undefined || resolved_by_process(name)) continue;
    missing += (missing.empty() ? "" : ", ") + name.str();
  }
  if (!missing.empty())
    return "undefined symbol: " + missing +
           " (a CPU template may leave only memcpy, memmove and memset to the process)";
  return has_entry ? "" : "it defines no function \"" + entry + "\" with C linkage";
}

/// A descriptor, and the path under which LLD can open it.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }
  std::string path() const { return "/proc/self/fd/" + std::to_string(number_); }
  void close() {
    if (number_ >= 0) ::close(number_);
    number_ = -1;
  }

 private:
  int number_;
};

Result system_failure(const char* what) {
  return {kWyvernLlvmFailed, std::string("there is no ") + what + ": " + std::strerror(errno)};
}

bool write_all(const Descriptor& file, const std::string& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t count = ::write(file.number(), bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno != EINTR) return false;
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  return true;
}

std::string read_all(const Descriptor& pipe) {
  std::string bytes;
  std::array<char, 65536> piece;
  for (;;) {
    const ssize_t count = ::read(pipe.number(), piece.data(), piece.size());
    if (count > 0) bytes.append(piece.data(), static_cast<std::size_t>(count));
    if (count == 0 || (count < 0 && errno != EINTR)) return bytes;
  }
}

/// LLD's messages. After some errors (no descriptor for its output, say) it ends the process, and
/// only the message comes before that; so the message is thrown as soon as it is complete.
class Messages : public llvm::raw_ostream {
 public:
  Messages() : raw_ostream(/*unbuffered=*/true) {}
  const std::string& text() const { return text_; }

 private:
  void write_impl(const char* bytes, std::size_t size) override {
    text_.append(bytes, size);
    if (text_.find("error: ") != text_.npos && text_.back() == '\n')
      throw std::runtime_error(text_);
  }
  std::uint64_t current_pos() const override { return text_.size(); }

  std::string text_;
};

Result run_lld(const std::string& in, const std::string& out) {
  // --threads=1: a kernel is far too small for LLD's thread pool to pay.
  const std::vector<const char*> arguments{
      "ld.lld",          "-shared", "-nostdlib",   "-Bsymbolic", "--strip-all",
      "--build-id=none", "-z",      "noexecstack", "-z",         "max-page-size=4096",
      "--threads=1",     "-o",      out.c_str(),   in.c_str()};
  // LLD also resets LLVM's command-line options to their defaults. Compiles read those meanwhile,
  // which is safe as long as none is ever set: pass no -mllvm option, here or to Clang.
  Messages messages;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const lld::Result result =
      lld::lldMain(arguments, messages, messages, {{lld::Gnu, &lld::elf::link}});
  return {result.retCode == 0 ? kWyvernLlvmOk : kWyvernLlvmFailed, messages.text()};
}

}  // namespace

std::uint64_t text_size(const std::string& object) {
  std::uint64_t total = 0;
  const std::unique_ptr<ObjectFile> file = parse(object);
  for (const llvm::object::SectionRef& section : file->sections())
    if (section.isText()) total += section.getSize();
  return total;
}

Result link_shared(const std::string& object, const std::string& entry) {
  if (const std::string problem = symbol_problem(object, entry); !problem.empty())
    return {kWyvernLlvmRejected, problem};
  // No file is made: for an output file on a disk LLVM would install signal handlers in the
  // process, to remove it when one arrives. It writes a pipe at the end and at once.
  const Descriptor in(memfd_create("kernel.o", MFD_CLOEXEC));
  if (in.number() < 0 || !write_all(in, object)) return system_failure("memory for the object");
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return system_failure("a pipe from the linker");
  const Descriptor from_linker(ends[0]);
  Descriptor to_us(ends[1]);
  // Nothing is thrown while the thread runs, nor in it.
  std::string library;
  bool is_read = false;
  std::thread reader;
  try {
    reader = std::thread([&] {
      try {
        library = read_all(from_linker);
        is_read = true;
      } catch (const std::bad_alloc&) {
      }
    });
  } catch (const std::system_error& error) {  // the user has reached the limit of processes
    errno = error.code().value();
    return system_failure("thread to read from the linker");
  }
  std::exception_ptr failure;
  Result linked;
  try {
    linked = run_lld(in.path(), to_us.path());
  } catch (...) {
    failure = std::current_exception();
  }
  to_us.close();
  reader.join();
  if (failure) std::rethrow_exception(failure);
  if (!is_read) throw std::bad_alloc();
  if (linked.status == kWyvernLlvmOk) linked.bytes = std::move(library);
  return linked;
}

}  // namespace wyvern::llvm_plugin
