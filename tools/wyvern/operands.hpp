// From tensors of a file to a problem and to the arguments of a launch.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/runtime.hpp>

#include <memory>
#include <string>
#include <vector>

#include "tools/wyvern/safetensors.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

/// Reads shapes and dtypes off the tensors and lays the options over them. Needs q, k, v, beta and g
/// (and A_log with use_gate_in_kernel); initial_state, cu_seqlens and dt_bias are optional. Throws
/// Error(kBadInput) that names the tensor, what it is and what it must be.
Selection infer(const std::string& op, const Tensors& tensors, const OptionFlags& options);

/// Outputs of the problem on the host, every byte poisoned (NaN in every dtype).
Tensors make_outputs(const Problem& problem);

/// Views of host tensors, by name; those that the problem does not use are left out.
Arguments host_arguments(const Selection& selection, const Tensors& inputs, const Tensors& outputs);

/// Copies of a launch's tensors on a device.
class DeviceArguments {
 public:
  DeviceArguments(const Device& device, const Arguments& host);

  const Arguments& arguments() const { return device_; }
  /// Fills the outputs with NaN patterns.
  void poison() const;
  /// Copies the outputs back to the host tensors.
  void fetch_outputs() const;

 private:
  Device on_;
  Arguments host_, device_;
  std::vector<std::shared_ptr<void>> memory_;
};

inline constexpr unsigned char kPoison = 0xFF;  // NaN as fp32, fp16 and bf16

}  // namespace wyvern::cli
