#include "compiler/compiler.hpp"

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>
#include <mutex>

#include "compiler/backend.hpp"
#include "runtime/base/parallel.hpp"
#include "templates/source.hpp"

namespace wyvern {
namespace {

using detail::Code;
using detail::Output;

const Template& checked_template(const CompileRequest& request) {
  const Template& t = *request.source_template;
  if (t.device != request.target.device)
    throw Error(
        ErrorKind::kBadInput,
        fmt::format("template {} is for {}, but the target {} is for {}", t.id(),
                    to_string(t.device), request.target.name(), to_string(request.target.device)));
  return t;
}

std::string specialized(const CompileRequest& request) {
  return specialize(checked_template(request), request.constants, request.config,
                    detail::backend(request.target.device).dialect());
}

/// The specialized source's part of a key.
std::string identity_of(const CompileRequest& request) {
  return source_identity(checked_template(request), request.constants, request.config,
                         detail::backend(request.target.device).dialect());
}

/// The config's part of a key.
Config compiled_config(const CompileRequest& request) {
  return request.source_template->compiled(request.config);
}

/// The text whose digest is a key. It has each field's name and length, so that no two requests
/// have the same text.
class KeyText {
 public:
  explicit KeyText(std::string_view kind) : text_(fmt::format("{}\n", kind)) {}
  void add(std::string_view name, std::string_view value) {
    fmt::format_to(std::back_inserter(text_), "{} {}\n{}\n", name, value.size(), value);
  }
  void add_kernel(const std::string& source, const Config& config, const Target& target) {
    add("source", source);
    add("config", config.to_string());
    add("device", to_string(target.device));
    add("arch", target.arch);
    add("features", target.features);
  }
  std::string digest() {
    add("entry", kEntryPoint);
    return sha256_hex(text_);
  }

 private:
  std::string text_;
};

/// Describes the request in messages.
std::string label(const CompileRequest& request) {
  return fmt::format("template {} with {} ({}) for {}", request.source_template->id(),
                     request.config.to_string(), request.constants.values().to_string(),
                     request.target.name());
}

/// The output for `what`, which is not Emit::source.
Output output_for(DeviceKind device, Emit what) {
  std::vector<std::string_view> names{to_string(Emit::source)};
  for (const detail::Form& form : detail::backend(device).forms()) {
    if (form.emit == what) return form.output;
    names.push_back(to_string(form.emit));
  }
  throw Error(ErrorKind::kBadInput,
              fmt::format("emit '{}' does not exist for {}; it must be one of {}", to_string(what),
                          to_string(device), fmt::join(names, ", ")));
}

}  // namespace

std::string artifact_key(const CompileRequest& request) {
  const detail::Backend& backend = detail::backend(request.target.device);
  return detail::source_key(backend, identity_of(request), compiled_config(request),
                            request.target);
}

std::string code_key(const CompileRequest& request) {
  KeyText key("wyvern code 1");
  key.add_kernel(identity_of(request), compiled_config(request), request.target);
  return key.digest();
}

Artifact compile(const CompileRequest& request) {
  const std::string source = specialized(request);
  Code code = detail::compile_source(source, label(request), request.target);
  Artifact artifact;
  artifact.key = artifact_key(request);
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
  std::mutex mutex;  // guards `failure` and calls of `done`
  std::exception_ptr failure;
  in_parallel(requests.size(), jobs, [&](std::size_t i) {
    std::exception_ptr error;
    try {
      artifacts[i] = compile(requests[i]);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    if (error && !failure) failure = error;
    if (!error && done) done(i);
  });
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

std::string detail::source_key(const Backend& backend, const std::string& source,
                               const Config& config, const Target& target) {
  KeyText key("wyvern artifact 1");
  key.add_kernel(source, config, target);
  key.add("compiler", backend.identity());
  for (const std::string& option : backend.options(target)) key.add("option", option);
  return key.digest();
}

}  // namespace wyvern
