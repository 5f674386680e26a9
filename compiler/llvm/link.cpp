#include "compiler/llvm/link.hpp"

#include <lld/Common/Driver.h>
#include <llvm/ADT/ScopeExit.h>
#include <llvm/ADT/SmallString.h>
#include <llvm/ADT/StringSwitch.h>
#include <llvm/Object/ObjectFile.h>
#include <llvm/Support/FileSystem.h>
#include <llvm/Support/MemoryBuffer.h>
#include <llvm/Support/Path.h>
#include <llvm/Support/raw_ostream.h>

#include <memory>
#include <mutex>
#include <vector>

LLD_HAS_DRIVER(elf)

namespace wyvern::llvm_plugin {
namespace {

using llvm::object::ObjectFile;
using llvm::object::SymbolRef;

std::unique_ptr<ObjectFile> parse(const std::string& object) {
  return llvm::cantFail(ObjectFile::createObjectFile({object, "kernel.o"}));
}

/// What loops and copies of aggregates become; every C library has them.
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

Result io_failure(llvm::StringRef what, std::error_code error) {
  return {kWyvernLlvmFailed, (what + ": " + error.message()).str()};
}

Result run_lld(const std::string& in, const std::string& out) {
  // --threads=1: a kernel is far too small for LLD's thread pool to pay.
  const std::vector<const char*> arguments{
      "ld.lld",        "-shared",   "-nostdlib",          "-Bsymbolic",      "--threads=1",
      "--strip-all",   "-z",        "noexecstack",        "-z",              "max-page-size=4096",
      "--build-id=none", "-o",      out.c_str(),          in.c_str()};
  // LLD also resets LLVM's command-line options to their defaults. Compiles read those meanwhile,
  // which is safe as long as none is ever set: pass no -mllvm option, here or to Clang.
  std::string log;
  llvm::raw_string_ostream stream(log);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const lld::Result result =
      lld::lldMain(arguments, stream, stream, {{lld::Gnu, &lld::elf::link}});
  return {result.retCode == 0 ? kWyvernLlvmOk : kWyvernLlvmRejected, log};
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
  llvm::SmallString<128> folder;
  if (const std::error_code error = llvm::sys::fs::createUniqueDirectory("wyvern", folder))
    return io_failure("cannot create a temporary folder", error);
  const auto cleanup = llvm::make_scope_exit([&] { llvm::sys::fs::remove_directories(folder); });
  const std::string in = (folder + "/kernel.o").str();
  const std::string out = (folder + "/kernel.so").str();
  std::error_code error;
  {
    llvm::raw_fd_ostream stream(in, error);
    if (!error) stream << object;
    stream.close();
    if (!error) error = stream.error();
    stream.clear_error();
  }
  if (error) return io_failure("cannot write " + in, error);
  if (Result linked = run_lld(in, out); linked.status != kWyvernLlvmOk) return linked;
  const auto bytes = llvm::MemoryBuffer::getFile(out);
  if (!bytes) return io_failure("cannot read " + out, bytes.getError());
  return {kWyvernLlvmOk, (*bytes)->getBuffer().str()};
}

}  // namespace wyvern::llvm_plugin
