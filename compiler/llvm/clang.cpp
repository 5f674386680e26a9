#include "compiler/llvm/clang.hpp"

#include <clang/Basic/Diagnostic.h>
#include <clang/CodeGen/CodeGenAction.h>
#include <clang/Frontend/CompilerInstance.h>
#include <clang/Frontend/CompilerInvocation.h>
#include <clang/Frontend/FrontendOptions.h>
#include <clang/Frontend/TextDiagnosticPrinter.h>
#include <llvm/ADT/SmallString.h>
#include <llvm/IR/DiagnosticInfo.h>
#include <llvm/IR/DiagnosticPrinter.h>
#include <llvm/IR/LLVMContext.h>
#include <llvm/Support/MemoryBuffer.h>
#include <llvm/Support/TargetSelect.h>
#include <llvm/Support/VirtualFileSystem.h>
#include <llvm/Support/raw_ostream.h>
#include <llvm/TargetParser/Host.h>

#include <memory>
#include <vector>

namespace wyvern::llvm_plugin {
namespace {

void register_native_target() {
  static const bool once = [] {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
    llvm::InitializeNativeTargetAsmParser();
    return true;
  }();
  (void)once;
}

/// Without a handler of its own a context ends the process on a back-end error.
class CollectingHandler : public llvm::DiagnosticHandler {
 public:
  explicit CollectingHandler(std::string& log) : log_(log) {}
  bool handleDiagnostics(const llvm::DiagnosticInfo& info) override {
    if (info.getSeverity() != llvm::DS_Error) return true;
    llvm::raw_string_ostream stream(log_);
    llvm::DiagnosticPrinterRawOStream printer(stream);
    info.print(printer);
    stream << '\n';
    failed_ = true;
    return true;
  }
  bool failed() const { return failed_; }

 private:
  std::string& log_;
  bool failed_ = false;
};

/// cc1 arguments that name this processor. LLVM's own detection, so that nothing it can use is left
/// out; the same for every call.
const std::vector<std::string>& host_arguments() {
  static const std::vector<std::string> arguments = [] {
    std::vector<std::string> list{"-triple", llvm::sys::getDefaultTargetTriple(), "-target-cpu",
                                  llvm::sys::getHostCPUName().str()};
    for (const auto& feature : llvm::sys::getHostCPUFeatures()) {
      list.emplace_back("-target-feature");
      list.emplace_back(feature.getValue() ? "+" : "-");
      list.back() += feature.getKey();
    }
    return list;
  }();
  return arguments;
}

std::unique_ptr<clang::CodeGenAction> make_action(WyvernLlvmOutput output,
                                                  llvm::LLVMContext* context) {
  switch (output) {
    case kWyvernLlvmIr: return std::make_unique<clang::EmitLLVMAction>(context);
    case kWyvernLlvmAssembly: return std::make_unique<clang::EmitAssemblyAction>(context);
    case kWyvernLlvmSharedObject:
    case kWyvernLlvmObject: break;
  }
  return std::make_unique<clang::EmitObjAction>(context);
}

const char* action_option(WyvernLlvmOutput output) {
  if (output == kWyvernLlvmIr) return "-emit-llvm";
  return output == kWyvernLlvmAssembly ? "-S" : "-emit-obj";
}

}  // namespace

namespace {

/// All objects of a compile. Not destroyed if an exception has passed through Clang, which is not
/// exception-safe.
struct Session {
  std::string log;
  llvm::raw_string_ostream log_stream{log};
  clang::CompilerInstance instance;
  llvm::SmallString<0> bytes;
  llvm::LLVMContext context;
  std::unique_ptr<clang::CodeGenAction> action;
};

Result run(Session& session, const WyvernLlvmInput& input) {
  std::string& log = session.log;
  llvm::raw_string_ostream& log_stream = session.log_stream;
  clang::CompilerInstance& instance = session.instance;

  std::vector<const char*> arguments{action_option(input.output)};
  for (const std::string& argument : host_arguments()) arguments.push_back(argument.c_str());
  arguments.insert(arguments.end(), input.options, input.options + input.option_count);
  arguments.push_back("-main-file-name");
  arguments.push_back(input.file_name);

  instance.setVerboseOutputStream(log_stream);
  instance.createDiagnostics(
      new clang::TextDiagnosticPrinter(log_stream, &instance.getDiagnosticOpts()));
  if (!clang::CompilerInvocation::CreateFromArgs(instance.getInvocation(), arguments,
                                                 instance.getDiagnostics(), "wyvern"))
    return {kWyvernLlvmRejected, "the compiler does not know an option: " + log};
  // Templates are already expanded; an empty file system makes a stray #include an error
  // everywhere.
  instance.createFileManager(llvm::makeIntrusiveRefCnt<llvm::vfs::InMemoryFileSystem>());
  const std::unique_ptr<llvm::MemoryBuffer> text =
      llvm::MemoryBuffer::getMemBuffer({input.source, input.source_size}, input.file_name);
  instance.getFrontendOpts().Inputs = {
      clang::FrontendInputFile(text->getMemBufferRef(), clang::InputKind(clang::Language::CXX))};

  instance.setOutputStream(std::make_unique<llvm::raw_svector_ostream>(session.bytes));
  auto handler = std::make_unique<CollectingHandler>(log);
  const CollectingHandler& back_end = *handler;
  session.context.setDiagnosticHandler(std::move(handler));
  session.action = make_action(input.output, &session.context);
  if (!instance.ExecuteAction(*session.action) || back_end.failed())
    return {kWyvernLlvmRejected, log};
  return {kWyvernLlvmOk, session.bytes.str().str()};
}

}  // namespace

Result run_clang(const WyvernLlvmInput& input) {
  register_native_target();
  auto* session = new Session;
  Result result = run(*session, input);
  delete session;
  return result;
}

}  // namespace wyvern::llvm_plugin
