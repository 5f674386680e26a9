#include "compiler/compiler.hpp"

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "compiler/backend.hpp"
#include "compiler/clang_plugin.hpp"
#include "compiler/nvrtc.hpp"
#include "templates/source.hpp"

namespace wyvern {
namespace {

using detail::Code;
using detail::Output;

std::string specialized(const CompileRequest& request) {
  const Template& t = *request.source_template;
  if (t.device != request.target.device)
    throw Error(
        ErrorKind::kBadInput,
        fmt::format("template {} is for {}, but the target {} is for {}", t.id(),
                    to_string(t.device), request.target.name(), to_string(request.target.device)));
  return specialize(t, request.constants, request.config);
}

/// What the request is, for messages.
std::string label(const CompileRequest& request) {
  return fmt::format("template {} with {} ({}) for {}", request.source_template->id(),
                     request.config.to_string(), request.constants.values().to_string(),
                     request.target.name());
}

/// What the compiler is, build included.
std::string compiler_identity(DeviceKind device) {
  return device == DeviceKind::cuda ? detail::Nvrtc::instance().identity() : detail::llvm_version();
}

/// Fields are named and their lengths written, so that no two requests give one text.
std::string key_of(const CompileRequest& request, const std::string& source) {
  std::string text = "wyvern artifact 1\n";
  const auto field = [&text](std::string_view name, std::string_view value) {
    fmt::format_to(std::back_inserter(text), "{} {}\n{}\n", name, value.size(), value);
  };
  const Target& target = request.target;
  field("source", source);
  field("config", request.config.to_string());
  field("device", to_string(target.device));
  field("arch", target.arch);
  field("features", target.features);
  field("compiler", compiler_identity(target.device));
  for (const std::string& option : detail::compile_options(target)) field("option", option);
  field("entry", kEntryPoint);
  return sha256_hex(text);
}

Output output_for(DeviceKind device, Emit what) {
  const bool cuda = device == DeviceKind::cuda;
  switch (what) {
    case Emit::ptx:
      if (cuda) return Output::ptx;
      break;
    case Emit::cubin:
      if (cuda) return Output::loadable;
      break;
    case Emit::llvm_ir:
      if (!cuda) return Output::llvm_ir;
      break;
    case Emit::assembly:
      if (!cuda) return Output::assembly;
      break;
    case Emit::object:
      if (!cuda) return Output::object;
      break;
    case Emit::source: break;
  }
  throw Error(
      ErrorKind::kBadInput,
      fmt::format("emit '{}' does not exist for {}; it must be one of {}", to_string(what),
                  to_string(device), cuda ? "source, ptx, cubin" : "source, llvm-ir, asm, object"));
}

}  // namespace

std::string artifact_key(const CompileRequest& request) {
  return key_of(request, specialized(request));
}

Artifact compile(const CompileRequest& request) {
  const std::string source = specialized(request);
  Code code = detail::compile_source(source, label(request), request.target);
  Artifact artifact;
  artifact.key = key_of(request, source);
  artifact.template_id = request.source_template->id();
  artifact.constants = request.constants.values().to_string();
  artifact.config = request.config.to_string();
  artifact.target = request.target.name();
  artifact.entry = kEntryPoint;
  artifact.code = std::move(code.bytes);
  artifact.resources = code.resources;
  artifact.compile_ms = code.compile_ms;
  return artifact;
}

std::vector<Artifact> compile_all(std::span<const CompileRequest> requests, unsigned jobs,
                                  const std::function<void(std::size_t)>& done) {
  std::vector<Artifact> artifacts(requests.size());
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;  // guards `failure` and calls of `done`
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < requests.size(); i = next++) {
      std::exception_ptr error;
      try {
        artifacts[i] = compile(requests[i]);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      if (error && !failure) failure = error;
      if (!error && done) done(i);
    }
  };
  if (jobs == 0) jobs = std::max(1U, std::thread::hardware_concurrency());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 1; i < std::min<std::size_t>(jobs, requests.size()); ++i)
      threads.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
  return artifacts;
}

std::string_view to_string(Emit emit) noexcept {
  switch (emit) {
    case Emit::source: return "source";
    case Emit::ptx: return "ptx";
    case Emit::cubin: return "cubin";
    case Emit::llvm_ir: return "llvm-ir";
    case Emit::assembly: return "asm";
    case Emit::object: return "object";
  }
  return "?";
}

Emitted emit(const CompileRequest& request, Emit what) {
  std::string source = specialized(request);
  if (what == Emit::source) return {std::move(source), {}, 0};
  const Output output = output_for(request.target.device, what);
  Code code = detail::compile_source(source, label(request), request.target, output);
  return {std::move(code.bytes), code.resources, code.compile_ms};
}

std::string compiler_problem(DeviceKind device) {
  try {
    if (device == DeviceKind::cuda)
      detail::Nvrtc::instance();
    else
      detail::ClangPlugin::instance();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

std::string compiler_version(DeviceKind device) {
  return device == DeviceKind::cuda ? detail::Nvrtc::instance().version() : detail::llvm_version();
}

namespace detail {

Code compile_source(const std::string& source, const std::string& label, const Target& target,
                    Output output) {
  return target.device == DeviceKind::cuda ? compile_cuda(source, label, target, output)
                                           : compile_cpu(source, label, target, output);
}

std::vector<std::string> compile_options(const Target& target) {
  return target.device == DeviceKind::cuda ? cuda_options(target) : cpu_options(target);
}

}  // namespace detail
}  // namespace wyvern
