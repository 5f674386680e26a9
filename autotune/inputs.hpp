// Tensors to try a problem on: random and sane, on the device and, for checks, on the host.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace wyvern {

/// A problem small enough to check against the oracle, compiled to the same kernels: a few chunks
/// and a remainder of even the largest chunk size, and for a packed batch an empty sequence.
Problem reduced(const Problem& problem);

/// The tensors of one problem. Rows of k have length 1, beta is in (0, 1) or logits, g in [-0.5, 0]
/// or raw gate inputs; past some megabytes the rows of a tensor repeat. Same seed, same values.
class ProblemTensors {
 public:
  /// Without `keep_host` there is no host copy, and host() and fetch() are not to be used.
  ProblemTensors(const Device& device, const Problem& problem, std::uint64_t seed,
                 bool keep_host);

  const Problem& problem() const { return problem_; }
  const Arguments& device() const { return device_arguments_; }
  /// The inputs again, in host memory; o and final_state are where fetch() puts them.
  const Arguments& host() const { return host_arguments_; }

  /// Fills the outputs with bytes that are NaN in every dtype.
  void poison() const;
  /// Copies the outputs to host().
  void fetch() const;

 private:
  TensorView add(DType dtype, std::initializer_list<std::int64_t> shape,
                 std::vector<unsigned char> content, TensorView& host);

  Device on_;
  Problem problem_;
  bool keep_host_;
  Arguments device_arguments_, host_arguments_;
  std::vector<std::shared_ptr<void>> device_memory_;
  std::vector<std::vector<unsigned char>> host_memory_;
  std::vector<std::int64_t> cu_seqlens_;
};

}  // namespace wyvern
