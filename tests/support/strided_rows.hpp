// Launches of operators on tensors with strided rows.
#pragma once

#include "tests/support/runner.hpp"

namespace wyvern::testing {

/// A copy of a tensor [B, T, ...] on the device with strided rows, or with one outer dimension of a
/// pool [slots, ...] with strided slots, and NaNs before, between and after them.
class StridedRows {
 public:
  StridedRows(Device device, const TensorView& dense, int outer_dims = 2);

  TensorView view() const;
  bool is_unchanged() const;
  /// Copies the rows back to the dense tensor; returns whether nothing but rows was written.
  bool copy_back();

 private:
  static constexpr std::size_t kGap = 48, kFront = 32;  // bytes; no tile's or vector's multiple

  std::size_t at(std::size_t row) const { return kFront + row * stride_; }
  std::vector<unsigned char> download(const void* from, std::size_t bytes) const;

  Device device_;
  TensorView dense_;
  int outer_dims_;
  std::size_t size_, rows_, row_bytes_, stride_;  // stride_ in bytes
  std::vector<unsigned char> before_;
  std::shared_ptr<void> memory_;
};

/// The names of the tensors that the operator's plan takes strided, in binding order.
std::vector<std::string> strided_tensors(const Operator& op);
/// The tensors that every plan should take strided: the inputs with a row for each token, `do` too,
/// o where one kernel computes it from them, and a pool of states.
std::vector<std::string> rows_of_tokens(const Operator& op);

/// For run_operator: launches `op` on copies of its strided tensors with NaNs before, between and
/// after their rows, and copies the results back. Records a test failure where one of these NaNs,
/// or an input, was changed.
Launcher launch_strided_rows(const Device& device, const Operator& op);

}  // namespace wyvern::testing
