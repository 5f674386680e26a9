#include "tests/support/strided_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "runtime/operators/operator.hpp"

namespace wyvern::testing {
StridedRows::StridedRows(Device device, const TensorView& dense, int outer_dims)
    : device_(std::move(device)),
      dense_(dense),
      outer_dims_(outer_dims),
      size_(size_of(dense.dtype)),
      rows_(static_cast<std::size_t>(dense.shape[0] * (outer_dims == 1 ? 1 : dense.shape[1]))),
      row_bytes_(rows_ == 0 ? 0 : dense.elements() / rows_ * size_),
      stride_((row_bytes_ + 15) / 16 * 16 + kGap),
      before_(kFront + rows_ * stride_, kNanPoison) {
  const std::vector<unsigned char> content = download(dense.data, rows_ * row_bytes_);
  for (std::size_t r = 0; r < rows_; ++r)
    std::copy_n(content.begin() + r * row_bytes_, row_bytes_, before_.begin() + at(r));
  memory_ = device_.allocate(before_.size());
  device_.copy_in(memory_.get(), before_.data(), before_.size());
}

TensorView StridedRows::view() const {
  TensorView view = dense_;
  view.data = static_cast<unsigned char*>(memory_.get()) + kFront;
  const auto stride = static_cast<std::int64_t>(stride_ / size_);
  if (outer_dims_ == 1) {
    view.strides[0] = stride;
    return view;
  }
  view.strides[0] = view.shape[1] * stride;
  view.strides[1] = view.shape[1] == 1 ? 7 : stride;  // of one token any
  return view;
}

bool StridedRows::is_unchanged() const {
  return download(memory_.get(), before_.size()) == before_;
}

bool StridedRows::copy_back() {
  std::vector<unsigned char> now = download(memory_.get(), before_.size());
  std::vector<unsigned char> content(rows_ * row_bytes_);
  for (std::size_t r = 0; r < rows_; ++r) {
    const auto row = now.begin() + at(r);
    std::copy_n(row, row_bytes_, content.begin() + r * row_bytes_);
    std::fill_n(row, row_bytes_, kNanPoison);
  }
  device_.copy_in(dense_.data, content.data(), content.size());
  return std::count(now.begin(), now.end(), kNanPoison) == std::ssize(now);
}

std::vector<unsigned char> StridedRows::download(const void* from, std::size_t bytes) const {
  std::vector<unsigned char> content(bytes);
  device_.copy_out(content.data(), from, bytes);
  return content;
}

std::vector<std::string> strided_tensors(const Operator& op) {
  std::vector<std::string> names;
  for (const TensorSpec& spec : op.tensors())
    if (spec.strided) names.emplace_back(spec.name);
  return names;
}

std::vector<std::string> rows_of_tokens(const Operator& op) {
  const auto makes_output = [](const PlanStep& step) {
    return step.template_id.starts_with("fwd_o.") || step.template_id.starts_with("kda_fwd_o.");
  };
  const bool dense_output =
      !op.problem().output_norm && std::any_of(op.plan().begin(), op.plan().end(), makes_output);
  const OperatorDefinition& definition = definition_of(op.problem());
  std::vector<std::string> names;
  for (const TensorSpec& spec : tensor_specs(op.problem())) {
    if (!spec.present || (dense_output && spec.name == "o")) continue;
    const bool of_rows = spec.name == "dq" || spec.name == "dk" || spec.name == "dv";
    if (definition.rule(spec.name).strided || (of_rows && op.problem().short_conv))
      names.emplace_back(spec.name);
  }
  return names;
}

Launcher launch_strided_rows(const Device& device, const Operator& op) {
  return [device, op](const Arguments& dense, void* workspace) {
    Arguments arguments = dense;
    std::vector<std::pair<const TensorSpec*, StridedRows>> apart;
    for (const TensorSpec& spec : op.tensors()) {
      if (!spec.strided) continue;
      apart.emplace_back(&spec, StridedRows(device, dense.tensor(spec.name), spec.outer_dims));
      arguments.tensor(spec.name) = apart.back().second.view();
    }
    op.launch(arguments, workspace);
    device.synchronize();
    for (auto& [spec, rows] : apart) {
      if (spec->access == TensorAccess::in)
        EXPECT_TRUE(rows.is_unchanged()) << spec->name << " was changed";
      else
        EXPECT_TRUE(rows.copy_back()) << spec->name << " was written between its rows";
    }
  };
}

}  // namespace wyvern::testing
