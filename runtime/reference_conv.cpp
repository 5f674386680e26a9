#include "runtime/reference_conv.hpp"

#include <algorithm>
#include <cstring>

#include "runtime/reference_inputs.hpp"

namespace wyvern {
namespace {

constexpr std::int64_t kNullToken = -2;

void store_rounded(std::vector<unsigned char>& bytes, DType dtype, std::int64_t at, double value) {
  const auto number = static_cast<float>(value);
  const auto put = [&](const auto& stored) {
    std::memcpy(bytes.data() + static_cast<std::size_t>(at) * sizeof stored, &stored,
                sizeof stored);
  };
  if (dtype == DType::bf16)
    put(float_to_bf16(number));
  else if (dtype == DType::fp16)
    put(float_to_fp16(number));
  else
    put(number);
}

}  // namespace

ConvolvedRows::ConvolvedRows(const Problem& problem, const Arguments& host)
    : p_(problem),
      host_(host),
      arguments_(host),
      channels_(conv_channels(problem)),
      before_(*problem.short_conv - 1),
      offsets_(sequence_offsets(problem, host)) {
  const std::int64_t q = p_.H * p_.K, k = p_.num_householder * q;
  rows_ = {{&Arguments::q, "dq", 0, q},
           {&Arguments::k, "dk", q, k},
           {&Arguments::v, "dv", q + k, p_.num_householder * p_.HV * p_.V}};
  for (std::int64_t n = 0; n < p_.N; ++n) {
    windows_.push_back(windows_of(n));
    if (p_.parent) parents_.push_back(parents_of(n));
  }
  for (const Rows& rows : rows_) convolve(rows);
}

ConvolvedRows::Windows ConvolvedRows::windows_of(std::int64_t n) const {
  const std::optional<SequenceSlots> slots = slots_of(p_, host_, n);
  if (!slots) return {};
  const std::size_t at = static_cast<std::size_t>(n);
  const std::int64_t length = offsets_[at + 1] - offsets_[at];
  Windows windows{.from = slots->from, .to = slots->to, .row = length - before_, .count = before_};
  if (p_.index_columns != 0) {
    windows.from = windows.to = slot_at(p_, host_.state_index, n * p_.index_columns);
    windows.column = static_cast<std::int64_t>(load(host_.num_accepted, n)) - 1;
    windows.row = 1 - before_;
    windows.count = before_ - 1 + std::min(length, p_.index_columns);
    if (length == 0) windows.to.reset();
  }
  if (!(p_.initial_conv_state || p_.inplace_conv_state) || !starts_from_slot(p_, host_, n))
    windows.from.reset();
  if (p_.output_conv_state)
    windows.to = n;
  else if (!p_.inplace_conv_state || p_.disable_state_update)
    windows.to.reset();
  return windows;
}

std::vector<std::int64_t> ConvolvedRows::parents_of(std::int64_t n) const {
  const std::size_t at = static_cast<std::size_t>(n);
  const std::int64_t D = draft_tokens_of(p_);
  std::vector<std::int64_t> parents;
  for (std::int64_t t = 0; slots_of(p_, host_, n) && t < offsets_[at + 1] - offsets_[at]; ++t) {
    const std::int64_t from =
        t < D ? static_cast<std::int64_t>(load(host_.parent, n * D + t)) : kNullToken;
    const bool live = from == -1 || (from >= 0 && from < t &&
                                     parents[static_cast<std::size_t>(from)] != kNullToken);
    parents.push_back(live ? from : kNullToken);
  }
  return parents;
}

std::int64_t ConvolvedRows::before(std::int64_t n, std::int64_t t) const {
  if (!p_.parent || t < 0) return t - 1;
  const std::vector<std::int64_t>& parents = parents_[static_cast<std::size_t>(n)];
  return parents.empty() ? t - 1 : parents[static_cast<std::size_t>(t)];
}

bool ConvolvedRows::is_null(std::int64_t n, std::int64_t t) const {
  return before(n, t) == kNullToken;
}

std::int64_t ConvolvedRows::window_place(const Line& line, std::int64_t slot,
                                         std::int64_t column) const {
  const std::int64_t columns = p_.inplace_conv_state ? conv_columns_of(p_) : before_;
  if (p_.conv_tokens_first) return (slot * columns + column) * channels_ + line.channel;
  return (slot * channels_ + line.channel) * columns + column;
}

template <class Work>
void ConvolvedRows::for_each_line(const Rows& rows, const Work& work) const {
  for (std::int64_t n = 0; n < p_.N; ++n) {
    const std::int64_t first = offsets_[static_cast<std::size_t>(n)];
    const std::int64_t length = offsets_[static_cast<std::size_t>(n) + 1] - first;
    for (std::int64_t c = rows.channel; c < rows.channel + rows.width; ++c)
      work(Line{rows, n, c, first, length});
  }
}

std::int64_t ConvolvedRows::place(const Line& line, std::int64_t t) {
  return (line.first + t) * line.rows.width + line.channel - line.rows.channel;
}

double ConvolvedRows::given(const Line& line, std::int64_t t) const {
  if (t >= 0) return load(host_.*line.rows.tensor, place(line, t));
  const Windows& windows = windows_[static_cast<std::size_t>(line.n)];
  if (!windows.from) return 0;
  return load(p_.inplace_conv_state ? host_.conv_state : host_.initial_conv_state,
              window_place(line, *windows.from, windows.column + before_ + t));
}

double ConvolvedRows::summed(const Line& line, std::int64_t t) const {
  double sum = p_.has_conv_bias ? load(host_.conv_bias, line.channel) : 0;
  for (std::int64_t i = before_; i >= 0; --i, t = before(line.n, t))
    sum += load(host_.conv_weight, line.channel * (before_ + 1) + i) * given(line, t);
  return sum;
}

void ConvolvedRows::convolve(const Rows& rows) {
  TensorView& view = arguments_.*rows.tensor;
  std::vector<unsigned char>& bytes =
      bytes_.emplace_back(static_cast<std::size_t>(p_.B * p_.T * rows.width) * size_of(view.dtype));
  for_each_line(rows, [&](const Line& line) {
    for (std::int64_t t = 0; t < line.length; ++t) {
      double y = is_null(line.n, t) ? 0 : summed(line, t);
      if (p_.conv_activation != Activation::none) y *= sigmoid(y);
      store_rounded(bytes, view.dtype, place(line, t), y);
    }
  });
  view.data = bytes.data();
}

void ConvolvedRows::finish(Reference& result) const {
  const auto add = [&](const char* name, bool has, std::int64_t count) {
    if (has) result[name].assign(static_cast<std::size_t>(count), 0.0);
  };
  const std::int64_t window = p_.N * channels_ * before_;
  if (p_.pass == Pass::backward) {
    add("dconv_weight", true, channels_ * (before_ + 1));
    add("dconv_bias", p_.has_conv_bias, channels_);
    add("dinitial_conv_state", p_.initial_conv_state, window);
    for (const Rows& rows : rows_) differentiate(rows, result);
    return;
  }
  if (p_.intermediate_rows) keep_drafts(result);
  if (!p_.output_conv_state && !p_.inplace_conv_state) return;
  const char* const name = p_.inplace_conv_state ? "conv_state" : "final_conv_state";
  add(name, true, p_.inplace_conv_state ? host_.conv_state.elements() : window);
  std::vector<double>& last = result.at(name);
  if (p_.inplace_conv_state) load_row(host_.conv_state, 0, last);
  for (const Rows& rows : rows_)
    for_each_line(rows, [&](const Line& line) {
      const Windows& windows = windows_[static_cast<std::size_t>(line.n)];
      for (std::int64_t j = 0; windows.to && j < windows.count; ++j)
        last[static_cast<std::size_t>(window_place(line, *windows.to, j))] =
            given(line, windows.row + j);
    });
}

void ConvolvedRows::keep_drafts(Reference& result) const {
  const TensorView& view = host_.intermediate_conv_states;
  std::vector<double>& kept = result["intermediate_conv_states"];
  kept.resize(static_cast<std::size_t>(view.elements()));
  load_row(view, 0, kept);
  const std::int64_t D = draft_tokens_of(p_);
  for (const Rows& rows : rows_)
    for_each_line(rows, [&](const Line& line) {
      const auto row = intermediate_row(p_, host_, line.n);
      if (!row || !slots_of(p_, host_, line.n)) return;
      for (std::int64_t t = 0; t < std::min(line.length, D); ++t) {
        if (is_null(line.n, t)) continue;
        const std::int64_t window = *row * D + t;
        for (std::int64_t j = before_ - 1, at = t; j >= 0; --j, at = before(line.n, at))
          kept[static_cast<std::size_t>(p_.conv_tokens_first
                                            ? (window * before_ + j) * channels_ + line.channel
                                            : (window * channels_ + line.channel) * before_ + j)] =
              given(line, at);
      }
    });
}

void ConvolvedRows::differentiate(const Rows& rows, Reference& result) const {
  std::vector<double>& gradients = result.at(rows.gradient);
  std::vector<double>& dweight = result.at("dconv_weight");
  std::vector<double> dx;
  for_each_line(rows, [&](const Line& line) {
    const std::int64_t window = (line.n * channels_ + line.channel) * before_;
    // Of the initial window and the rows behind it.
    dx.assign(static_cast<std::size_t>(before_ + line.length), 0.0);
    for (std::int64_t j = 0; p_.output_conv_state && j < before_; ++j)
      dx[static_cast<std::size_t>(line.length + j)] = load(host_.dfinal_conv_state, window + j);
    for (std::int64_t t = 0; t < line.length; ++t) {
      double d = gradients[static_cast<std::size_t>(place(line, t))];
      if (p_.conv_activation != Activation::none) {
        const double c = summed(line, t);
        d *= sigmoid(c) * (1 + c * sigmoid(-c));
      }
      if (p_.has_conv_bias) result.at("dconv_bias")[static_cast<std::size_t>(line.channel)] += d;
      for (std::int64_t i = 0; i <= before_; ++i) {
        const std::int64_t weight = line.channel * (before_ + 1) + i;
        dweight[static_cast<std::size_t>(weight)] += d * given(line, t - before_ + i);
        dx[static_cast<std::size_t>(t + i)] += d * load(host_.conv_weight, weight);
      }
    }
    for (std::int64_t t = 0; t < line.length; ++t)
      gradients[static_cast<std::size_t>(place(line, t))] =
          dx[static_cast<std::size_t>(before_ + t)];
    if (p_.initial_conv_state)
      std::copy_n(dx.begin(), before_, result.at("dinitial_conv_state").begin() + window);
  });
}

}  // namespace wyvern
