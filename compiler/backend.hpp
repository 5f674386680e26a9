// What NVRTC and Clang have in common: source text in, code out, no templates.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "compiler/compiler.hpp"

namespace wyvern::detail {

/// What a back end is asked for.
enum class Output : std::uint8_t {
  loadable,  ///< what an Artifact holds: a cubin, or a shared object
  ptx,
  llvm_ir,
  assembly,
  object,  ///< relocatable
};

struct Code {
  std::string bytes;
  Resources resources;
  double compile_ms = 0;
};

/// Compiles `source`, which defines kEntryPoint. `label` says in errors what it is. Throws
/// Error(kCompile) with the compiler's message, Error(kUnavailable) when the compiler cannot be
/// opened, Error(kBadInput) for a CPU other than the host. Thread-safe.
Code compile_source(const std::string& source, const std::string& label, const Target& target,
                    Output output = Output::loadable);

/// The options that source is compiled with for a target; part of the artifact key.
std::vector<std::string> compile_options(const Target& target);

/// compile_source, compile_options and compiler_version for one kind of device.
Code compile_cuda(const std::string& source, const std::string& label, const Target& target,
                  Output output);
std::vector<std::string> cuda_options(const Target& target);
Code compile_cpu(const std::string& source, const std::string& label, const Target& target,
                 Output output);
std::vector<std::string> cpu_options(const Target& target);

}  // namespace wyvern::detail
