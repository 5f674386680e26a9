// A back end compiles source text for one kind of device; it knows no templates. A folder of
// compiler/ implements it; backend.cpp lists them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/compiler.hpp"
#include "templates/source.hpp"

namespace wyvern::detail {

/// The kinds of output of a back end.
enum class Output : std::uint8_t {
  loadable,  ///< the code of an Artifact: a cubin, or a shared object
  ptx,
  llvm_ir,
  assembly,
  object,  ///< relocatable
};

/// A form that emit() can give, besides the source, and the output that has it.
struct Form {
  Emit emit;
  Output output;
};

struct Code {
  std::string bytes;
  Resources resources;
  double compile_ms = 0;
};

/// One kind of device. Stateless, one object for the life of the process; every member is
/// thread-safe. Nothing is opened before a member that says so.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceKind kind() const = 0;

  /// The target of this name, or nothing when it is not a name of this kind. Throws
  /// Error(kBadInput) for an unknown target of this kind.
  virtual std::optional<Target> find_target(std::string_view name) const = 0;
  /// The legal names for a message about `wanted`: "native-cpu", "one of sm_80, sm_86, ...".
  virtual std::string target_names(std::string_view wanted) const = 0;
  /// Target::name() of a target of this kind.
  virtual std::string target_name(const Target& target) const = 0;
  /// See wyvern::usual_target().
  virtual Target usual_target() const = 0;

  /// How sources for this kind are assembled.
  virtual const Dialect& dialect() const = 0;

  /// Opens the compiler; throws Error(kUnavailable) with what is missing and how to fix it.
  virtual void open() const = 0;
  /// The compiler's name and version, for people.
  virtual std::string version() const = 0;
  /// What distinguishes two builds of the compiler; part of the artifact key. Like version() it may
  /// open the compiler, and then throws as open() does.
  virtual std::string identity() const = 0;
  /// The options that source is compiled with for a target; part of the artifact key.
  virtual std::vector<std::string> options(const Target& target) const = 0;
  /// The forms that emit() can give besides the source.
  virtual std::span<const Form> forms() const = 0;
  /// Compiles `source`, which defines kEntryPoint. `label` names it in errors. Throws
  /// Error(kCompile) with the compiler's message, Error(kUnavailable) when the compiler cannot be
  /// opened, Error(kBadInput) for a target that it cannot compile for here.
  virtual Code compile(const std::string& source, const std::string& label, const Target& target,
                       Output output) const = 0;

  /// See wyvern::resources_text().
  virtual std::string resources_text(const Resources& resources,
                                     std::int64_t block_bytes) const = 0;
};

/// Every back end of the build, the CPU's first.
std::span<const Backend* const> backends();
const Backend& backend(DeviceKind kind);

/// The back end that each folder defines.
const Backend& cpu_backend();
const Backend& cuda_backend();

/// backend(target.device).compile().
Code compile_source(const std::string& source, const std::string& label, const Target& target,
                    Output output = Output::loadable);

/// The artifact key of `source` as `config` specialized it. Stored artifacts are found by it, so it
/// changes only when the code may change.
std::string source_key(const Backend& backend, const std::string& source, const Config& config,
                       const Target& target);

}  // namespace wyvern::detail
