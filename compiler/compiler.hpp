// Template + constants + config + target -> loadable code.
//
// CUDA goes through NVRTC (libnvrtc opened on first use) to a cubin for a real architecture; the
// CPU goes through Clang and LLVM in a plugin opened on first use to a shared object. Each is a
// back end, see backend.hpp. Everything here is thread-safe; compile() may be called from many
// threads at once.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "templates/template.hpp"

namespace wyvern {

/// The device that code is compiled for.
struct Target {
  DeviceKind device = DeviceKind::cpu;
  std::string arch;      ///< "sm_90a"; on a CPU vendor, family and model: "genuineintel-6-143"
  std::string features;  ///< CPU: its instruction sets as the kernel lists them; empty on CUDA
  Limits limits;
  std::int64_t registers_per_block = 0;  ///< limit for all threads of a block; 0: none
  /// Blocks that one launch may have in x, y and z; 0: no limit.
  std::array<std::int64_t, 3> max_grid{};
  /// "sm_90a": code may use features of this architecture alone, such as Hopper's wgmma.
  bool arch_specific = false;

  /// "sm_90a", or "cpu-<arch>-<short hash of the features>".
  std::string name() const;
};

/// The target of a CUDA architecture "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", ...;
/// needs no GPU and no NVRTC. Throws Error(kBadInput) that lists the known ones.
Target cuda_target(std::string_view arch);

/// The target with the multiprocessors and the memory rate of the largest GPU of its compute
/// capability that models are trained and served on; unchanged if none is known.
Target on_usual_gpu(Target target);

/// The processor this program runs on, from /proc/cpuinfo; does not open the plugin. Arch and
/// features are its identity: everything that LLVM detects when it compiles follows from them, so a
/// key of them identifies fitting code. The only CPU that compile() and emit() accept.
const Target& host_target();

/// Every kind of device that this build has a back end for, the CPU first.
std::vector<DeviceKind> device_kinds();

/// The default target of a kind of device: sm_90a, or the host.
Target usual_target(DeviceKind device);

/// Parses "sm_*" or "native-cpu"; throws Error(kBadInput) that lists the nearest names.
Target parse_target(std::string_view text);

/// A kernel's resources as the compiler reports them.
struct Resources {
  int registers = 0;              ///< per thread (CUDA)
  std::int64_t shared_bytes = 0;  ///< static shared memory per block (CUDA)
  std::int64_t stack_bytes = 0;   ///< local memory per thread
  std::int64_t spill_bytes = 0;   ///< spill stores plus spill loads
  std::int64_t code_bytes = 0;
};

/// A kernel's resources, as one line for people; `block_bytes` is the launch's dynamic shared
/// memory or scratch.
std::string resources_text(const Target& target, const Resources& resources,
                           std::int64_t block_bytes);

/// Compiled code with its metadata. A plain value.
struct Artifact {
  std::string key;  ///< SHA-256 hex of everything the code depends on
  std::string template_id;
  std::string constants;  ///< Values::to_string()
  std::string config;     ///< Values::to_string()
  std::string target;     ///< Target::name()
  std::string entry;      ///< symbol of the entry point inside `code`
  std::string code;       ///< cubin, or the bytes of a shared object
  Resources resources;
  double compile_ms = 0;
};

struct CompileRequest {
  const Template* source_template = nullptr;  ///< not owned; from all_templates()
  Constants constants;
  Config config;
  Target target;
};

/// The artifact key of a request: SHA-256 over the specialized source (its files by their digests,
/// which the build computed), the config, the target, the compiler's build, its options and the
/// entry point. Compiles nothing. NVRTC's build is read from its file, or NVRTC is opened (5 ms,
/// once) if the file does not have it; throws Error(kUnavailable) without an NVRTC. The CPU's
/// compiler is known since the build and is not opened.
std::string artifact_key(const CompileRequest& request);

/// The key of what the code does, independent of its compiler: SHA-256 over the specialized source,
/// the config, the target and the entry point. Opens nothing.
std::string code_key(const CompileRequest& request);

/// Compiles. Throws Error(kCompile) with template, config and the compiler's message, or
/// Error(kUnavailable) that says which library is missing and how to get it.
Artifact compile(const CompileRequest& request);

/// Compiles many in parallel on up to `jobs` threads (0: as many as there are cores). The result at
/// i belongs to requests[i]; `done`, if given, is called after each, from one thread at a time.
/// The first Error is thrown after all have ended.
std::vector<Artifact> compile_all(std::span<const CompileRequest> requests, unsigned jobs = 0,
                                  const std::function<void(std::size_t)>& done = {});

enum class Emit : std::uint8_t { source, ptx, cubin, llvm_ir, assembly, object };
/// "source", "ptx", "cubin", "llvm-ir", "asm", "object".
std::string_view to_string(Emit emit) noexcept;

struct Emitted {
  std::string text;     ///< the output
  Resources resources;  ///< of the compiled kernel; zeros for Emit::source
  double compile_ms = 0;
};

/// One stage of the compilation, for people to read. CUDA: source, ptx, cubin, asm (the PTX is not
/// machine code, so asm is legal on a CPU only); CPU: source, llvm-ir, asm, object. Throws
/// Error(kBadInput) for a pair that does not exist, listing the legal ones.
Emitted emit(const CompileRequest& request, Emit what);

/// Whether a compiler for this kind of device can be opened here: empty if so, else one sentence:
/// what is missing and how to fix it. Opens it: on the CPU that loads LLVM.
std::string compiler_problem(DeviceKind device);

/// "NVRTC 13.0.88", "LLVM 19.1.7"; throws Error(kUnavailable) where NVRTC cannot be opened.
std::string compiler_version(DeviceKind device);

}  // namespace wyvern
