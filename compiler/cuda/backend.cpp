#include "compiler/backend.hpp"

#include <fmt/format.h>

#include <array>

#include "compiler/cuda/nvrtc.hpp"
#include "compiler/cuda/targets.hpp"

namespace wyvern::detail {
namespace {

/// Tensors, maps of tensors, strides, then the sizes of the launch.
std::string parameters(const Template& t) {
  std::string text = "#define WYVERN_PARAMETERS";
  for (const Parameter& p : t.parameters) text += fmt::format(" {},", declaration(p));
  for (const TensorMapUse& map : t.tensor_maps)
    text += fmt::format(" const __grid_constant__ TensorMap {},", map.name);
  for (const Parameter& p : t.parameters)
    if (p.strided) text += fmt::format(" {},", stride_declaration(p));
  return text + " Extents e\n";
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
