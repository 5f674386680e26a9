// A space with all its measurements, as a file: searches are replayed on it without the device.
//
// JSON lines, plain or gzip: one of the problem and the covers of its stages, one for each group,
// one for each config that has an outcome. Such a file is complete: it needs no template of this
// build.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include <string>
#include <string_view>

#include "autotune/results.hpp"
#include "autotune/space.hpp"

namespace wyvern {

/// The tuned problem, the device and the date.
struct RecordingHead {
  std::string device;  ///< "cpu", "cuda:0"
  std::string kind;    ///< "cpu", "cuda"
  std::string model, key, driver;
  std::string day;  ///< UTC, "2026-11-22"
  Problem problem;
  unsigned jobs = 1;     ///< threads that compiled
  bool overlap = false;  ///< they did while the device measured
};

struct Recording {
  RecordingHead head;
  SearchSpace space;  ///< configs with an outcome; without the constants of groups
  Results results;
};

/// The file's text, not compressed. Samples have five digits; unjudged outcomes are left out.
std::string recording_text(const RecordingHead& head, const SearchSpace& space,
                           const Results& results);

/// Takes gzip data too. Throws Error(kBadInput) that names the line and its fault.
Recording recording_from(std::string_view data);

}  // namespace wyvern
