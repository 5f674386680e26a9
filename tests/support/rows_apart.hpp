// Launches of operators on tensors whose rows of tokens lie apart.
#pragma once

#include "tests/support/runner.hpp"

namespace wyvern::testing {

/// A copy of a tensor [B, T, ...] on the device, its rows apart and NaNs before, between and after
/// them.
class RowsApart {
 public:
  RowsApart(Device device, const TensorView& dense);

  TensorView view() const;
  bool is_unchanged() const;
  /// The rows go where they came from; whether nothing but rows was written.
  bool bring_back();

 private:
  static constexpr std::size_t kGap = 48, kFront = 32;  // bytes; no tile's or vector's multiple

  std::size_t at(std::size_t row) const { return kFront + row * stride_; }
  std::vector<unsigned char> download(const void* from, std::size_t bytes) const;

  Device device_;
  TensorView dense_;
  std::size_t size_, rows_, row_bytes_, stride_;  // stride_ in bytes
  std::vector<unsigned char> before_;
  std::shared_ptr<void> memory_;
};

/// The names of what the operator's plan takes strided, in binding order.
std::vector<std::string> strided_tensors(const Operator& op);
/// What it should take strided, whatever the plan: the inputs with a row for each token, `do` too,
/// and o where one kernel makes it of them.
std::vector<std::string> rows_of_tokens(const Operator& op);

/// For run_operator: launches `op` on copies of its strided tensors with NaNs before, between and
/// after their rows, and brings back what was written. Records a test failure where one of these
/// NaNs, or an input, was changed.
Launcher launch_rows_apart(const Device& device, const Operator& op);

}  // namespace wyvern::testing
