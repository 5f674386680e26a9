// The short convolution in front of the recurrence, in float64.
#pragma once

#include <wyvern/reference.hpp>

#include <cstdint>
#include <vector>

namespace wyvern {

/// q, k and v of a problem with short_conv as its operator takes them: convolved, and rounded to
/// their dtype.
class ConvolvedRows {
 public:
  /// `host` has every input of the problem.
  ConvolvedRows(const Problem& problem, const Arguments& host);

  /// `host` with the convolved rows in place of q, k and v; valid while this object is.
  const Arguments& arguments() const { return arguments_; }
  /// Moves final_conv_state to `result` where the problem has it.
  void finish(Reference& result) &&;

 private:
  /// One of q, k and v, which has `width` channels from `channel` on.
  void convolve(TensorView Arguments::* rows, std::int64_t channel, std::int64_t width);

  const Problem& p_;
  const Arguments& host_;
  Arguments arguments_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::vector<unsigned char>> bytes_;
  std::vector<double> windows_;
};

}  // namespace wyvern
