// A prepared plan: kernels, launch geometry, and the origin of every kernel's pointers.
#pragma once

#include <wyvern/runtime.hpp>

#include <algorithm>
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
/// The most ranges of a fold.
inline constexpr std::int64_t kMaxRanges = 65535;
/// The most tensors of an operator or of a stage.
inline constexpr std::size_t kMaxCallerTensors = std::max(kOperatorTensors, kMaxArguments);

/// Where one pointer of a kernel comes from.
struct Binding {
  enum class From : std::uint8_t { absent, caller, workspace };
  From from = From::absent;
  std::size_t index = 0;  ///< caller: index among the caller's tensors; workspace: byte offset
};

/// A strided tensor of a kernel, in the order of its parameters.
struct BoundStride {
  std::size_t argument = 0;  ///< which parameter
  std::int64_t dense = 0;    ///< the stride of the dense tensor, in elements
};

/// The view from which a launch encodes a new tensor map for a tensor with strided rows.
struct BoundView {
  static constexpr std::size_t kNone = ~std::size_t{0};
  TiledView view;
  DType dtype = DType::fp32;
  std::size_t stride = kNone;  ///< index among the step's strides
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
  std::vector<BoundView> views;      ///< one for each map
  std::vector<BoundStride> strides;
  /// Ranges of the workspace (offset, bytes) that the launch zeros before the kernel.
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
  std::size_t workspace_bytes = 0;

  explicit OperatorImpl(Device on) : device(std::move(on)) {}

  /// The caller's tensors, in binding order.
  const std::vector<TensorSpec>& expected() const { return expected_; }
  /// Throws Error(kBadInput) for a tensor that is larger than any memory.
  void expect(std::vector<TensorSpec> tensors);
  /// Sets `strided` of each expected tensor where all steps that use it accept it strided. Needs
  /// complete bindings.
  void find_strided();

  /// Whether check() accepts this tensor at index `place`, independent of the others.
  bool takes(std::size_t place, const TensorView& tensor) const;
  /// Throws Error(kBadInput) for the first of the caller's tensors that does not fit its spec, for
  /// a workspace that is not aligned, and where a tensor that the launch writes shares memory with
  /// another tensor or the workspace. `workspace` has workspace_bytes. Takes nanoseconds.
  void check(std::span<const TensorView* const> tensors, const void* workspace,
             ShownName shown_name = nullptr) const;
  /// Enqueues steps [first, last) without checks.
  void enqueue(std::span<const TensorView* const> tensors, void* workspace, Stream stream,
               std::size_t first, std::size_t last) const;

 private:
  void check_overlaps(std::span<const TensorView* const> tensors, const void* workspace,
                      ShownName shown_name) const;
  void enqueue(const BoundStep& step, std::span<const TensorView* const> tensors, void* workspace,
               Stream stream) const;
  /// Uses the step's own tensor maps, except for tensors with strided rows.
  void launch(const BoundStep& step, std::span<void* const> pointers,
              std::span<const std::int64_t> strides, Stream stream) const;

  std::vector<TensorSpec> expected_;
  /// Bytes of each tensor; and the indices of the tensors in memory, written ones first.
  std::vector<std::size_t> bytes_, in_memory_;
  std::size_t written_ = 0;  ///< how many of in_memory_ are written
};

/// A tensor's bytes. Throws Error(kBadInput) that names it where they exceed any memory.
std::size_t bytes_of(const TensorSpec& tensor);

/// The stride in elements between rows of tokens of [B, T, ...], or with one outer dimension
/// between slots; `dense` where there is only one row or slot.
std::int64_t row_stride(const TensorView& tensor, int outer_dims, std::int64_t dense);

/// The tensors of Arguments in binding order, the order of tensor_specs().
std::array<const TensorView*, kOperatorTensors> tensors_of(const Arguments& arguments);

}  // namespace wyvern
