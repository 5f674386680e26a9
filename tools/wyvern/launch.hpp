// The tensors of a launch: on the host by name, and their copies on a device.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/runtime.hpp>

#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "tools/wyvern/safetensors.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

inline constexpr unsigned char kPoison = 0xFF;  // NaN as fp32, fp16 and bf16

/// The tensors that the problem's pass writes, on the host: outputs with every byte poisoned,
/// tensors both read and written as a copy of the input.
Tensors make_outputs(const Problem& problem, const Tensors& inputs);

/// Views of the tensors that the problem reads, `state` of the recurrent pass included.
Arguments host_inputs(const Selection& selection, const Tensors& inputs);

/// Views of all tensors of a launch; tensors both read and written come from `outputs`.
Arguments host_arguments(const Selection& selection, const Tensors& inputs, const Tensors& outputs);

/// Copies of a launch's tensors on a device.
class DeviceArguments {
 public:
  /// Copies in the tensors that the problem reads. The host tensors must outlive this object.
  DeviceArguments(const Device& device, const Problem& problem, const Arguments& host);

  const Arguments& arguments() const { return device_; }
  /// Fills the outputs with NaN patterns, and restores the first content of tensors both read and
  /// written.
  void poison() const;
  /// Copies the pass's results to the host tensors.
  void fetch_outputs() const;

 private:
  Device on_;
  std::vector<TensorSpec> specs_;  ///< of present tensors
  Arguments host_, device_;
  std::vector<std::shared_ptr<void>> memory_;
  std::map<std::string_view, std::vector<unsigned char>>
      originals_;  ///< of tensors both read and written
};

/// Adds to the inputs the intermediates that the backward pass of a problem with disable_recompute
/// reads, by a forward pass on the device. Does nothing for other problems.
void add_kept(Runtime& runtime, const Device& device, const Selection& selection, Tensors& inputs);

}  // namespace wyvern::cli
