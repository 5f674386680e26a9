// The laboratory of a real tuning: compiles ahead, has a worker process check and time, keeps rows
// in the cache.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "autotune/build.hpp"
#include "autotune/laboratory.hpp"
#include "autotune/worker_process.hpp"
#include "cache/cache.hpp"

namespace wyvern {

/// Whether rows of these settings have the same sizes.
bool same_extents(const Setting& a, const Setting& b);

struct LaboratoryOptions {
  std::vector<std::string> worker_command;
  nlohmann::json open;         ///< the worker's first request
  std::string device, driver;  ///< DeviceInfo's key and driver, as rows have them
  std::string problem;         ///< ProblemKey's text
  Setting setting;             ///< of the rows that are stored
  unsigned jobs = 0;
  bool overlap = false;                  ///< compile while measuring
  bool cold = false;                     ///< samples start from a flushed cache
  std::int64_t registers_per_block = 0;  ///< limit per block; 0: none
  std::function<bool()> interrupted;
  double open_timeout_s = 120;  ///< a driver's start and the oracle
  double first_timeout_s = 60;  ///< for the first answer
  double least_timeout_s = 10;  ///< later: ten times the slowest answer, but not less than this
};

class WorkerLaboratory final : public Laboratory {
 public:
  /// `space`, `builder` and `cache` outlive it.
  WorkerLaboratory(const SearchSpace& space, Builder& builder, Cache& cache,
                   LaboratoryOptions options);

  std::optional<Outcome> recall(const Candidate& candidate) override;
  void announce(std::span<const Candidate> candidates) override;
  std::optional<Resources> resources(const Candidate& candidate) override;
  std::optional<Outcome> measure(const Candidate& candidate, double bar) override;
  std::optional<std::vector<Series>> race(std::span<const Candidate> candidates,
                                          double seconds) override;
  void remember(const Candidate& candidate, const Outcome& outcome) override;
  std::vector<PlanTiming> compare(std::span<const Plan> plans, double seconds) override;
  double pace_change() const override { return long_run_change(paces_us_); }
  std::int64_t compiled() const override;

 private:
  std::optional<Outcome> unfit(const Candidate& candidate, const Built& built) const;
  std::optional<Outcome> run(const Candidate& candidate, double bar);
  std::optional<Outcome> run_once(const Candidate& candidate, double bar);
  bool compare_once(std::span<PlanTiming* const> running, double seconds,
                    std::map<const PlanTiming*, int>& strikes);
  bool take_answers(const nlohmann::json& value, std::span<PlanTiming* const> running);
  bool open_worker();
  void settle(const Candidate& candidate, const Outcome& outcome);
  KernelSpec spec_of(std::size_t group, std::size_t config) const;
  std::vector<KernelSpec> needs(const Candidate& candidate) const;
  const std::string& key_of(const Candidate& candidate);
  double timeout() const;

  const SearchSpace& space_;
  Builder& builder_;
  Cache& cache_;
  LaboratoryOptions options_;
  CompileAhead ahead_;
  WorkerProcess worker_;
  std::map<Candidate, std::string> keys_;
  std::vector<char> spill_free_;  ///< by group: a config without spills was measured
  /// By group: launches in one sample, from the first ok config, usually its default; 0: none yet.
  std::vector<int> repeats_;
  std::vector<double> paces_us_;  ///< time of the reference work beside each candidate
  double slowest_answer_s_ = 0;
  std::int64_t compiled_besides_ = 0;  ///< by workers, and at a second try
};

}  // namespace wyvern
