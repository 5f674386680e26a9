#include "autotune/model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <variant>

namespace wyvern {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
/// More observations of a template would say little more and cost their third power.
constexpr std::size_t kMostObservations = 240;
/// How far a logarithm of time is off its smooth part, as a variance: of this tuning's own
/// measurements, and of another problem's used for this one.
constexpr double kOwnNoise = 0.02, kStoredNoise = 0.2;
/// How far the smooth part carries, in standard deviations of each feature.
constexpr double kReach = 1.0;

double log2_of(double value) { return std::log2(1.0 + value); }

struct AsNumber {
  double operator()(bool value) const { return value ? 1 : 0; }
  double operator()(std::int64_t value) const { return log2_of(static_cast<double>(value)); }
  double operator()(DType value) const { return static_cast<double>(value); }
  double operator()(Precision value) const { return static_cast<double>(value); }
};

struct Sample {
  std::vector<double> features;
  double log_us = 0;  ///< less the mean of its contest
  double noise = 0;
};

/// The time in a result, also of a config found too slow; 0: none.
double time_of(const Outcome* outcome) {
  const bool timed = outcome != nullptr && !outcome->samples.empty() &&
                     (outcome->status == Status::ok || outcome->status == Status::rejected);
  return timed ? summarize(outcome->samples).median : 0;
}

const Launch& launch_in(const Group& group, std::size_t config) {
  static const Launch kNone;
  return group.launches.empty() ? kNone : group.launches[config];
}

}  // namespace

std::vector<double> features(const Config& config, const Launch& launch, int multiprocessors,
                             const std::optional<Resources>& resources) {
  std::vector<double> values;
  for (const auto& [name, value] : config.items()) values.push_back(std::visit(AsNumber{}, value));
  const double waves =
      static_cast<double>(launch.blocks) / static_cast<double>(std::max(multiprocessors, 1));
  values.push_back(log2_of(waves));
  values.push_back(waves > 0 ? std::ceil(waves) / waves - 1 : 0);
  values.push_back(log2_of(static_cast<double>(launch.threads)));
  values.push_back(log2_of(static_cast<double>(launch.shared_bytes)));
  values.push_back(resources ? static_cast<double>(resources->registers) : kUnknown);
  values.push_back(resources ? log2_of(static_cast<double>(resources->spill_bytes)) : kUnknown);
  values.push_back(resources ? log2_of(static_cast<double>(resources->shared_bytes)) : kUnknown);
  return values;
}

class CostModel::Regression {
 public:
  explicit Regression(std::vector<Sample> samples) : samples_(std::move(samples)) {
    standardize();
    solve();
  }

  /// Logarithm of time beside the mean of its contest.
  double at(std::vector<double> features) const {
    scale(features);
    double value = 0;
    for (std::size_t i = 0; i < samples_.size(); ++i)
      value += weights_[i] * likeness(features, samples_[i].features);
    return value;
  }

 private:
  void standardize() {
    const std::size_t count = samples_.front().features.size();
    mean_.assign(count, 0);
    deviation_.assign(count, 1);
    for (std::size_t f = 0; f < count; ++f) {
      double sum = 0, squares = 0, known = 0;
      for (const Sample& sample : samples_) {
        const double value = sample.features[f];
        if (std::isnan(value)) continue;
        sum += value;
        squares += value * value;
        known += 1;
      }
      if (known == 0) continue;
      mean_[f] = sum / known;
      const double variance = squares / known - mean_[f] * mean_[f];
      if (variance > 1e-12) deviation_[f] = std::sqrt(variance);
    }
    for (Sample& sample : samples_) scale(sample.features);
  }

  /// In standard deviations from the mean; an unknown feature counts as the mean.
  void scale(std::vector<double>& features) const {
    for (std::size_t f = 0; f < features.size(); ++f)
      features[f] = std::isnan(features[f]) ? 0 : (features[f] - mean_[f]) / deviation_[f];
  }

  static double likeness(const std::vector<double>& a, const std::vector<double>& b) {
    double squares = 0;
    for (std::size_t f = 0; f < a.size(); ++f) squares += (a[f] - b[f]) * (a[f] - b[f]);
    return 0.1 * std::exp(-squares / (2 * kReach * kReach * static_cast<double>(a.size())));
  }

  /// weights = (likeness of all pairs + noise)^-1 log_us, by Cholesky's decomposition.
  void solve() {
    const std::size_t n = samples_.size();
    std::vector<double> L(n * n, 0);
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j <= i; ++j)
        L[i * n + j] =
            likeness(samples_[i].features, samples_[j].features) + (i == j ? samples_[i].noise : 0);
    // Column by column, each taken from the rows below it at once, which a compiler can vectorize.
    std::vector<double> column(n);
    for (std::size_t k = 0; k < n; ++k) {
      const double pivot = std::sqrt(std::max(L[k * n + k], 1e-12));
      L[k * n + k] = pivot;
      for (std::size_t i = k + 1; i < n; ++i) column[i] = L[i * n + k] /= pivot;
      for (std::size_t i = k + 1; i < n; ++i) {
        double* const row = &L[i * n];
        const double factor = column[i];
        for (std::size_t j = k + 1; j <= i; ++j) row[j] -= factor * column[j];
      }
    }
    weights_.assign(n, 0);
    for (std::size_t i = 0; i < n; ++i) {
      double sum = samples_[i].log_us;
      for (std::size_t k = 0; k < i; ++k) sum -= L[i * n + k] * weights_[k];
      weights_[i] = sum / L[i * n + i];
    }
    for (std::size_t i = n; i-- > 0;) {
      double sum = weights_[i];
      for (std::size_t k = i + 1; k < n; ++k) sum -= L[k * n + i] * weights_[k];
      weights_[i] = sum / L[i * n + i];
    }
  }

  std::vector<Sample> samples_;
  std::vector<double> mean_, deviation_, weights_;
};

namespace {

/// Samples of one contest; their times are put relative to the contest's mean.
void add_contest(std::vector<Sample> contest, std::vector<Sample>& samples) {
  if (contest.size() < 2) return;  // alone it says nothing of differences
  double mean = 0;
  for (const Sample& sample : contest) mean += sample.log_us / static_cast<double>(contest.size());
  for (Sample& sample : contest) {
    if (samples.size() >= kMostObservations) return;
    sample.log_us -= mean;
    samples.push_back(std::move(sample));
  }
}

}  // namespace

CostModel::CostModel(const SearchSpace& space, const Results& results,
                     std::span<const Observation> stored)
    : space_(space), results_(results), levels_(space.groups.size(), kUnknown) {
  std::map<std::string, std::vector<Sample>, std::less<>> samples;
  for (std::size_t g = 0; g < space.groups.size(); ++g) {
    const Group& group = space.groups[g];
    std::vector<Sample> contest;
    double sum = 0;
    for (std::size_t i = 0; i < group.configs.size(); ++i) {
      const double us = time_of(results.find({g, i}));
      if (us <= 0) continue;
      contest.push_back({features(group.configs[i], launch_in(group, i), space.multiprocessors,
                                  results.resources({g, i})),
                         std::log(us), kOwnNoise});
      sum += std::log(us);
    }
    if (!contest.empty()) levels_[g] = sum / static_cast<double>(contest.size());
    add_contest(std::move(contest), samples[group.template_id]);
  }
  std::map<std::pair<std::string, std::string>, std::vector<Sample>> contests;
  for (const Observation& seen : stored)
    if (samples.contains(seen.template_id))
      contests[{seen.template_id, seen.contest}].push_back(
          {seen.features, std::log(seen.us), kStoredNoise});
  for (auto& [name, contest] : contests) add_contest(std::move(contest), samples[name.first]);
  for (auto& [name, of] : samples) {
    const auto other = [&](const Sample& s) {
      return s.features.size() != of.front().features.size();
    };
    std::erase_if(of, other);  // rows of a template that had other tunables
    if (!of.empty()) regressions_.emplace(name, std::make_unique<const Regression>(std::move(of)));
  }
}

CostModel::~CostModel() = default;

double CostModel::predict(const Candidate& candidate) const {
  const double level = levels_[candidate.group];
  if (std::isnan(level)) return 0;
  const Group& group = space_.groups[candidate.group];
  const auto regression = regressions_.find(group.template_id);
  if (regression == regressions_.end()) return std::exp(level);
  return std::exp(level + regression->second->at(features(
                              group.configs[candidate.config], launch_in(group, candidate.config),
                              space_.multiprocessors, results_.resources(candidate))));
}

}  // namespace wyvern
