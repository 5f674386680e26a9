#include "compiler/backend.hpp"

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <fmt/format.h>

#include <array>

#include "compiler/cpu/clang_plugin.hpp"

namespace wyvern::detail {
namespace {

/// The entry point takes an array of pointers to tensors, then to strides; the code that unpacks it
/// goes with the parameters.
std::string parameters(const Template& t) {
  std::string text = "#define WYVERN_PARAMETERS";
  std::string unpack = "#define WYVERN_UNPACK(a, e)";
  for (std::size_t i = 0; i < t.parameters.size(); ++i) {
    const std::string pointer = declaration(t.parameters[i]);
    text += fmt::format(" {},", pointer);
    unpack += fmt::format(" static_cast<{}>((a)[{}]),", pointer.substr(0, pointer.rfind(' ')), i);
  }
  std::size_t at = t.parameters.size();
  for (const Parameter& p : t.parameters) {
    if (!p.strided) continue;
    text += fmt::format(" {},", stride_declaration(p));
    unpack += fmt::format(" *static_cast<const int64*>((a)[{}]),", at++);
  }
  return fmt::format("{} const Extents& e\n{} *(e)\n", text, unpack);
}

constexpr std::string_view kTargetName = "native-cpu";
constexpr Dialect kDialect{"device/cpu/types.hpp", "wyvern::cpu", parameters};

class CpuBackend final : public Backend {
 public:
  DeviceKind kind() const override { return DeviceKind::cpu; }

  std::optional<Target> find_target(std::string_view name) const override {
    if (name != kTargetName) return {};
    return host_target();
  }
  std::string target_names(std::string_view /*wanted*/) const override {
    return std::string(kTargetName);
  }
  std::string target_name(const Target& target) const override {
    return fmt::format("cpu-{}-{}", target.arch, sha256_hex(target.features).substr(0, 8));
  }
  Target usual_target() const override { return host_target(); }

  const Dialect& dialect() const override { return kDialect; }

  void open() const override { ClangPlugin::instance(); }
  std::string version() const override { return llvm_version(); }
  std::string identity() const override { return llvm_version(); }
  std::vector<std::string> options(const Target& target) const override {
    return cpu_options(target);
  }
  std::span<const Form> forms() const override {
    static constexpr std::array kForms{Form{Emit::llvm_ir, Output::llvm_ir},
                                       Form{Emit::assembly, Output::assembly},
                                       Form{Emit::object, Output::object}};
    return kForms;
  }
  Code compile(const std::string& source, const std::string& label, const Target& target,
               Output output) const override {
    const Target& host = host_target();
    if (target.arch != host.arch || target.features != host.features)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("target {} is not this machine's processor ({}); CPU kernels are "
                              "compiled where they run",
                              target.name(), host.name()));
    return ClangPlugin::instance().compile(source, label, target, output);
  }

  std::string resources_text(const Resources& /*resources*/,
                             std::int64_t block_bytes) const override {
    return fmt::format("registers -, shared memory {} B of scratch a block, spills -", block_bytes);
  }
};

}  // namespace

const Backend& cpu_backend() {
  // Never destroyed: the last threads may ask it while the process ends.
  static const CpuBackend& backend = *new CpuBackend;
  return backend;
}

}  // namespace wyvern::detail
