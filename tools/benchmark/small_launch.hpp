// A launch whose kernels take next to nothing, for what is measured around kernels.
#pragma once

#include <wyvern/runtime.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/devices/device_impl.hpp"

namespace wyvern::benchmarks {

/// A first prefill or a training step's backward pass of transformers' qwen3-next-80b in bf16, with
/// one chunk of tokens.
inline Problem small_problem(Pass pass = Pass::forward) {
  Problem problem;
  problem.pass = pass;
  problem.T = 64;
  problem.H = 16;
  problem.HV = 32;
  problem.use_qk_l2norm = true;
  problem.output_final_state = pass != Pass::backward;
  return problem;
}

/// Memory of a problem's tensors and of a workspace; what is in it does not matter here but for
/// being finite.
class Launch {
 public:
  Launch(const Device& device, const Problem& problem, std::size_t workspace_bytes)
      : workspace_(device.allocate(workspace_bytes)) {
    for (const TensorSpec& spec : tensor_specs(problem)) {
      if (!spec.present) continue;
      std::size_t bytes = size_of(spec.dtype);
      for (int i = 0; i < spec.rank; ++i)
        bytes *= static_cast<std::size_t>(spec.shape[static_cast<std::size_t>(i)]);
      memory_.push_back(device.allocate(bytes));
      // Any byte gives small numbers; 0xBC small negative ones, as a gate is.
      device.fill(memory_.back().get(), spec.name == "g" ? 0xBC : 0x3C, bytes);
      TensorView& view = arguments_.tensor(spec.name);
      view.data = memory_.back().get();
      view.dtype = spec.dtype;
      view.rank = spec.rank;
      view.shape = spec.shape;
      std::int64_t stride = 1;
      for (int i = spec.rank - 1; i >= 0; --i) {
        const auto at = static_cast<std::size_t>(i);
        view.strides[at] = stride;
        stride *= spec.shape[at];
      }
    }
    device.synchronize();
  }
  void run(const Operator& op) const { op.launch(arguments_, workspace_.get()); }

 private:
  std::shared_ptr<void> workspace_;
  std::vector<std::shared_ptr<void>> memory_;
  Arguments arguments_;
};

}  // namespace wyvern::benchmarks
