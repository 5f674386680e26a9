// Tunes by the program `wyvern` in a separate process: the tuner's libraries, kernels and crashes
// stay out of the application, which may fork() or end at any time.
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

  /// Runs the program; returns its error message where it tuned nothing. Where a caller waits, its
  /// progress goes to stderr and ^C stops it; in the background it is silent and has its own
  /// process group. It stops when this process ends.
  std::string operator()(const TuneRequest& request) const;

 private:
  const std::string program_;
  const std::filesystem::path cache_folder_;
};

}  // namespace wyvern
