// The tuner: finds the fastest correct plan for a problem on a device and stores it as the winner.
//
// Every candidate is compiled here, but run and timed in a worker process (worker.hpp): a crash or
// hang is one row with that status. Rows are stored at once, so an interrupted tuning resumes.
#pragma once

#include <wyvern/runtime.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace wyvern {

class Results;
struct SearchSpace;

/// Where a tuning stands; reported from the thread that called tune(), after each candidate.
struct TuneProgress {
  enum class Phase : std::uint8_t {
    searching,  ///< candidates, the promising first
    sweeping,   ///< every remaining config, since the budget allows it
    racing,     ///< near-ties once more, in turn
    comparing,  ///< whole operators
  };
  Phase phase = Phase::searching;
  std::int64_t done = 0;   ///< candidates decided so far
  std::int64_t total = 0;  ///< candidates found so far; grows during the search
  double elapsed_s = 0;
  double remaining_s = 0;  ///< estimate, at most the rest of the budget
  double best_us = 0;      ///< sum of the best plan's steps so far; 0 before the first
  std::string candidate;   ///< "fwd_h.portable BT=64,..."; empty while comparing
  std::string status;      ///< the candidate's, as in MeasurementRow
};

struct TuneOptions {
  /// For the whole tuning. When it is spent the best plan so far is compared, stored and returned.
  std::chrono::duration<double> budget = std::chrono::seconds(60);
  unsigned jobs = 0;   ///< threads that compile; 0: one a core that measuring does not need
  bool force = false;  ///< measure configs again that the cache already holds
  /// Measures every config of every template, even if the budget does not allow a sweep.
  bool exhaustive = false;
  /// Program and arguments of the worker: a process whose whole work is worker_main(0, 1).
  /// Required.
  std::vector<std::string> worker_command;
  std::function<void(const TuneProgress&)> progress;
  /// Called often, from the calling thread; true stops the tuning within a second: rows stay, no
  /// winner is stored, and the result says interrupted. Cheap and non-throwing, e.g. a read of a
  /// flag set by SIGINT.
  std::function<bool()> interrupted;
  /// The sequences to time a packed problem on. Empty: uneven ones, the same in each tuning.
  std::vector<std::int64_t> cu_seqlens;
  /// Called at the end with the space and its results.
  std::function<void(const SearchSpace&, const Results&)> examine;
};

/// (template, config) pairs by outcome.
struct TuneCounts {
  std::int64_t space = 0;     ///< legal configs of all templates that could take part
  std::int64_t measured = 0;  ///< run by a worker in this tuning, with any outcome
  std::int64_t reused = 0;    ///< found in stored rows
  std::int64_t compiled = 0;  ///< kernels compiled in this tuning
  // Outcomes of measured, reused and never-run configs:
  std::int64_t ok = 0, wrong = 0, crashed = 0, timeout = 0, rejected = 0, illegal = 0, failed = 0;
  std::int64_t unjudged = 0;  ///< the machine failed; the next tuning tries them again
};

struct TuneResult {
  Plan plan;
  double tuned_us = 0;         ///< the whole operator by `plan`, median; 0 when interrupted
  double tuned_spread_us = 0;  ///< median absolute deviation of it
  double default_us = 0;       ///< by the default plan, from the same comparison; 0: it did not run
  double floor_us = 0;         ///< the least time on the device; 0: unknown
  TuneCounts counts;
  double seconds = 0;
  bool complete = false;  ///< the search reached its end before the budget did, all judged
  bool interrupted = false;
  /// Every config has been measured, except for steps that take less than a two-hundredth of the
  /// whole.
  bool exhaustive = false;
  std::int64_t sweep_configs = 0;  ///< measured beyond the local search to make it so
  double sweep_seconds = 0;        ///< spent on them
  bool stored = false;             ///< the winner is in the cache: prepare() answers with it
  std::string unjudged;            ///< why the machine failed once; a winner may have been missed
};

/// Tunes `problem` and stores the winner under its problem key. If the search needs nothing beyond
/// stored rows of the same driver and kernels, the stored winner is returned and nothing runs. Uses
/// runtime's cache. Throws Error(kBadInput) for an illegal problem, one without tokens or with
/// batch_invariant, or a missing worker_command; Error(kUnavailable) when no compiler or worker can
/// be had, or when no plan passes its check.
TuneResult tune(Runtime& runtime, const Device& device, const Problem& problem,
                const TuneOptions& options);

}  // namespace wyvern
