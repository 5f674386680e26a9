// Tuning by the program `wyvern`, in a process of its own: the tuner's libraries, kernels and
// crashes stay out of the application, which may fork() or end at any time.
#pragma once

#include <filesystem>
#include <string>

#include "runtime/tuning_policy.hpp"

namespace wyvern {

/// `wyvern tune PROBLEM`, as a TuneFunction. Immutable; thread-safe.
class TunerCommand {
 public:
  /// `program` is a path, or a name on PATH; empty: the program beside this library, else `wyvern`
  /// on PATH. The winner goes to the cache in `cache_folder`.
  TunerCommand(const std::string& program, std::filesystem::path cache_folder);

  /// Returns the program's error message where it tuned nothing. Its progress goes to stderr where
  /// a caller waits for it, and ^C then stops it; in the background it is silent, and in a process
  /// group of its own. It stops where this process ends.
  std::string operator()(const TuneRequest& request) const;

 private:
  const std::string program_;
  const std::filesystem::path cache_folder_;
};

}  // namespace wyvern
