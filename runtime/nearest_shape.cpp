#include "runtime/nearest_shape.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cache/rows.hpp"

namespace wyvern {
namespace {

constexpr double kLeastGain = 0.02, kGainLostPerDistance = 0.02, kFarthest = 3;

constexpr double kState = 0.25, kInput = 0.5, kPacking = 1, kNarrowing = 0.5;

constexpr std::array kCrossed{
    CrossedOption{"initial_state", kState},
    CrossedOption{"final_state", kState},
    CrossedOption{"state_v_first", kState},
    CrossedOption{"inplace", kState},
    CrossedOption{"state_index", kState},
    CrossedOption{"output_state_index", kState},
    CrossedOption{"has_initial_state", kState},
    CrossedOption{"checkpoint_every", kState},
    CrossedOption{"checkpoint_offsets", kState},
    CrossedOption{"checkpoints", 0},  // their dtype
    CrossedOption{"index_columns", kState},
    CrossedOption{"token_states", kState},
    CrossedOption{"parent", kState},
    CrossedOption{"disable_state_update", kState},
    CrossedOption{"qk_l2norm", kInput},
    CrossedOption{"gate", kInput},
    CrossedOption{"dt_bias", kInput},
    CrossedOption{"no_A_log", kInput},
    CrossedOption{"beta_sigmoid", kInput},
    CrossedOption{"neg", kInput},
    CrossedOption{"beta", kInput},
    CrossedOption{"g", kInput},
    CrossedOption{"output_norm", kInput},
    CrossedOption{"packed", kPacking},
    CrossedOption{"chunk_size", kNarrowing, true},
    CrossedOption{"kept", kNarrowing, true},
    CrossedOption{"intermediate_states", kNarrowing, true},
};

double number(std::string_view text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return static_cast<double>(value);
}

double doublings(double a, double b) { return std::fabs(std::log2(a / b)); }

}  // namespace

std::span<const CrossedOption> crossed_options() { return kCrossed; }

TunedFor::TunedFor(std::string_view device, const ProblemKey& key) {
  static_assert(kOptions == kCrossed.size());
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
    const auto option = std::ranges::find(kCrossed, name, &CrossedOption::name);
    if (option != kCrossed.end())
      options_[static_cast<std::size_t>(option - kCrossed.begin())] = value.empty() ? "yes" : value;
    if (name == "H")
      H = number(value);
    else if (name == "HV")
      HV = number(value);
    else if (name == "longest")
      longest = number(value);
    else if (name == "bounded" || name == "safe_gate")
      bounded = true;  // by the form of the gate, or promised: for the kernels the same
    else if (option == kCrossed.end())
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
  for (std::size_t i = 0; i < kCrossed.size(); ++i) {
    if (wanted.options_[i] == found.options_[i]) continue;
    if (kCrossed[i].narrows && !found.options_[i].empty()) return {};
    distance += kCrossed[i].distance;
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
