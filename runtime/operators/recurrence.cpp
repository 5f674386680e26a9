#include "runtime/operators/recurrence.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/reference_inputs.hpp"
#include "runtime/reference_step.hpp"

namespace wyvern {
namespace {

using Doubles = std::vector<double>;

Doubles zeros(std::int64_t count) { return Doubles(static_cast<std::size_t>(count)); }

/// One row of k of the value head, and the step's intermediates.
struct Step {
  explicit Step(const Problem& p)
      : q(zeros(p.K)), k(q), decay(q.size(), 1.0), v(zeros(p.V)), u(v), residual(v) {}
  Doubles q, k, decay;  ///< [K]; a scalar decay repeated; q is 0 and decay 1 in other steps
  Doubles v, u, residual;
  double beta = 0;
};

/// A step that is remembered, with the state after the decay and before the write.
struct Kept {
  explicit Kept(const Problem& p) : step(p), decayed(zeros(p.K * p.V)) {}
  Step step;
  Doubles decayed;
};

class DeltaRecurrence final : public Recurrence {
 public:
  DeltaRecurrence(const Problem& p, const Arguments& host, std::int64_t sequence, std::int64_t head)
      : p_(p),
        steps_(p.num_householder),
        reader_(p, host, head),
        head_(head),
        parameter_row_(sequence * p.HV + head),
        now_(p),
        out_(zeros(p.V)),
        du_(out_),
        erasing_key_(zeros(p.K)),
        d_erasing_key_(erasing_key_),
        dlog_(zeros(p.K)),
        gate_(zeros(gate_width(p))),
        unread_(zeros(p.K)) {}

  void step(std::int64_t at, std::span<double> S, std::span<double> out) override {
    advance(at, S, S, now_, out);
  }

  void record(std::int64_t at, std::size_t slot, std::span<double> S) override {
    while (kept_.size() <= slot) kept_.emplace_back(p_);
    advance(at, S, kept_[slot].decayed, kept_[slot].step, out_);
  }

  void step_back(std::int64_t at, std::size_t slot, std::span<const double> d_o,
                 std::span<double> dS, GradientRows& gradients) override {
    const Kept& kept = kept_[slot];
    const Step& t = kept.step;
    const std::int64_t token = at / steps_, row = at * p_.HV + head_;
    write_and_read(dS.data(), dS.data(), t.q, d_o, t.k, du_);
    const std::span<double> dk = gradients.row("dk", row);
    const std::span<double> dq =
        is_last(at) ? gradients.row("dq", token * p_.HV + head_) : std::span(unread_);
    for (std::size_t i = 0; i < t.k.size(); ++i) erasing_key_[i] = t.beta * t.k[i];
    adjoint_rows(kept.decayed.data(), dS.data(), erasing_key_, t.decay, t.u, du_, d_o, dq, dk,
                 d_erasing_key_, dlog_);
    for (std::size_t i = 0; i < dk.size(); ++i) dk[i] += t.beta * d_erasing_key_[i];
    const double written = std::inner_product(t.u.begin(), t.u.end(), d_o.begin(), 0.0);
    for (std::size_t i = 0; i < dq.size(); ++i) dq[i] += t.k[i] * written;
    const double dbeta = std::inner_product(du_.begin(), du_.end(), t.residual.begin(), 0.0);
    gradients.row("dbeta", row)[0] = dbeta * reader_.beta_slope(at);
    const std::span<double> dv = gradients.row("dv", row);
    for (std::size_t j = 0; j < dv.size(); ++j) dv[j] = t.beta * du_[j];
    if (is_first(at)) reader_.gate_back(token, parameter_row_, dlog_, gate_, gradients);
  }

 private:
  bool is_first(std::int64_t at) const { return at % steps_ == 0; }
  bool is_last(std::int64_t at) const { return at % steps_ == steps_ - 1; }

  /// One step from S to S; `decayed` receives the state between decay and write, and may be S.
  void advance(std::int64_t at, std::span<double> S, std::span<double> decayed, Step& t,
               std::span<double> out) {
    if (is_last(at))
      reader_.load_query(at / steps_, t.q);
    else
      std::ranges::fill(t.q, 0.0);
    reader_.load_key(at, t.k);
    reader_.load_value(at, t.v);
    t.beta = reader_.beta(at);
    if (is_first(at))
      reader_.load_decay(at / steps_, t.decay);
    else
      std::ranges::fill(t.decay, 1.0);
    decay_and_read(S.data(), decayed.data(), t.decay, t.k, t.residual);
    for (std::size_t j = 0; j < t.u.size(); ++j) {
      t.residual[j] = t.v[j] - t.residual[j];
      t.u[j] = t.beta * t.residual[j];
    }
    write_and_read(decayed.data(), S.data(), t.k, t.u, t.q, out);
  }

  const Problem& p_;
  std::int64_t steps_;  ///< of a token
  HeadReader reader_;
  std::int64_t head_, parameter_row_;
  Step now_;
  Doubles out_, du_, erasing_key_, d_erasing_key_, dlog_, gate_;
  Doubles unread_;  ///< the gradient of a query that a step does not have
  std::vector<Kept> kept_;
};

}  // namespace

std::unique_ptr<Recurrence> delta_recurrence(const Problem& problem, const Arguments& host,
                                             std::int64_t sequence, std::int64_t head) {
  return std::make_unique<DeltaRecurrence>(problem, host, sequence, head);
}

}  // namespace wyvern
