// The short convolution in front of the recurrence, in float64.
#pragma once

#include <wyvern/reference.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace wyvern {

/// q, k and v of a problem with short_conv as its operator takes them: convolved, and rounded to
/// their dtype; and of a backward pass the gradients in front of the convolution.
class ConvolvedRows {
 public:
  /// `host` has every input of the problem.
  ConvolvedRows(const Problem& problem, const Arguments& host);

  /// `host` with the convolved rows in place of q, k and v; valid while this object is.
  const Arguments& arguments() const { return arguments_; }
  /// Adds final_conv_state or conv_state where the problem has it. The gradients of a backward
  /// pass, of q, k and v as arguments() has them, become those of the rows as they are given, and
  /// those of weights, bias and initial windows are added.
  void finish(Reference& result) const;

 private:
  /// One of q, k and v: its `width` channels, from `channel` on.
  struct Rows {
    TensorView Arguments::* tensor;
    const char* gradient;
    std::int64_t channel, width;
  };
  /// A channel of a sequence.
  struct Line {
    const Rows& rows;
    std::int64_t n, channel, first, length;
  };
  /// The windows of a sequence, by their slots.
  struct Windows {
    std::optional<std::int64_t> from;  ///< nothing: zeros
    std::int64_t column = 0;           ///< the first of them in that slot
    std::optional<std::int64_t> to;    ///< nothing: not written
    /// The row that goes to the first column of `to`, and how many do.
    std::int64_t row = 0, count = 0;
  };

  /// Calls `work` with every channel of every sequence.
  template <class Work>
  void for_each_line(const Rows& rows, const Work& work) const;
  /// Where row t of the line is in a tensor [tokens, width].
  static std::int64_t place(const Line& line, std::int64_t t);
  Windows windows_of(std::int64_t n) const;
  std::vector<std::int64_t> parents_of(std::int64_t n) const;
  /// Adds intermediate_conv_states.
  void keep_drafts(Reference& result) const;
  /// Where a column of the channel is in the tensor with windows, in the window `slot`.
  std::int64_t window_place(const Line& line, std::int64_t slot, std::int64_t column) const;
  /// Row t as it is given; with t < 0 it is of the initial window.
  double given(const Line& line, std::int64_t t) const;
  /// The row that comes before row t in front of a token, in a tree its parent.
  std::int64_t before(std::int64_t n, std::int64_t t) const;
  /// Whether token t of a sequence is none of a tree.
  bool is_null(std::int64_t n, std::int64_t t) const;
  /// Row t behind the weights and in front of the activation.
  double summed(const Line& line, std::int64_t t) const;
  void convolve(const Rows& rows);
  void differentiate(const Rows& rows, Reference& result) const;

  const Problem& p_;
  const Arguments& host_;
  Arguments arguments_;
  std::int64_t channels_, before_;
  std::vector<std::int64_t> offsets_;
  std::vector<Windows> windows_;
  std::vector<std::vector<std::int64_t>> parents_;  ///< of trees, by sequences; -2: a null token
  std::vector<Rows> rows_;
  std::vector<std::vector<unsigned char>> bytes_;
};

}  // namespace wyvern
