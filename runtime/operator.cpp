#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <fmt/format.h>

#include <algorithm>

#include "runtime/operator_impl.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

constexpr std::size_t kSeqlens = argument_index("cu_seqlens");

TensorView Arguments::* member_of(std::string_view name) {
  const std::size_t at = argument_index(name);
  if (at < kOperatorTensors) return kArguments[at].member;
  throw Error(ErrorKind::kBadInput,
              fmt::format("'{}' is not the name of an operator's tensor", name));
}

constexpr std::uintptr_t kTensorAlignment = 16;
constexpr std::uintptr_t kWorkspaceAlignment = 256;

template <class Shape>
std::string shape_text(const Shape& shape, int rank) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.begin() + rank, ", "));
}

[[noreturn]] void bad(const TensorSpec& expected, const std::string& what) {
  throw Error(ErrorKind::kBadInput, fmt::format("{} {}", expected.name, what));
}

bool contiguous(const TensorView& tensor) {
  std::int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (tensor.shape[at] != 1 && tensor.strides[at] != stride) return false;
    stride *= tensor.shape[at];
  }
  return true;
}

/// Whether everything is as expected; the slow path that says what is not is explain().
bool fits(const TensorSpec& expected, const TensorView& tensor) {
  if (!expected.present) return !tensor.present();
  if (tensor.dtype != expected.dtype || tensor.rank != expected.rank) return false;
  std::int64_t elements = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (tensor.shape[at] != expected.shape[at]) return false;
    elements *= tensor.shape[at];
  }
  if (elements == 0) return true;
  return tensor.present() && contiguous(tensor) &&
         reinterpret_cast<std::uintptr_t>(tensor.data) % kTensorAlignment == 0;
}

[[noreturn]] void explain(const TensorSpec& expected, const TensorView& tensor) {
  if (!expected.present)
    bad(expected, "was given, but the operator was prepared without it; leave it out");
  const std::string wanted =
      fmt::format("{} {}", to_string(expected.dtype), shape_text(expected.shape, expected.rank));
  if (!tensor.present() && tensor.rank == 0)
    bad(expected, fmt::format("is missing; it must be {}", wanted));
  if (tensor.dtype != expected.dtype)
    bad(expected, fmt::format("is {}; it must be {}", to_string(tensor.dtype), wanted));
  if (tensor.rank != expected.rank ||
      shape_text(tensor.shape, tensor.rank) != shape_text(expected.shape, expected.rank))
    bad(expected,
        fmt::format("has shape {}; it must be {}", shape_text(tensor.shape, tensor.rank), wanted));
  if (!tensor.present()) bad(expected, fmt::format("has no data; it must be {}", wanted));
  if (!contiguous(tensor))
    bad(expected, fmt::format("has strides {} for shape {}; it must be contiguous",
                              shape_text(tensor.strides, tensor.rank),
                              shape_text(tensor.shape, tensor.rank)));
  bad(expected, fmt::format("starts at {}; it must be aligned to {} bytes", fmt::ptr(tensor.data),
                            kTensorAlignment));
}

}  // namespace

std::string_view to_string(Origin origin) noexcept {
  switch (origin) {
    case Origin::exact: return "exact";
    case Origin::nearest: return "nearest";
    case Origin::fallback: return "default";
    case Origin::given: return "given";
  }
  return "?";
}

TensorView& Arguments::tensor(std::string_view name) { return this->*member_of(name); }
const TensorView& Arguments::tensor(std::string_view name) const { return this->*member_of(name); }

std::array<const TensorView*, kOperatorTensors> tensors_of(const Arguments& a) {
  std::array<const TensorView*, kOperatorTensors> tensors;
  for (std::size_t i = 0; i < kOperatorTensors; ++i) tensors[i] = &(a.*kArguments[i].member);
  return tensors;
}

void OperatorImpl::check(std::span<const TensorView* const> tensors, const void* workspace) const {
  if (tensors.size() != expected.size())
    throw Error(ErrorKind::kBadInput,
                fmt::format("{} tensors were given; {} takes {}", tensors.size(),
                            steps.front().source_template->id(), expected.size()));
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (!fits(expected[i], *tensors[i])) explain(expected[i], *tensors[i]);
  if (workspace_bytes != 0 &&
      (workspace == nullptr ||
       reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment != 0))
    throw Error(ErrorKind::kBadInput,
                fmt::format("workspace is {}; it must be {} bytes aligned to {}",
                            fmt::ptr(workspace), workspace_bytes, kWorkspaceAlignment));
}

void OperatorImpl::enqueue(std::span<const TensorView* const> tensors, void* workspace,
                           Stream stream, std::size_t first, std::size_t last) const {
  for (std::size_t i = first; i < last; ++i) {
    const BoundStep& step = steps[i];
    std::array<void*, kMaxArguments> pointers;
    for (std::size_t a = 0; a < step.argument_count; ++a) {
      const Binding& binding = step.bindings[a];
      switch (binding.from) {
        case Binding::From::absent: pointers[a] = nullptr; break;
        case Binding::From::caller: pointers[a] = tensors[binding.index]->data; break;
        case Binding::From::workspace:
          pointers[a] = static_cast<char*>(workspace) + binding.index;
          break;
      }
    }
    for (const auto& [offset, bytes] : step.zeroed)
      device.impl().fill(static_cast<char*>(workspace) + offset, 0, bytes, stream);
    step.kernel->launch(step.geometry, {pointers.data(), step.argument_count}, step.maps,
                        step.extents, stream);
  }
}

const Problem& Operator::problem() const { return impl_->problem; }
const Plan& Operator::plan() const { return impl_->plan; }
Origin Operator::origin() const { return impl_->origin; }
std::size_t Operator::workspace_bytes() const { return impl_->workspace_bytes; }

void Operator::launch(const Arguments& arguments, void* workspace, Stream stream) const {
  const auto tensors = tensors_of(arguments);
  impl_->check(tensors, workspace);
  if (impl_->problem.packed) {
    const TensorView& seqlens = *tensors[kSeqlens];
    if (!arguments.cu_seqlens_host.empty())
      validate_seqlens(impl_->problem, arguments.cu_seqlens_host);
    // Kernels read this one: a good host copy does not excuse it where it can be checked.
    if (impl_->device.impl().host_memory()) validate_seqlens(impl_->problem, seqlens);
  }
  impl_->enqueue(tensors, workspace, stream, 0, impl_->steps.size());
}

const PlanStep& Stage::step() const { return impl_->plan.front(); }

void Stage::launch(std::span<const TensorView> tensors, Stream stream) const {
  std::array<const TensorView*, kMaxArguments> pointers;
  const std::size_t count = std::min(tensors.size(), kMaxArguments);
  for (std::size_t i = 0; i < count; ++i) pointers[i] = &tensors[i];
  const std::span<const TensorView* const> given(pointers.data(), count);
  impl_->check(given, nullptr);
  impl_->enqueue(given, nullptr, stream, 0, 1);
}

}  // namespace wyvern
