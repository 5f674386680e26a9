#include "tools/wyvern/launch.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "runtime/plan.hpp"

namespace wyvern::cli {
namespace {

std::vector<TensorSpec> present_specs(const Problem& problem) {
  std::vector<TensorSpec> specs = tensor_specs(problem);
  std::erase_if(specs, [](const TensorSpec& spec) { return !spec.present; });
  return specs;
}

std::size_t bytes_of(const TensorView& view) {
  return static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
}

}  // namespace

Tensors make_outputs(const Problem& problem, const Tensors& inputs) {
  Tensors outputs;
  for (const TensorSpec& spec : present_specs(problem)) {
    if (spec.access == TensorAccess::in) continue;
    const std::string name(spec.name);
    HostTensor tensor =
        HostTensor::make(spec.dtype, {spec.shape.begin(), spec.shape.begin() + spec.rank});
    if (spec.access == TensorAccess::inout)
      std::memcpy(tensor.data.get(), inputs.at(name).data.get(), tensor.bytes());
    else
      std::memset(tensor.data.get(), kPoison, tensor.bytes());
    outputs[name] = std::move(tensor);
  }
  return outputs;
}

Arguments host_inputs(const Selection& selection, const Tensors& inputs) {
  Arguments arguments;
  for (const TensorSpec& spec : present_specs(selection.problem))
    if (spec.access != TensorAccess::out)
      arguments.tensor(spec.name) = inputs.at(std::string(spec.name)).view();
  if (selection.problem.packed) arguments.cu_seqlens_host = selection.cu_seqlens;
  return arguments;
}

Arguments host_arguments(const Selection& selection, const Tensors& inputs,
                         const Tensors& outputs) {
  Arguments arguments = host_inputs(selection, inputs);
  for (const auto& [name, tensor] : outputs) arguments.tensor(name) = tensor.view();
  return arguments;
}

DeviceArguments::DeviceArguments(const Device& device, const Problem& problem,
                                 const Arguments& host)
    : on_(device), specs_(present_specs(problem)), host_(host), device_(host) {
  for (const TensorSpec& spec : specs_) {
    const TensorView& from = host_.tensor(spec.name);
    TensorView& to = device_.tensor(spec.name);
    const std::size_t bytes = bytes_of(from);
    memory_.push_back(on_.allocate(std::max<std::size_t>(bytes, 1)));
    to.data = memory_.back().get();
    if (spec.access == TensorAccess::out || bytes == 0) continue;
    on_.copy_in(to.data, from.data, bytes);
    if (spec.access != TensorAccess::inout) continue;
    const auto* content = static_cast<const unsigned char*>(from.data);
    originals_.emplace(spec.name, std::vector<unsigned char>(content, content + bytes));
  }
}

void DeviceArguments::poison() const {
  for (const TensorSpec& spec : specs_) {
    const TensorView& view = device_.tensor(spec.name);
    if (spec.access == TensorAccess::out && bytes_of(view) > 0)
      on_.fill(view.data, kPoison, bytes_of(view));
  }
  for (const auto& [name, content] : originals_)
    on_.copy_in(device_.tensor(name).data, content.data(), content.size());
}

void DeviceArguments::fetch_outputs() const {
  for (const TensorSpec& spec : specs_) {
    const TensorView& view = device_.tensor(spec.name);
    if (spec.access != TensorAccess::in && bytes_of(view) > 0)
      on_.copy_out(host_.tensor(spec.name).data, view.data, bytes_of(view));
  }
}

void add_kept(Runtime& runtime, const Device& device, const Selection& selection, Tensors& inputs) {
  const Problem& problem = selection.problem;
  const bool takes_segments = problem.segment_chunks && !problem.summary;
  if (!takes_segments && !(problem.pass == Pass::backward && problem.disable_recompute)) return;
  Selection forward = selection;
  if (takes_segments) forward.problem = summary_of(problem);
  forward.problem.pass = Pass::forward;
  forward.problem.output_final_state = false;
  const Tensors outputs = make_outputs(forward.problem, inputs);
  const Operator op = runtime.prepare(device, forward.problem);
  const DeviceArguments placed(device, forward.problem, host_arguments(forward, inputs, outputs));
  const std::shared_ptr<void> workspace = device.allocate(op.workspace_bytes());
  op.launch(placed.arguments(), workspace.get());
  device.synchronize();
  placed.fetch_outputs();
  for (const auto& [name, tensor] : outputs)
    if (name != "o" && name != "summary") inputs[name] = tensor;
}

}  // namespace wyvern::cli
