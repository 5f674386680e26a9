// Checking and timing plans of one problem on one device, inside a worker.
#pragma once

#include <wyvern/reference.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autotune/clock_track.hpp"
#include "autotune/inputs.hpp"
#include "autotune/results.hpp"
#include "autotune/statistics.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern {

/// Not thread-safe. A device fault is Error(kUnavailable), and the device is lost then.
class Bench {
 public:
  /// `cu_seqlens`: the offsets of a packed problem; empty: uneven_offsets().
  Bench(const Device& device, const Problem& problem, std::shared_ptr<Cache> cache,
        std::uint64_t seed, std::vector<std::int64_t> cu_seqlens = {});

  /// Checks the plan on the reduced problem, then times its step `step` alone, unless clearly
  /// slower than `bar` us. The step's inputs are what the steps before it computed. A sample is
  /// `repeats` launches after one cache flush, the same for all configs that are compared; 0:
  /// repeats_for() of the median. A window in which the device's speed changed is discarded and
  /// measured again.
  Outcome measure(const Plan& plan, std::size_t step, double bar, int repeats);

  /// Times one step of plans that were measured before, in turn, for about `seconds`: equal indices
  /// of samples are neighbours, so that a change of the device's clock affects all plans alike.
  std::vector<Outcome> race(const std::vector<Plan>& plans, std::size_t step, int repeats,
                            double seconds);

  /// Checks each plan, one that splits scans on sequences of several segments too, and times whole
  /// operators in turn for about `seconds`. Where gates_matter() a sample is the mean of two times,
  /// with fast decay and with slow decay: a plan that skips work where states decay fast must be
  /// worth it where they do not. `at` is called with a plan's index before anything is done with it
  /// for the first time.
  std::vector<Outcome> compare(const std::vector<Plan>& plans, double seconds,
                               const std::function<void(std::size_t)>& at);

  /// The problem's tensors that compare() uses, once for each speed of decay.
  const std::vector<Arguments>& compared() const { return compared_; }

  std::int64_t compiled() const { return runtime_.compiled(); }

 private:
  /// A problem to check plans on, and its expected outputs.
  struct Trial {
    ProblemTensors tensors;
    Reference reference;
    Trial(const Device& device, const Problem& problem, std::uint64_t seed, Runtime& runtime,
          float gates = 1);
  };

  std::optional<Operator> prepare(const Problem& problem, const Plan& plan, Outcome& outcome);
  void check(Trial& trial, const Plan& plan, Outcome& outcome);
  void check_segments(const Plan& plan, Outcome& outcome);
  void* workspace(const Operator& op);
  void run_before(const Operator& op, std::size_t step);
  Series sample_step(const Operator& op, std::size_t step, double bar, int repeats, bool& rejected);
  Series sample_window(Replay& replay, int repeats, double bar, bool& rejected);
  void note_clock(std::vector<double>& clocks);
  double time_once(Replay& replay);
  void set_pace(const Plan& plan);
  Timing pace();
  void check_whole(const Plan& plan, Outcome& outcome);
  std::unique_ptr<Replay> record(const Operator& op, const Arguments& arguments, std::size_t first,
                                 std::size_t last, int repeats);
  std::vector<std::unique_ptr<Replay>> record_whole(const Operator& op);

  Device device_;
  Runtime runtime_;
  ProblemTensors full_;
  std::vector<Arguments> compared_;
  std::uint64_t seed_;
  Trial small_;
  std::map<std::int64_t, Trial> long_;  ///< by the tokens of a segment
  std::shared_ptr<void> stream_;
  std::unique_ptr<Timer> timer_;
  ClockTrack clock_;
  std::shared_ptr<void> flush_;  ///< larger than the cache; null on the CPU
  std::size_t flush_bytes_ = 0;
  struct Workspace {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
  };
  static bool grow(Workspace& workspace, const Device& device, std::size_t bytes);
  Workspace full_workspace_, small_workspace_;
  /// The first correct plan's operator on the reduced problem; its time tracks the device's clock.
  std::optional<Operator> pacemaker_;
  std::unique_ptr<Replay> pace_;
  double last_pace_us_ = 0;
  Workspace pace_workspace_;
  std::set<std::string> right_;  ///< plans that have passed their checks
  /// The steps whose outputs the full workspace holds, those that ran last; empty: unknown.
  std::string prefix_;
};

}  // namespace wyvern
