// References of the scans that work on segments of long sequences at once.
#include "tests/support/stage_inputs.hpp"

#include <algorithm>

namespace wyvern::testing {
namespace {

using Segment = ChunkLayout::Segment;

/// (exp(G_C - G) * K) of one chunk: kda's kg already is that.
Matrix leaving_keys(const TensorMap& t, const Vector& k, const Chunk& chunk, const Decay& decay) {
  return t.contains("kg") ? chunk.wide_keys(t.at("kg")) : decay.leaving(chunk.keys(k));
}
/// (exp(G) * Q) of one chunk: kda's qg already is that.
Matrix entering_queries(const TensorMap& t, const Vector& q, const Chunk& chunk,
                        const Decay& decay) {
  return t.contains("qg") ? chunk.wide_keys(t.at("qg")) : decay.entering(chunk.keys(q));
}

/// Copies a matrix to (segment, head) of a tensor [NS, HV, rows, columns], or back.
void put(Vector& tensor, std::size_t at, const Matrix& m) {
  for (std::int64_t r = 0; r < m.rows(); ++r)
    for (std::int64_t c = 0; c < m.cols(); ++c)
      tensor[at * static_cast<std::size_t>(m.rows() * m.cols()) +
             static_cast<std::size_t>(r * m.cols() + c)] = m[r][c];
}
Matrix get(const Vector& tensor, std::size_t at, std::int64_t rows, std::int64_t columns) {
  Matrix m(rows, columns);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      m[r][c] = tensor[at * static_cast<std::size_t>(rows * columns) +
                       static_cast<std::size_t>(r * columns + c)];
  return m;
}

void fwd_h_segment(const StageContext& c, TensorMap& t) {
  const Vector k = t.contains("kg") ? Vector{} : keys(t);
  const auto [H, HV, K, V] = c.dims;
  const std::vector<Segment> segments = c.layout.segments(c.SEG);
  Vector M(segments.size() * static_cast<std::size_t>(HV * K * K));
  Vector R(segments.size() * static_cast<std::size_t>(HV * K * V));
  for (std::size_t s = 0; s < segments.size(); ++s)
    for (std::int64_t head = 0; head < HV; ++head) {
      if (segments[s].sequence < 0 || (segments[s].last && !c.summary)) continue;
      Matrix m(K, K), r(K, V);
      for (std::int64_t i = 0; i < K; ++i) m[i][i] = 1;
      for (std::int64_t i = 0; i < segments[s].chunks; ++i) {
        const Chunk chunk(c.layout, c.dims, static_cast<std::size_t>(segments[s].slot + i), head);
        const Decay decay(chunk, decays(t));
        const Matrix W = chunk.wide_keys(t.at("w"));
        const Matrix out = transposed(leaving_keys(t, k, chunk, decay));
        r = decay.through(r) + out * (chunk.values(t.at("u")) + -1.0 * (W * r));
        m = decay.through(m) + -1.0 * (out * (W * m));
      }
      const std::size_t at = s * static_cast<std::size_t>(HV) + static_cast<std::size_t>(head);
      put(M, at, m);
      put(R, at, r);
    }
  t["segment_M"] = M;
  t["segment_R"] = R;
}

void fwd_h_combine(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  const std::vector<Segment> segments = c.layout.segments(c.SEG);
  Vector states(segments.size() * static_cast<std::size_t>(HV * K * V));
  for (std::int64_t head = 0; head < HV; ++head) {
    Matrix state(K, V);
    std::int64_t sequence = -1;
    for (std::size_t s = 0; s < segments.size(); ++s) {
      if (segments[s].sequence < 0) continue;
      if (segments[s].sequence != sequence) {
        sequence = segments[s].sequence;
        state = read_state(c, optional(t, "initial_state"), sequence, head);
      }
      const std::size_t at = s * static_cast<std::size_t>(HV) + static_cast<std::size_t>(head);
      put(states, at, state);
      if (!segments[s].last)
        state = get(t.at("segment_M"), at, K, K) * state + get(t.at("segment_R"), at, K, V);
    }
  }
  t["segment_state"] = states;
}

void fwd_h_summary(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  const std::vector<Segment> segments = c.layout.segments(c.SEG);
  const std::int64_t columns = V + (c.transition ? K : 0);
  Vector summary(static_cast<std::size_t>(c.layout.sequences() * HV * K * columns));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < HV; ++head) {
      Matrix state = read_state(c, optional(t, "initial_state"), n, head), M(K, K);
      for (std::int64_t k = 0; k < K; ++k) M[k][k] = 1;
      for (std::size_t s = 0; s < segments.size(); ++s) {
        if (segments[s].sequence != n) continue;
        const std::size_t at = s * static_cast<std::size_t>(HV) + static_cast<std::size_t>(head);
        const Matrix own = get(t.at("segment_M"), at, K, K);
        state = own * state + get(t.at("segment_R"), at, K, V);
        M = own * M;
      }
      Matrix both(K, columns);
      for (std::int64_t k = 0; k < K; ++k) {
        std::copy_n(state[k], V, both[k]);
        std::copy_n(M[k], columns - V, both[k] + V);
      }
      put(summary, static_cast<std::size_t>(n * HV + head), both);
    }
  t["summary"] = summary;
}

void fold(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  Vector order = t.at("order");
  if (c.backwards) std::reverse(order.begin(), order.end());
  Vector states = zero_states(c, order.size());
  for (std::int64_t head = 0; head < HV; ++head) {
    Matrix state(K, V);
    for (const double range : order) {
      const std::size_t at = static_cast<std::size_t>(range) * static_cast<std::size_t>(HV) +
                             static_cast<std::size_t>(head);
      put(states, at, state);
      const Matrix summary = get(t.at("summaries"), at, K, V + K);
      Matrix R(K, V), M(K, K);
      for (std::int64_t k = 0; k < K; ++k) {
        std::copy_n(summary[k], V, R[k]);
        std::copy_n(summary[k] + V, K, M[k]);
      }
      state = (c.backwards ? transposed(M) : M) * state + R;
    }
  }
  t["range_states"] = states;
}

/// dS -> dM dS + dR over a segment, from its last chunk to its first.
void bwd_dhu_segment(const StageContext& c, TensorMap& t) {
  const Vector q = t.contains("qg") ? Vector{} : queries(t);
  const Vector k = t.contains("kg") ? Vector{} : keys(t);
  const auto [H, HV, K, V] = c.dims;
  const std::vector<Segment> segments = c.layout.segments(c.SEG);
  Vector dM(segments.size() * static_cast<std::size_t>(HV * K * K));
  Vector dR(segments.size() * static_cast<std::size_t>(HV * K * V));
  for (std::size_t s = 0; s < segments.size(); ++s)
    for (std::int64_t head = 0; head < HV; ++head) {
      if (segments[s].sequence < 0 || (segments[s].first && !c.summary)) continue;
      Matrix m(K, K), r(K, V);
      for (std::int64_t i = 0; i < K; ++i) m[i][i] = 1;
      for (std::int64_t i = segments[s].chunks - 1; i >= 0; --i) {
        const Chunk chunk(c.layout, c.dims, static_cast<std::size_t>(segments[s].slot + i), head);
        const Decay decay(chunk, decays(t));
        const Matrix into = transposed(chunk.wide_keys(t.at("w")));
        const Matrix out = leaving_keys(t, k, chunk, decay);
        const Matrix outputs = transposed(entering_queries(t, q, chunk, decay));
        r = decay.through(r) + c.scale * (outputs * chunk.values(t.at("do"))) +
            -1.0 * (into * (chunk.values(t.at("dv_local")) + out * r));
        m = decay.through(m) + -1.0 * (into * (out * m));
      }
      const std::size_t at = s * static_cast<std::size_t>(HV) + static_cast<std::size_t>(head);
      put(dM, at, m);
      put(dR, at, r);
    }
  t["segment_dM"] = dM;
  t["segment_dR"] = dR;
}

void bwd_dhu_combine(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  const std::vector<Segment> segments = c.layout.segments(c.SEG);
  Vector gradients(segments.size() * static_cast<std::size_t>(HV * K * V));
  for (std::int64_t head = 0; head < HV; ++head) {
    Matrix gradient(K, V);
    for (std::size_t s = segments.size(); s-- > 0;) {
      if (segments[s].sequence < 0) continue;
      if (segments[s].last)
        gradient = read_state(c, optional(t, "dht"), segments[s].sequence, head);
      const std::size_t at = s * static_cast<std::size_t>(HV) + static_cast<std::size_t>(head);
      put(gradients, at, gradient);
      if (!segments[s].first)
        gradient = get(t.at("segment_dM"), at, K, K) * gradient + get(t.at("segment_dR"), at, K, V);
    }
  }
  t["segment_dstate"] = gradients;
}

void bwd_dhu_summary(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  const std::vector<Segment> segments = c.layout.segments(c.SEG);
  Vector entering = zero_states(c, static_cast<std::size_t>(c.layout.sequences()));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < HV; ++head) {
      Matrix gradient = read_state(c, optional(t, "dht"), n, head);
      for (std::size_t s = segments.size(); s-- > 0;) {
        if (segments[s].sequence != n) continue;
        const std::size_t at = s * static_cast<std::size_t>(HV) + static_cast<std::size_t>(head);
        gradient = get(t.at("segment_dM"), at, K, K) * gradient + get(t.at("segment_dR"), at, K, V);
      }
      put(entering, static_cast<std::size_t>(n * HV + head), gradient);
    }
  t["dsummary"] = entering;
}

/// Segments' maps of states from the operator's inputs, with a gate per key channel, per head or
/// none, and if there is `do` their maps of gradients too.
void segment_from_inputs(const StageContext& c, TensorMap& t, bool channels) {
  TensorMap own;
  for (const char* const name : {"q", "k", "v", "beta", "g", "A_log", "dt_bias", "do"})
    if (const auto at = t.find(name); at != t.end()) own.insert(*at);
  const bool reverse = own.contains("do");
  own.try_emplace("q", own.at("k"));  // the scores of queries are not asked for
  for (const std::string row : {"q", "k"})
    if (c.qk_l2norm) {
      TensorMap rows{{"x", own.at(row)}};
      run_reference("l2norm_rstd", c, rows);
      own[row + "_rstd"] = rows.at("rstd");
    }
  if (own.contains("g")) {
    if (c.gate_in_kernel) run_reference(channels ? "kda_gate" : "gate", c, own);
    run_reference("chunk_local_cumsum", c, own);
  }
  own.erase(channels ? "G" : "Gk");
  for (const char* const stage :
       {channels ? "kda_intra" : "scaled_dot_kkt", "solve_tril",
        channels ? "kda_recompute_w_u" : "recompute_w_u", "fwd_h_segment"})
    run_reference(stage, c, own);
  t["share_M"] = own.at("segment_M");
  t["share_R"] = own.at("segment_R");
  if (!reverse) return;
  for (const char* const stage : {"bwd_dv_local", "bwd_dhu_segment"}) run_reference(stage, c, own);
  t["share_dM"] = own.at("segment_dM");
  t["share_dR"] = own.at("segment_dR");
}

void kda_segment(const StageContext& c, TensorMap& t) { segment_from_inputs(c, t, true); }
void delta_segment(const StageContext& c, TensorMap& t) { segment_from_inputs(c, t, false); }

/// Says where a pass begins, and does nothing itself.
void begin_pass(const StageContext&, TensorMap&) {}

}  // namespace

const StageReferences& segment_references() {
  static const StageReferences references{
      {"kda_segment", kda_segment},           {"kda_resume", begin_pass},
      {"delta_segment", delta_segment},       {"delta_resume", begin_pass},
      {"delta_scans_segment", delta_segment}, {"delta_scans_resume", begin_pass},
      {"delta_reverse_resume", begin_pass},   {"fwd_h_segment", fwd_h_segment},
      {"fwd_h_combine", fwd_h_combine},       {"bwd_dhu_segment", bwd_dhu_segment},
      {"bwd_dhu_combine", bwd_dhu_combine},   {"fwd_h_summary", fwd_h_summary},
      {"bwd_dhu_summary", bwd_dhu_summary},   {"fold", fold}};
  return references;
}

}  // namespace wyvern::testing
