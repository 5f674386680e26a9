#include "runtime/operators/gdn2/recurrence.hpp"

#include <numeric>
#include <vector>

#include "runtime/reference_inputs.hpp"
#include "runtime/reference_step.hpp"

namespace wyvern::gdn2 {
namespace {

using Doubles = std::vector<double>;

Doubles zeros(std::int64_t count) { return Doubles(static_cast<std::size_t>(count)); }

/// One token of the value head, and the step's intermediates.
struct Step {
  explicit Step(const Problem& p)
      : q(zeros(p.K)), k(q), erase(q), erasing_key(q), decay(q), v(zeros(p.V)), write(v), u(v) {}
  Doubles q, k, erase, erasing_key, decay;  ///< [K]; erasing_key = erase k
  Doubles v, write, u;                      ///< [V]
};

/// A step that is remembered, with the state after the decay and before the write.
struct Kept {
  explicit Kept(const Problem& p) : step(p), decayed(zeros(p.K * p.V)) {}
  Step step;
  Doubles decayed;
};

class Gdn2Recurrence final : public Recurrence {
 public:
  Gdn2Recurrence(const Problem& p, const Arguments& host, std::int64_t sequence, std::int64_t head)
      : p_(p),
        host_(host),
        reader_(p, host, head),
        head_(head),
        parameter_row_(sequence * p.HV + head),
        now_(p),
        out_(zeros(p.V)),
        du_(out_),
        d_erasing_key_(zeros(p.K)),
        dlog_(zeros(p.K)),
        gate_(zeros(gate_width(p))) {}

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
    const std::int64_t row = at * p_.HV + head_;
    write_and_read(dS.data(), dS.data(), t.q, d_o, t.k, du_);
    const std::span<double> dq = gradients.row("dq", row), dk = gradients.row("dk", row);
    adjoint_rows(kept.decayed.data(), dS.data(), t.erasing_key, t.decay, t.u, du_, d_o, dq, dk,
                 d_erasing_key_, dlog_);
    const double written = std::inner_product(t.u.begin(), t.u.end(), d_o.begin(), 0.0);
    const std::span<double> derase = gradients.row("derase", row);
    for (std::size_t i = 0; i < dq.size(); ++i) {
      dq[i] += t.k[i] * written;
      dk[i] += t.erase[i] * d_erasing_key_[i];
      derase[i] = t.k[i] * d_erasing_key_[i];
    }
    const std::span<double> dv = gradients.row("dv", row), dwrite = gradients.row("dwrite", row);
    for (std::size_t j = 0; j < dv.size(); ++j) {
      dv[j] = t.write[j] * du_[j];
      dwrite[j] = t.v[j] * du_[j];
    }
    reader_.gate_back(at, parameter_row_, dlog_, gate_, gradients);
  }

 private:
  /// One step from S to S; `decayed` receives the state between decay and write, and may be S.
  void advance(std::int64_t at, std::span<double> S, std::span<double> decayed, Step& t,
               std::span<double> out) {
    const std::int64_t row = at * p_.HV + head_;
    reader_.load_query(at, t.q);
    reader_.load_key(at, t.k);
    reader_.load_value(at, t.v);
    load_row(host_.erase, row * p_.K, t.erase);
    if (host_.write.present()) load_row(host_.write, row * p_.V, t.write);
    reader_.load_decay(at, t.decay);
    for (std::size_t i = 0; i < t.k.size(); ++i) t.erasing_key[i] = t.erase[i] * t.k[i];
    decay_and_read(S.data(), decayed.data(), t.decay, t.erasing_key, t.u);
    for (std::size_t j = 0; j < t.u.size(); ++j) t.u[j] = t.write[j] * t.v[j] - t.u[j];
    write_and_read(decayed.data(), S.data(), t.k, t.u, t.q, out);
  }

  const Problem& p_;
  const Arguments& host_;
  HeadReader reader_;
  std::int64_t head_, parameter_row_;
  Step now_;
  Doubles out_, du_, d_erasing_key_, dlog_, gate_;
  std::vector<Kept> kept_;
};

}  // namespace

std::unique_ptr<Recurrence> recurrence(const Problem& problem, const Arguments& host,
                                       std::int64_t sequence, std::int64_t head) {
  return std::make_unique<Gdn2Recurrence>(problem, host, sequence, head);
}

}  // namespace wyvern::gdn2
