#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bitset>

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

/// A tensor's name in messages.
std::string_view shown(std::string_view name, ShownName of) {
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): names are literals, with their NUL
  return of == nullptr ? name : of(name.data());
}

[[noreturn]] void bad(std::string_view name, const std::string& what) {
  throw Error(ErrorKind::kBadInput, fmt::format("{} {}", name, what));
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

/// Rows of a tensor, of tokens or slots: how many its leading dimensions count.
std::int64_t rows_of(const TensorView& tensor, int outer_dims) {
  std::int64_t rows = 1;
  for (int i = 0; i < outer_dims; ++i) rows *= tensor.shape[static_cast<std::size_t>(i)];
  return rows;
}

/// Whether each row, of a token or a slot, is contiguous and the rows are strided as tensor.hpp
/// allows.
bool has_strided_rows(const TensorView& tensor, int outer_dims) {
  constexpr std::int64_t kFarthest = std::int64_t{1} << 40;  // bytes; the limit of a tensor map
  constexpr std::int64_t kMost = std::int64_t{1} << 56;      // bytes, as in bytes_of()
  std::int64_t row = 1;
  for (int i = tensor.rank - 1; i >= outer_dims; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (tensor.shape[at] != 1 && tensor.strides[at] != row) return false;
    row *= tensor.shape[at];
  }
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t stride = row_stride(tensor, outer_dims, row);
  if (stride < row || stride >= kFarthest / size) return false;
  if (stride != row && stride * size % static_cast<std::int64_t>(kTensorAlignment) != 0)
    return false;
  if (rows_of(tensor, outer_dims) > kMost / (stride * size)) return false;
  return outer_dims == 1 || tensor.shape[0] == 1 || tensor.shape[1] == 1 ||
         tensor.strides[0] == tensor.shape[1] * stride;
}

/// Whether the tensor fits its spec; explain() is the slow path that says why not.
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
  return tensor.present() &&
         (contiguous(tensor) ||
          (expected.strided && has_strided_rows(tensor, expected.outer_dims))) &&
         reinterpret_cast<std::uintptr_t>(tensor.data) % kTensorAlignment == 0;
}

/// Where a tensor is in memory.
struct Range {
  std::uintptr_t begin = 0, end = 0;
  /// Of several rows or slots: bytes from one to the next, and of each.
  std::uintptr_t step = 0, width = 0;

  /// Whether a byte is in both. Rows or slots at the same distances may lie between one another.
  bool meets(const Range& other) const {
    if (begin >= other.end || other.begin >= end) return false;
    if (step == 0 || step != other.step) return true;
    const std::uintptr_t apart =
        other.begin >= begin ? (other.begin - begin) % step : step - (begin - other.begin) % step;
    return apart < width || apart + other.width > step;
  }
};

/// Of a tensor of so many bytes, at least one.
Range range_of(const TensorView& tensor, std::uintptr_t bytes, bool strided, int outer_dims) {
  Range range;
  range.begin = reinterpret_cast<std::uintptr_t>(tensor.data);
  range.end = range.begin + bytes;
  const std::int64_t rows = strided ? rows_of(tensor, outer_dims) : 1;
  if (rows == 1) return range;
  std::int64_t row = 1;
  for (int i = outer_dims; i < tensor.rank; ++i) row *= tensor.shape[static_cast<std::size_t>(i)];
  const auto size = static_cast<std::uintptr_t>(size_of(tensor.dtype));
  const std::uintptr_t width = static_cast<std::uintptr_t>(row) * size;
  const std::uintptr_t step =
      static_cast<std::uintptr_t>(row_stride(tensor, outer_dims, row)) * size;
  range.end = range.begin + static_cast<std::uintptr_t>(rows - 1) * step + width;
  range.step = step, range.width = width;
  return range;
}

/// The legal strides of a tensor, for a message.
std::string_view legal_strides(const TensorSpec& expected) {
  if (!expected.strided) return "";
  if (expected.outer_dims == 1)
    return ", or have contiguous slots at equal distances of a multiple of 16 bytes";
  return ", or have contiguous rows of tokens at equal distances of a multiple of 16 bytes";
}

[[noreturn]] void explain(const TensorSpec& expected, const TensorView& tensor,
                          std::string_view name) {
  if (!expected.present)
    bad(name, "was given, but the operator was prepared without it; leave it out");
  const std::string wanted =
      fmt::format("{} {}", to_string(expected.dtype), shape_text(expected.shape, expected.rank));
  if (!tensor.present() && tensor.rank == 0)
    bad(name, fmt::format("is missing; it must be {}", wanted));
  if (tensor.dtype != expected.dtype)
    bad(name, fmt::format("is {}; it must be {}", to_string(tensor.dtype), wanted));
  if (tensor.rank < 0 || tensor.rank > kMaxRank)
    bad(name, fmt::format("has rank {}; it must be {}", tensor.rank, wanted));
  if (tensor.rank != expected.rank ||
      shape_text(tensor.shape, tensor.rank) != shape_text(expected.shape, expected.rank))
    bad(name,
        fmt::format("has shape {}; it must be {}", shape_text(tensor.shape, tensor.rank), wanted));
  if (!tensor.present()) bad(name, fmt::format("has no data; it must be {}", wanted));
  if (!contiguous(tensor) && !(expected.strided && has_strided_rows(tensor, expected.outer_dims)))
    bad(name, fmt::format("has strides {} for shape {}; it must be contiguous{}",
                          shape_text(tensor.strides, tensor.rank),
                          shape_text(tensor.shape, tensor.rank), legal_strides(expected)));
  bad(name, fmt::format("starts at {}; it must be aligned to {} bytes", fmt::ptr(tensor.data),
                        kTensorAlignment));
}

/// Throws unless each range is there once.
void check_order(std::span<const std::int32_t> order) {
  std::bitset<kMaxRanges + 1> seen;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] < 0 || order[i] >= std::ssize(order))
      bad(fmt::format("order[{}]", i),
          fmt::format("is {}; it must be between 0 and {}", order[i], order.size() - 1));
    const auto range = static_cast<std::size_t>(order[i]);
    if (seen[range])
      bad(fmt::format("order[{}]", i),
          fmt::format("is {} again; order has each range once", range));
    seen.set(range);
  }
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

std::size_t bytes_of(const TensorSpec& tensor) {
  // More than any address has, and so little of the type that sums do not overflow.
  constexpr std::size_t kMost = std::size_t{1} << 56;
  const auto* const end = tensor.shape.begin() + tensor.rank;
  if (std::find(tensor.shape.begin(), end, 0) != end) return 0;
  std::size_t bytes = size_of(tensor.dtype);
  for (const auto* dim = tensor.shape.begin(); dim != end; ++dim) {
    if (static_cast<std::size_t>(*dim) > kMost / bytes)
      bad(tensor.name,
          fmt::format("would be {} {}, more than any memory has; give the problem fewer "
                      "sequences or tokens",
                      to_string(tensor.dtype), shape_text(tensor.shape, tensor.rank)));
    bytes *= static_cast<std::size_t>(*dim);
  }
  return bytes;
}

std::array<const TensorView*, kOperatorTensors> tensors_of(const Arguments& a) {
  std::array<const TensorView*, kOperatorTensors> tensors;
  for (std::size_t i = 0; i < kOperatorTensors; ++i) tensors[i] = &(a.*kArguments[i].member);
  return tensors;
}

std::int64_t row_stride(const TensorView& tensor, int outer_dims, std::int64_t dense) {
  if (outer_dims == 1) return tensor.shape[0] > 1 ? tensor.strides[0] : dense;
  if (tensor.shape[0] == 0 || tensor.shape[1] == 0) return dense;
  if (tensor.shape[1] > 1) return tensor.strides[1];
  return tensor.shape[0] > 1 ? tensor.strides[0] : dense;
}

bool OperatorImpl::takes(std::size_t place, const TensorView& tensor) const {
  return fits(expected_[place], tensor);
}

void OperatorImpl::check(std::span<const TensorView* const> tensors, const void* workspace,
                         ShownName shown_name) const {
  for (std::size_t i = 0; i < expected_.size(); ++i)
    if (!fits(expected_[i], *tensors[i]))
      explain(expected_[i], *tensors[i], shown(expected_[i].name, shown_name));
  if (workspace_bytes != 0 &&
      (workspace == nullptr ||
       reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment != 0))
    throw Error(ErrorKind::kBadInput,
                fmt::format("workspace is {}; it must be {} bytes aligned to {}",
                            fmt::ptr(workspace), workspace_bytes, kWorkspaceAlignment));
  check_overlaps(tensors, workspace, shown_name);
}

void OperatorImpl::expect(std::vector<TensorSpec> tensors) {
  expected_ = std::move(tensors);
  bytes_.assign(expected_.size(), 0);
  in_memory_.clear();
  for (const bool written : {true, false}) {
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      const TensorSpec& tensor = expected_[i];
      if (!tensor.present || (tensor.access != TensorAccess::in) != written) continue;
      bytes_[i] = bytes_of(tensor);
      if (bytes_[i] != 0) in_memory_.push_back(i);
    }
    if (written) written_ = in_memory_.size();
  }
}

void OperatorImpl::find_strided() {
  std::vector<bool> dense(expected_.size(), false);
  for (const BoundStep& step : steps)
    for (std::size_t i = 0; i < step.argument_count; ++i) {
      const Binding& binding = step.bindings[i];
      if (binding.from != Binding::From::caller) continue;
      const bool strided = step.source_template->parameters[i].strided;
      expected_[binding.index].strided = strided && !dense[binding.index];
      if (!strided) dense[binding.index] = true;
    }
}

void OperatorImpl::check_overlaps(std::span<const TensorView* const> tensors, const void* workspace,
                                  ShownName shown_name) const {
  std::array<Range, kMaxCallerTensors> ranges;
  const std::size_t count = in_memory_.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = in_memory_[i];
    ranges[i] = range_of(*tensors[at], bytes_[at], expected_[at].strided, expected_[at].outer_dims);
  }
  const auto name = [&](std::size_t i) { return shown(expected_[in_memory_[i]].name, shown_name); };
  const auto begin = reinterpret_cast<std::uintptr_t>(workspace);
  const Range scratch{begin, begin + workspace_bytes};
  for (std::size_t i = 0; i < count && workspace_bytes != 0; ++i)
    if (ranges[i].meets(scratch))
      throw Error(ErrorKind::kBadInput,
                  fmt::format("workspace overlaps {}; its {} bytes must not overlap any tensor",
                              name(i), workspace_bytes));
  for (std::size_t i = 0; i < written_; ++i)
    for (std::size_t j = i + 1; j < count; ++j)
      if (ranges[i].meets(ranges[j]))
        throw Error(
            ErrorKind::kBadInput,
            fmt::format("{} overlaps {}; a tensor that a launch writes must not overlap the "
                        "other tensors",
                        name(i), name(j)));
}

void OperatorImpl::enqueue(std::span<const TensorView* const> tensors, void* workspace,
                           Stream stream, std::size_t first, std::size_t last) const {
  for (std::size_t i = first; i < last; ++i) enqueue(steps[i], tensors, workspace, stream);
}

void OperatorImpl::enqueue(const BoundStep& step, std::span<const TensorView* const> tensors,
                           void* workspace, Stream stream) const {
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
  std::array<std::int64_t, kMaxStrided> strides;
  for (std::size_t i = 0; i < step.strides.size(); ++i) {
    const BoundStride& bound = step.strides[i];
    const Binding& binding = step.bindings[bound.argument];
    strides[i] =
        binding.from == Binding::From::caller
            ? row_stride(*tensors[binding.index], expected_[binding.index].outer_dims, bound.dense)
            : bound.dense;
  }
  for (const auto& [offset, bytes] : step.zeroed)
    device.impl().fill(static_cast<char*>(workspace) + offset, 0, bytes, stream);
  launch(step, {pointers.data(), step.argument_count}, {strides.data(), step.strides.size()},
         stream);
}

void OperatorImpl::launch(const BoundStep& step, std::span<void* const> pointers,
                          std::span<const std::int64_t> strides, Stream stream) const {
  const auto lies_apart = [&](const BoundView& bound) {
    return bound.stride != BoundView::kNone &&
           strides[bound.stride] != step.strides[bound.stride].dense;
  };
  if (std::none_of(step.views.begin(), step.views.end(), lies_apart))
    return step.kernel->launch(step.geometry, pointers, step.maps, strides, step.extents, stream);
  std::array<BoundTensorMap, kMaxTensorMaps> made;
  for (std::size_t i = 0; i < step.maps.size(); ++i) {
    const BoundView& bound = step.views[i];
    made[i] = step.maps[i];
    if (!lies_apart(bound)) continue;
    const auto size = static_cast<std::int64_t>(size_of(bound.dtype));
    made[i].map = device.impl().encode(with_rows_apart(bound.view, strides[bound.stride] * size),
                                       bound.dtype);
  }
  step.kernel->launch(step.geometry, pointers, {made.data(), step.maps.size()}, strides,
                      step.extents, stream);
}

const Problem& Operator::problem() const { return impl_->problem; }
const Plan& Operator::plan() const { return impl_->plan; }
Origin Operator::origin() const { return impl_->origin; }
const std::vector<TensorSpec>& Operator::tensors() const { return impl_->expected(); }
std::size_t Operator::workspace_bytes() const { return impl_->workspace_bytes; }

void Operator::launch(const Arguments& arguments, void* workspace, std::size_t workspace_bytes,
                      Stream stream) const {
  if (workspace_bytes < impl_->workspace_bytes)
    throw Error(ErrorKind::kBadInput, fmt::format("workspace_bytes is {}; it must be at least {}",
                                                  workspace_bytes, impl_->workspace_bytes));
  launch(arguments, workspace, stream);
}

void Operator::launch(const Arguments& arguments, void* workspace, Stream stream) const {
  const auto tensors = tensors_of(arguments);
  impl_->check(tensors, workspace, arguments.shown_name);
  if (impl_->problem.packed) {
    const TensorView& seqlens = *tensors[kSeqlens];
    if (!arguments.cu_seqlens_host.empty())
      validate_seqlens(impl_->problem, arguments.cu_seqlens_host);
    // Kernels read this one, so it is checked where it can be, even with a valid host copy.
    if (impl_->device.impl().host_memory()) validate_seqlens(impl_->problem, seqlens);
  }
  impl_->enqueue(tensors, workspace, stream, 0, impl_->steps.size());
}

void Fold::launch(const FoldArguments& arguments, Stream stream) const {
  const std::array<const TensorView*, 3> tensors{&arguments.summaries, &arguments.order,
                                                 &arguments.states};
  impl_->check(tensors, nullptr);
  if (impl_->device.impl().host_memory())
    check_order({static_cast<const std::int32_t*>(arguments.order.data),
                 static_cast<std::size_t>(options_.ranges)});
  const std::size_t step = arguments.backwards ? 1 : 0;
  impl_->enqueue(tensors, nullptr, stream, step, step + 1);
}

const PlanStep& Stage::step() const { return impl_->plan.front(); }

void Stage::launch(std::span<const TensorView> tensors, Stream stream) const {
  const std::size_t count = impl_->expected().size();  // at most kMaxArguments
  if (tensors.size() != count)
    throw Error(ErrorKind::kBadInput,
                fmt::format("{} tensors were given; {} takes {}", tensors.size(),
                            impl_->steps.front().source_template->id(), count));
  std::array<const TensorView*, kMaxArguments> pointers;
  for (std::size_t i = 0; i < count; ++i) pointers[i] = &tensors[i];
  const std::span<const TensorView* const> given(pointers.data(), count);
  impl_->check(given, nullptr);
  impl_->enqueue(given, nullptr, stream, 0, 1);
}

}  // namespace wyvern
