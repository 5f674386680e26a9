// Tensors and launches of operators for tests.
#pragma once

#include <wyvern/runtime.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace wyvern::testing {

/// An operator's tensors and workspace in its device's memory; tensors are zeros.
class LaunchMemory {
 public:
  LaunchMemory(const Device& device, const Operator& op) {
    for (const TensorSpec& spec : op.tensors()) {
      if (!spec.present) continue;
      TensorView view;
      view.dtype = spec.dtype;
      view.rank = spec.rank;
      view.shape = spec.shape;
      std::int64_t stride = 1;
      for (int i = spec.rank; i-- > 0;) {
        view.strides[static_cast<std::size_t>(i)] = stride;
        stride *= spec.shape[static_cast<std::size_t>(i)];
      }
      const std::size_t bytes = static_cast<std::size_t>(stride) * size_of(spec.dtype);
      std::shared_ptr<void> memory = device.allocate(bytes);
      device.fill(memory.get(), 0, bytes);
      view.data = memory.get();
      arguments.tensor(spec.name) = view;
      tensors.push_back({spec, std::move(memory), bytes});
    }
    workspace = device.allocate(std::max<std::size_t>(op.workspace_bytes(), 1));
  }

  struct Tensor {
    TensorSpec spec;
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
  };
  std::vector<Tensor> tensors;  ///< the problem's tensors
  std::shared_ptr<void> workspace;
  Arguments arguments;
};

}  // namespace wyvern::testing
