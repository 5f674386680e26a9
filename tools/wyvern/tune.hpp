// Shared by the ways to tune: one problem, a manifest of many, a replay of recordings.
#pragma once

#include <wyvern/runtime.hpp>

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "autotune/tuner.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

struct TuneFlags {
  SelectionFlags selection;
  OptionFlags options;
  std::optional<std::string> device, problem;
  std::string budget = "60s";
  std::string jobs = "0";
  bool force = false;
  bool exhaustive = false;
  std::optional<std::string> record;
  std::vector<std::string> replay;
  std::string seeds = "20";
  std::optional<std::string> manifest, shard, within;
  std::optional<std::string> parent;
  bool missing = false;
};

/// While it lives SIGINT asks tunings to stop; a second one ends the program at once.
class StopOnInterrupt {
 public:
  StopOnInterrupt();
  ~StopOnInterrupt();
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;
  static bool asked();

 private:
  struct sigaction before_{};
};

/// The flags as TuneOptions; the worker is this program. Throws Error(kBadInput).
TuneOptions tune_options(const TuneFlags& flags);

/// The document of one tuning.
Json tune_document(const Device& device, const Problem& problem, const TuneResult& result,
                   const std::string& cache);

/// The calls that the options leave out, in a line for each reason that begins with `where`.
void say_left_out(std::string_view where, const std::vector<LeftOutCall>& calls);
/// Each as {"call": .., "reason": ..}.
Json left_out_json(const std::vector<LeftOutCall>& calls);

/// --replay: searches on recordings, instead of on a device.
int replay_recordings(const TuneFlags& flags, bool json);

/// --manifest: every problem of a file, or of a shard of it, on one device or on all GPUs.
int tune_manifest(const TuneFlags& flags, bool json);

}  // namespace wyvern::cli
