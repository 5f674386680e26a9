#include "runtime/reference_inputs.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

namespace wyvern {
namespace {

template <class T, class Convert>
void convert_row(const TensorView& view, std::int64_t index, std::span<double> row,
                 const Convert& convert) {
  const char* at =
      static_cast<const char*>(view.data) + index * static_cast<std::int64_t>(sizeof(T));
  for (std::size_t i = 0; i < row.size(); ++i) {
    T value;
    std::memcpy(&value, at + i * sizeof(T), sizeof(T));
    row[i] = static_cast<double>(convert(value));
  }
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

double squared_length(std::span<const double> x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return sum;
}

constexpr double kNormEpsilon = 1e-6;

}  // namespace

double load(const TensorView& view, std::int64_t index) {
  double value = 0;
  load_row(view, index, {&value, 1});
  return value;
}

void load_row(const TensorView& view, std::int64_t index, std::span<double> row) {
  const auto plain = [](auto value) { return value; };
  switch (view.dtype) {
    case DType::fp32: return convert_row<float>(view, index, row, plain);
    case DType::fp16: return convert_row<std::uint16_t>(view, index, row, fp16_to_float);
    case DType::bf16: return convert_row<std::uint16_t>(view, index, row, bf16_to_float);
    case DType::int32: return convert_row<std::int32_t>(view, index, row, plain);
    case DType::int64: return convert_row<std::int64_t>(view, index, row, plain);
    case DType::boolean: return convert_row<std::uint8_t>(view, index, row, plain);
    case DType::float8_e4m3: return convert_row<std::uint8_t>(view, index, row, e4m3_to_float);
    case DType::float8_e5m2: return convert_row<std::uint8_t>(view, index, row, e5m2_to_float);
  }
}

void require_inputs(const Problem& problem, const Arguments& host) {
  Problem unkept = problem;
  unkept.disable_recompute = false;
  unkept.segment_chunks.reset();
  for (const TensorSpec& spec : tensor_specs(unkept)) {
    if (!spec.present || spec.access == TensorAccess::out) continue;
    const TensorView& view = host.tensor(spec.name);
    const std::int64_t elements = std::accumulate(
        spec.shape.begin(), spec.shape.begin() + spec.rank, std::int64_t{1}, std::multiplies<>());
    if (elements == 0) continue;
    if (!view.present())
      throw Error(
          ErrorKind::kBadInput,
          fmt::format("{} is absent; it must be given with {} elements", spec.name, elements));
    if (view.elements() != elements)
      throw Error(ErrorKind::kBadInput, fmt::format("{} has {} elements; it must have {}",
                                                    spec.name, view.elements(), elements));
  }
}

std::vector<std::int64_t> sequence_offsets(const Problem& p, const Arguments& a) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(p.N) + 1);
  for (std::int64_t n = 0; n <= p.N; ++n)
    offsets[static_cast<std::size_t>(n)] =
        p.packed ? static_cast<std::int64_t>(load(a.cu_seqlens, n)) : n * p.T;
  if (p.packed) validate_seqlens(p, offsets);
  return offsets;
}

std::optional<std::int64_t> slot_at(const Problem& p, const TensorView& index, std::int64_t i) {
  const auto slot = static_cast<std::int64_t>(load(index, i));
  if (slot < (p.null_slot_zero ? 1 : 0) || slot >= p.state_slots) return {};
  return slot;
}

std::optional<std::int64_t> intermediate_row(const Problem& p, const Arguments& host,
                                             std::int64_t n) {
  if (!p.intermediate_rows) return {};
  const auto row = static_cast<std::int64_t>(load(host.intermediate_index, n));
  if (row < 0 || row >= *p.intermediate_rows) return {};
  return row;
}

std::optional<SequenceSlots> slots_of(const Problem& p, const Arguments& host, std::int64_t n) {
  if (p.parent && !intermediate_row(p, host, n)) return {};
  if (!p.state_index) return SequenceSlots{n, n};
  std::int64_t column = 0;
  if (p.index_columns != 0) {
    column = static_cast<std::int64_t>(load(host.num_accepted, n)) - 1;
    if (column < 0 || column >= p.index_columns) return {};
  }
  const auto from =
      slot_at(p, host.state_index, n * std::max<std::int64_t>(p.index_columns, 1) + column);
  const auto to = p.output_state_index ? slot_at(p, host.output_state_index, n) : from;
  if (!from || !to) return {};
  return SequenceSlots{*from, *to};
}

bool starts_from_slot(const Problem& p, const Arguments& host, std::int64_t n) {
  return !p.has_initial_state || load(host.has_initial_state, n) != 0;
}

double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

double beta_of(const Problem& p, double x) {
  if (!p.use_beta_sigmoid) return x;
  return (p.allow_neg_eigval ? 2 : 1) * sigmoid(x);
}

double beta_slope(const Problem& p, double x) {
  if (!p.use_beta_sigmoid) return 1;
  return (p.allow_neg_eigval ? 2 : 1) * sigmoid(x) * sigmoid(-x);
}

void normalize(const Problem& p, std::span<double> x) {
  if (!p.use_qk_l2norm) return;
  const double length = std::sqrt(squared_length(x) + kNormEpsilon);
  for (double& value : x) value /= length;
}

void normalize_backward(const Problem& p, std::span<const double> x, std::span<double> dx) {
  if (!p.use_qk_l2norm) return;
  const double squares = squared_length(x) + kNormEpsilon, length = std::sqrt(squares);
  double along = 0;
  for (std::size_t i = 0; i < x.size(); ++i) along += x[i] * dx[i];
  for (std::size_t i = 0; i < x.size(); ++i) dx[i] = (dx[i] - x[i] * (along / squares)) / length;
}

std::int64_t gate_width(const Problem& p) {
  switch (gate_kind(p)) {
    case GateKind::none: return 0;
    case GateKind::scalar: return 1;
    case GateKind::vector: return p.K;
  }
  return 0;
}

GateForm::GateForm(const Problem& p, const Arguments& a, std::int64_t head)
    : in_kernel_(p.use_gate_in_kernel) {
  if (p.lower_bound) lower_bound_ = static_cast<double>(*p.lower_bound);
  if (in_kernel_ && p.has_A_log) rate_ = std::exp(wyvern::load(a.A_log, head));
}

double GateForm::log_decay(double x) const {
  if (!in_kernel_) return x;
  return lower_bound_ ? *lower_bound_ * sigmoid(rate_ * x) : -rate_ * softplus(x);
}

double GateForm::slope(double x) const {
  if (!in_kernel_) return 1;
  if (!lower_bound_) return -rate_ * sigmoid(x);
  return *lower_bound_ * sigmoid(rate_ * x) * sigmoid(-rate_ * x) * rate_;
}

double GateForm::rate_slope(double x) const { return lower_bound_ ? slope(x) * x : log_decay(x); }

HeadReader::HeadReader(const Problem& p, const Arguments& a, std::int64_t head)
    : problem_(p),
      host_(a),
      head_(head),
      key_head_(head / (p.HV / p.H)),
      gate_(p, a, head),
      bias_(static_cast<std::size_t>(gate_width(p))) {
  if (p.has_dt_bias) load_row(a.dt_bias, head * gate_width(p), bias_);
}

void HeadReader::load_query(std::int64_t at, std::span<double> q) const {
  if (!host_.q.present()) return std::fill(q.begin(), q.end(), 0.0);
  load_row(host_.q, (at * problem_.H + key_head_) * problem_.K, q);
  normalize(problem_, q);
}

void HeadReader::load_key(std::int64_t row, std::span<double> k) const {
  load_row(host_.k, (row * problem_.H + key_head_) * problem_.K, k);
  normalize(problem_, k);
}

void HeadReader::load_value(std::int64_t row, std::span<double> v) const {
  if (!host_.v.present()) return std::fill(v.begin(), v.end(), 0.0);
  load_row(host_.v, (row * problem_.HV + head_) * problem_.V, v);
}

double HeadReader::beta(std::int64_t row) const {
  return beta_of(problem_, load(host_.beta, row * problem_.HV + head_));
}

double HeadReader::beta_slope(std::int64_t row) const {
  return wyvern::beta_slope(problem_, load(host_.beta, row * problem_.HV + head_));
}

void HeadReader::load_decay(std::int64_t at, std::span<double> decay) const {
  if (bias_.empty()) {
    std::fill(decay.begin(), decay.end(), 1.0);
    return;
  }
  const std::span<double> gate = decay.first(bias_.size());
  load_gate(at, gate);
  for (double& x : gate) x = std::exp(gate_.log_decay(x));
  if (gate.size() == 1) std::fill(decay.begin(), decay.end(), gate[0]);
}

void HeadReader::gate_back(std::int64_t at, std::int64_t parameter_row, std::span<double> dlog,
                           std::span<double> x, GradientRows& gradients) const {
  if (x.empty()) return;
  if (x.size() == 1) dlog[0] = std::accumulate(dlog.begin(), dlog.end(), 0.0);
  load_gate(at, x);
  const std::span<double> dg = gradients.row("dg", at * problem_.HV + head_);
  const std::span<double> bias = gradients.row("ddt_bias", parameter_row);
  const std::span<double> rate = gradients.row("dA_log", parameter_row);
  for (std::size_t i = 0; i < x.size(); ++i) {
    dg[i] = dlog[i] * gate_.slope(x[i]);
    if (!bias.empty()) bias[i] += dg[i];
    if (!rate.empty()) rate[0] += dlog[i] * gate_.rate_slope(x[i]);
  }
}

void HeadReader::load_gate(std::int64_t at, std::span<double> x) const {
  load_row(host_.g, (at * problem_.HV + head_) * static_cast<std::int64_t>(x.size()), x);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += bias_[i];
}

}  // namespace wyvern
