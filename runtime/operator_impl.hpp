// A prepared plan: kernels, launch geometry and where every kernel's pointers come from.
#pragma once

#include <wyvern/runtime.hpp>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/arguments.hpp"
#include "runtime/devices/device_impl.hpp"
#include "templates/template.hpp"

namespace wyvern {

inline constexpr std::size_t kMaxArguments = 32;

/// Where one pointer of a kernel comes from.
struct Binding {
  enum class From : std::uint8_t { absent, caller, workspace };
  From from = From::absent;
  std::size_t index = 0;  ///< caller: index among the caller's tensors; workspace: byte offset
};

/// One kernel of the plan, ready to launch.
struct BoundStep {
  const Template* source_template = nullptr;
  PlanStep step;
  Constants constants;
  std::string artifact_key;
  Resources resources;
  Geometry geometry;
  Extents extents;
  std::size_t argument_count = 0;
  std::array<Binding, kMaxArguments> bindings{};
  std::vector<BoundTensorMap> maps;  ///< the template's tensor maps; none where the grid is empty
  /// Runs of the workspace, as offset and bytes, that are zeros when the kernel starts.
  std::vector<std::pair<std::size_t, std::size_t>> zeroed;
  std::shared_ptr<const Kernel> kernel;
};

/// Immutable once built; shared by the copies of an Operator or Stage.
class OperatorImpl {
 public:
  Device device;
  Problem problem;
  Plan plan;
  Origin origin = Origin::fallback;
  std::vector<BoundStep> steps;
  std::vector<TensorSpec> expected;  ///< the caller's tensors, in binding order
  std::size_t workspace_bytes = 0;

  explicit OperatorImpl(Device on) : device(std::move(on)) {}

  /// Throws Error(kBadInput) for the first of the caller's tensors that is not what is expected.
  void check(std::span<const TensorView* const> tensors, const void* workspace) const;
  /// Enqueues steps [first, last) without checks.
  void enqueue(std::span<const TensorView* const> tensors, void* workspace, Stream stream,
               std::size_t first, std::size_t last) const;
};

/// The tensors of Arguments in binding order, that of tensor_specs().
std::array<const TensorView*, kOperatorTensors> tensors_of(const Arguments& arguments);

}  // namespace wyvern
