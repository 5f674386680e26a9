#include "runtime/nearest_shape.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cache/rows.hpp"
#include "runtime/problem_fields.hpp"

namespace wyvern {
namespace {

constexpr double kLeastGain = 0.02, kGainLostPerDistance = 0.02, kFarthest = 3;

/// The fields in which the problems may differ.
const std::vector<const ProblemField*>& crossed_fields() {
  // Never destroyed: the last threads may prepare while the process ends.
  static const auto& crossed = *new std::vector<const ProblemField*>([] {
    std::vector<const ProblemField*> fields;
    for (const ProblemField& field : problem_fields())
      if (field.distance) fields.push_back(&field);
    return fields;
  }());
  return crossed;
}

double number(std::string_view text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return static_cast<double>(value);
}

double doublings(double a, double b) { return std::fabs(std::log2(a / b)); }

}  // namespace

TunedFor::TunedFor(std::string_view device, const ProblemKey& key)
    : options_(crossed_fields().size()) {
  const std::vector<const ProblemField*>& crossed = crossed_fields();
  const DeviceParts parts = device_parts(device);
  threads_ = static_cast<double>(parts.threads);
  double H = 0, HV = 0, longest = 0;
  bool bounded = false;
  const std::string_view family = key.family;
  for (std::size_t at = 0; at < family.size();) {
    const std::size_t end = std::min(family.find_first_of("/,", at), family.size());
    const std::string_view piece = family.substr(at, end - at);
    at = end + 1;
    const std::size_t equals = std::min(piece.find('='), piece.size());
    const std::string_view name = piece.substr(0, equals);
    const std::string_view value = piece.substr(std::min(equals + 1, piece.size()));
    const auto option =
        std::ranges::find(crossed, name, [](const ProblemField* field) { return field->key.name; });
    if (option != crossed.end())
      options_[static_cast<std::size_t>(option - crossed.begin())] = value.empty() ? "yes" : value;
    if (name == "H")
      H = number(value);
    else if (name == "HV")
      HV = number(value);
    else if (name == "longest")
      longest = number(value);
    else if (name == "bounded" || name == "safe_gate")
      bounded = true;  // by the form of the gate, or promised: for the kernels the same
    else if (option == crossed.end())
      kernels_.append(piece).push_back('/');
    else if (name == "g")
      kernels_ += "g/";  // its dtype is crossed, its being there is not
  }
  if (bounded) kernels_ += "bounded/";
  kernels_ += parts.model;
  const auto sequences = static_cast<double>(std::max<std::int64_t>(key.sequences, 1));
  chains_ = sequences * HV;
  length_ = longest > 0 ? longest
                        : static_cast<double>(std::max<std::int64_t>(key.tokens, 1)) / sequences;
  group_ = H > 0 ? HV / H : 0;
}

std::optional<double> tuning_distance(const TunedFor& wanted, const TunedFor& found) {
  if (wanted.kernels_ != found.kernels_ || wanted.group_ <= 0 || found.group_ <= 0) return {};
  double distance = doublings(wanted.chains_, found.chains_) +
                    doublings(wanted.length_, found.length_) +
                    0.5 * doublings(wanted.group_, found.group_);
  if (wanted.threads_ != found.threads_) {
    if (wanted.threads_ <= 0 || found.threads_ <= 0) return {};
    distance += doublings(wanted.threads_, found.threads_);
  }
  for (std::size_t i = 0; i < wanted.options_.size(); ++i) {
    if (wanted.options_[i] == found.options_[i]) continue;
    const ProblemField& field = *crossed_fields()[i];
    if (field.narrows && !found.options_[i].empty()) return {};
    distance += *field.distance;
  }
  return distance;
}

std::optional<double> tuning_distance(const ProblemKey& wanted, const ProblemKey& found) {
  return tuning_distance(TunedFor("", wanted), TunedFor("", found));
}

bool carries_over(double ratio, double distance) {
  return ratio > 0 && distance <= kFarthest &&
         1 - ratio > kLeastGain + kGainLostPerDistance * distance;
}

}  // namespace wyvern
