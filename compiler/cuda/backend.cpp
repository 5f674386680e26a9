#include "compiler/backend.hpp"

#include <fmt/format.h>

#include <array>

#include "compiler/cuda/nvrtc.hpp"
#include "compiler/cuda/targets.hpp"

namespace wyvern::detail {
namespace {

/// Tensors, tensor maps, strides, then the sizes of the launch: WYVERN_PARAMETERS, the entry
/// point's list, and `Params`, a struct of the same, initialized by WYVERN_ARGUMENTS. Maps and
/// sizes are references: the address of a copy would not be a valid descriptor.
std::string parameters(const Template& t) {
  std::string list, members, names;
  const auto add = [&](std::string_view parameter, std::string_view member) {
    list += fmt::format(" {},", parameter);
    members += fmt::format("  {};\n", member);
    names += fmt::format("{},", member.substr(member.rfind(' ')));
  };
  for (const Parameter& p : t.parameters) add(declaration(p), declaration(p));
  for (const TensorMapUse& map : t.tensor_maps)
    add(fmt::format("const __grid_constant__ TensorMap {}", map.name),
        fmt::format("const TensorMap& {}", map.name));
  for (const Parameter& p : t.parameters)
    if (p.strided) add(stride_declaration(p), stride_declaration(p));
  return fmt::format(
      "#define WYVERN_PARAMETERS{} Extents e\n#define WYVERN_ARGUMENTS{} e\n"
      "namespace {{\nstruct Params {{\n{}  const Extents& e;\n}};\n}}  // namespace\n",
      list, names, members);
}

constexpr Dialect kDialect{"device/cuda/types.cuh", "wyvern::cuda", parameters};

class CudaBackend final : public Backend {
 public:
  DeviceKind kind() const override { return DeviceKind::cuda; }

  std::optional<Target> find_target(std::string_view name) const override {
    if (!name.starts_with("sm_")) return {};
    return cuda_target(name);
  }
  std::string target_names(std::string_view wanted) const override {
    return "one of " + nearest_archs(wanted);
  }
  std::string target_name(const Target& target) const override { return target.arch; }
  Target usual_target() const override { return cuda_target("sm_90a"); }

  const Dialect& dialect() const override { return kDialect; }

  void open() const override { Nvrtc::instance(); }
  std::string version() const override { return Nvrtc::instance().version(); }
  std::string identity() const override { return Nvrtc::identity().build; }
  std::vector<std::string> options(const Target& target) const override {
    return nvrtc_options(target, Nvrtc::identity().major);
  }
  /// PTX is not machine code, so it is not Emit::assembly.
  std::span<const Form> forms() const override {
    static constexpr std::array kForms{Form{Emit::ptx, Output::ptx},
                                       Form{Emit::cubin, Output::loadable}};
    return kForms;
  }
  Code compile(const std::string& source, const std::string& label, const Target& target,
               Output output) const override {
    return Nvrtc::instance().compile(source, label, target, output);
  }

  std::string resources_text(const Resources& r, std::int64_t block_bytes) const override {
    return fmt::format("registers {}, shared memory {} B static + {} B dynamic, spills {} B",
                       r.registers, r.shared_bytes, block_bytes, r.spill_bytes);
  }
};

}  // namespace

const Backend& cuda_backend() {
  // Never destroyed: the last threads may ask it while the process ends.
  static const CudaBackend& backend = *new CudaBackend;
  return backend;
}

}  // namespace wyvern::detail
