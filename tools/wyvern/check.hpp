// Outputs held against the float64 oracle.
#pragma once

#include <wyvern/reference.hpp>
#include <wyvern/runtime.hpp>

#include <string>
#include <vector>

#include "tools/wyvern/output.hpp"

namespace wyvern::cli {

/// The oracle's answer to one problem; runs on construction, on all cores.
class Oracle {
 public:
  Oracle(const Problem& problem, const Arguments& host);

  /// Compares host outputs: [{"quantity","error","bound","ok"}, ...]. The error of an output with a
  /// NaN or Inf is null.
  Json check(const Arguments& host) const;

 private:
  Problem problem_;
  Reference reference_;
};

bool passed(const Json& checks);

/// What is wrong with the values of an operator's inputs.
struct Doubts {
  std::vector<std::string> not_finite;  ///< a sentence for each input that holds a NaN or infinity
  std::vector<std::string> others;      ///< one for each that is outside what the operator computes
};
Doubts doubts_about(const Problem& problem, const Arguments& host);

/// A table of the checks.
std::string check_text(const Json& checks);

}  // namespace wyvern::cli
