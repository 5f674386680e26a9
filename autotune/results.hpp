// The outcome of each candidate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "autotune/space.hpp"
#include "autotune/statistics.hpp"

namespace wyvern {

enum class Status : std::uint8_t {
  ok,        ///< right and timed
  wrong,     ///< its output is beyond the error bound
  crashed,   ///< its worker ended, or the device reported a fault
  timeout,   ///< its worker did not answer
  rejected,  ///< clearly slower than another config of its group, or spills where another does not
  illegal,   ///< compiles to a kernel that the device cannot launch
  failed,    ///< does not compile
  unjudged,  ///< the machine failed, not the config: not stored, and measured again
};
/// As in MeasurementRow::status.
std::string_view to_string(Status status) noexcept;
std::optional<Status> parse_status(std::string_view text) noexcept;

/// Samples in us, and the device's clock at each where it tells.
struct Series {
  std::vector<double> samples, clocks_mhz;
};

struct Outcome {
  Status status = Status::failed;
  std::string detail;                       ///< one sentence for a status other than ok
  std::vector<double> samples;              ///< us
  double error = 0;                         ///< of its check
  bool reused = false;                      ///< from a stored row
  bool ran = false;                         ///< a worker was asked in this tuning
  std::optional<Resources> resources = {};  ///< of its kernel, where it was compiled
  double compile_ms = 0, measure_ms = 0;    ///< time spent on it; 0: unknown
  double pace_us = 0;                       ///< time of the reference work beside it; 0: unknown
  /// The device's clock at each sample; empty if it does not report it.
  std::vector<double> clocks_mhz = {};
};

/// Outcomes by candidate. Not thread-safe.
class Results {
 public:
  explicit Results(const SearchSpace& space);

  const Outcome* find(const Candidate& candidate) const;
  void put(const Candidate& candidate, Outcome outcome);
  /// Of an ok candidate; zeros for any other.
  const Timing& timing(const Candidate& candidate) const;
  /// Sets the resources of a candidate's kernel before it is measured.
  void learn(const Candidate& candidate, const Resources& resources);
  const std::optional<Resources>& resources(const Candidate& candidate) const;
  /// The least median of the group's ok configs; 0 when it has none.
  double bar(std::size_t group) const;
  const std::vector<std::vector<std::optional<Outcome>>>& all() const { return outcomes_; }

 private:
  std::vector<std::vector<std::optional<Outcome>>> outcomes_;
  std::vector<std::vector<Timing>> timings_;
  std::vector<std::vector<std::optional<Resources>>> resources_;
};

}  // namespace wyvern
