// Tensors to try a problem on: random and sane, on the device and, for checks, on the host.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

namespace wyvern {

/// A problem small enough to check against the oracle, compiled to the same kernels: a few chunks
/// and a remainder of even the largest chunk size, and for a packed batch an empty sequence. Where
/// scans are split every `segment` tokens, a sequence of several segments.
Problem reduced(const Problem& problem, std::int64_t segment = 0);

/// Default offsets of a packed problem's N sequences over its T tokens: uneven, the second sequence
/// empty where there are three or more; with seqlens_hint the first one as long as
/// longest_sequence(). Same seed, same offsets.
std::vector<std::int64_t> uneven_offsets(const Problem& problem, std::uint64_t seed);

/// Factor on the gates that ProblemTensors draws for slow decay: states decay over thousands of
/// tokens, with a factor of 1 (fast decay) over about a hundred.
constexpr float kSlowDecay = 0.001F;

/// Whether kernels may skip work where states decay fast: with gates, in passes over many tokens.
bool gates_matter(const Problem& problem);

/// Bytes of the tensors that a problem's launch reads and writes.
struct TensorBytes {
  std::uint64_t all = 0, outputs = 0, largest = 0;
};
/// Throws Error(kBadInput) where a tensor is larger than any memory.
TensorBytes tensor_bytes(const Problem& problem);

/// Throws Error(kUnavailable), with the bytes that are needed and available, unless `on_host` bytes
/// are free in the host's memory and the device's is `on_device` bytes large; both together if they
/// are the same memory. Call it before anything large is allocated.
void check_memory(const Device& device, const Problem& problem, std::uint64_t on_host,
                  std::uint64_t on_device);

/// The tensors of one problem. Rows of k have length 1, beta is in (0, 1) or logits, g in [-0.5, 0]
/// or raw gate inputs, or `gates` times that; past some megabytes the rows of a tensor repeat. Same
/// seed, same values.
class ProblemTensors {
 public:
  /// Without `keep_host` there is no host copy, and host() and fetch() must not be called.
  /// `cu_seqlens`: the offsets of a packed problem; empty: uneven_offsets(). Throws, before
  /// anything is allocated, Error(kBadInput) where a tensor is larger than any memory,
  /// Error(kUnavailable) where the host has too little memory for its copies.
  ProblemTensors(const Device& device, const Problem& problem, std::uint64_t seed, bool keep_host,
                 float gates = 1, std::vector<std::int64_t> cu_seqlens = {});

  const Problem& problem() const { return problem_; }
  const Arguments& device() const { return device_arguments_; }
  /// The same with other gates, multiplied by `gates`. Lives as long as this.
  Arguments with_gates(float gates, std::uint64_t seed);
  /// The inputs again, in host memory; outputs are where fetch() puts them.
  const Arguments& host() const { return host_arguments_; }

  /// Fills the intermediates that the backward pass of a problem with disable_recompute reads, by a
  /// forward pass, or the maps of segments that a forward pass takes, by a summary.
  void keep(Runtime& runtime);

  /// Fills the outputs with bytes that are NaN in every dtype, and restores the first content of
  /// tensors that are both read and written (where there is a host copy).
  void poison() const;
  /// Copies the outputs to host().
  void fetch() const;

 private:
  using Bytes = std::vector<unsigned char>;
  class Source;
  Bytes content_of(const TensorSpec& spec, float gates, Source& source) const;
  TensorView placed(const TensorSpec& spec, const Bytes& content);
  void add(const TensorSpec& spec, Bytes content);
  /// Runs a problem whose outputs but `output` are inputs of this one.
  void run_before(Runtime& runtime, const Problem& problem, std::string_view output);

  Device on_;
  Problem problem_;
  bool keep_host_;
  std::vector<TensorSpec> specs_;  ///< of present tensors
  Arguments device_arguments_, host_arguments_;
  std::vector<std::shared_ptr<void>> device_memory_;
  std::vector<Bytes> host_memory_;
  std::map<std::string_view, Bytes> originals_;  ///< of tensors both read and written
  std::vector<std::int64_t> cu_seqlens_;
};

}  // namespace wyvern
