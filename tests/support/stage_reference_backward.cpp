// References of the backward stages that delta_rule and gated_delta_rule share, and of the reverse
// state scan, by the full formulas of section 3 of runtime/SPECIFICATION.md.
#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {
namespace {

/// In gradients of gates, terms that cancel in exact arithmetic (a row against itself) are left out
/// of both sums, so that gradients that must be 0 are 0.
constexpr bool kStrict = true;

void bwd_dv_local(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  Vector dv_local = zeros(c, c.dims.V);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Matrix P = Decay(chunk, decays(t)).product(chunk.keys(q), chunk.keys(k), !kStrict);
    chunk.write(dv_local, c.scale * (transposed(P) * chunk.values(t.at("do"))));
  });
  t["dv_local"] = dv_local;
}

/// One chunk of the reverse scan: makes dS' of the chunk the one of the chunk before.
class ReverseScan {
 public:
  ReverseScan(const StageContext& c, const TensorMap& t)
      : c_(c),
        t_(t),
        q_(t.contains("qg") ? Vector{} : queries(t)),
        k_(t.contains("kg") ? Vector{} : keys(t)) {}

  void step(const Chunk& chunk, Matrix& dS, Vector& du) const {
    const Decay decay(chunk, decays(t_));
    const Matrix Q = q_.empty() ? chunk.wide_keys(t_.at("qg")) : decay.entering(chunk.keys(q_));
    const Matrix K = k_.empty() ? chunk.wide_keys(t_.at("kg")) : decay.leaving(chunk.keys(k_));
    const Matrix dV = chunk.values(t_.at("dv_local")) + K * dS;
    chunk.write(du, dV);
    dS = decay.through(dS) + c_.scale * (transposed(Q) * chunk.values(t_.at("do"))) +
         -1.0 * (transposed(chunk.wide_keys(t_.at("w"))) * dV);
  }

 private:
  const StageContext& c_;
  const TensorMap& t_;
  Vector q_, k_;
};

/// The gradient of the state that leaves sequence n: of its last segment where there are such.
Matrix leaving_gradient(const StageContext& c, const TensorMap& t, std::int64_t n,
                        std::int64_t head) {
  if (!t.contains("segment_dstate")) return read_state(c, optional(t, "dht"), n, head);
  const std::vector<ChunkLayout::Segment> segments = c.layout.segments(c.SEG);
  std::int64_t last = std::ssize(segments) - 1;
  while (segments[static_cast<std::size_t>(last)].sequence != n) --last;
  StageContext key_first = c;
  key_first.state_v_first = false;
  return read_state(key_first, t.at("segment_dstate"), last, head);
}

void bwd_dhu(const StageContext& c, TensorMap& t) {
  const ReverseScan scan(c, t);
  Vector dh = zero_states(c, c.layout.slots.size()), du = zeros(c, c.dims.V);
  Vector dinitial = zero_states(c, static_cast<std::size_t>(c.layout.sequences()));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < c.dims.HV; ++head) {
      Matrix dS = leaving_gradient(c, t, n, head);
      const auto first = static_cast<std::size_t>(n);
      for (std::int64_t slot = c.layout.chunk_offsets[first + 1] - 1;
           slot >= c.layout.chunk_offsets[first]; --slot) {
        const Chunk chunk(c.layout, c.dims, static_cast<std::size_t>(slot), head);
        chunk.write_state(dh, dS);
        scan.step(chunk, dS, du);
      }
      write_state(c, dinitial, n, head, dS);
    }
  t["dh"] = dh;
  t["du"] = du;
  t["dinitial_state"] = dinitial;
}

void bwd_dqkwg(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  Vector dq = zeros(c, c.dims.K), dk = dq, dw = dq, dG = zeros(c, 1);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Q = chunk.keys(q), K = chunk.keys(k), S = chunk.state(t.at("h"));
    const Matrix V = chunk.values(t.at("v_new")), dO = chunk.values(t.at("do"));
    const Matrix dS = chunk.state(t.at("dh"));
    const Matrix dP = c.scale * lower(dO * transposed(V), !kStrict);
    const Matrix dQ_inter = c.scale * decay.entering(dO * transposed(S));
    const Matrix dK_inter = decay.leaving(V * transposed(dS));
    chunk.write(dq, dQ_inter + decay.row_sums(dP, K, !kStrict));
    chunk.write(dk, decay.column_sums(dP, Q, !kStrict) + dK_inter);
    chunk.write(dw, -1.0 * (chunk.values(t.at("du")) * transposed(S)));

    Vector rows = row_dots(dQ_inter + decay.row_sums(dP, K, kStrict), Q);
    const Vector dK_dots = row_dots(decay.column_sums(dP, Q, kStrict), K);
    const Vector leaving = row_dots(dK_inter, K), states = row_dots(dS, decay.through(S));
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r] -= dK_dots[r];
      if (r + 1 == rows.size()) continue;
      rows[r] -= leaving[r];
      rows.back() += leaving[r];
    }
    for (const double x : states) rows.back() += x;
    chunk.write(dG, rows);
  });
  t["dq"] = dq;
  t["dk_qk"] = dk;
  t["dw"] = dw;
  t["dG_qk"] = dG;
}

/// -strict_tril(Tinv^T dTinv Tinv^T).
Matrix inverse_gradient(const Matrix& Tinv, const Matrix& dTinv) {
  return -1.0 * lower(transposed(Tinv) * dTinv * transposed(Tinv), kStrict);
}

void wy_bwd(const StageContext& c, TensorMap& t) {
  const Vector k = keys(t), betas = beta_factors(c, t), slopes = beta_slopes(c, t);
  Vector dk = zeros(c, c.dims.K), dv = zeros(c, c.dims.V), dbeta = zeros(c, 1), dG = dbeta;
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Vector beta = chunk.scalars(betas);
    const Matrix K = chunk.keys(k), V = chunk.values(t.at("v")), expK = decay.entering(K);
    const Matrix Tinv = lower(chunk.square(t.at("Tinv")), !kStrict);
    const Matrix dU = chunk.values(t.at("du")), dW = chunk.wide_keys(t.at("dw"));
    const Matrix dTinv = dU * transposed(scaled(beta, V)) + dW * transposed(scaled(beta, expK));
    const Matrix dA = inverse_gradient(Tinv, dTinv), M = scaled(beta, dA);
    const Matrix X = transposed(Tinv) * dU, Y = transposed(Tinv) * dW;
    const Matrix by_row = decay.row_sums(M, K, kStrict),
                 by_column = decay.column_sums(M, K, kStrict);
    const Matrix dK_W = scaled(beta, decay.entering(Y));
    chunk.write(dk, chunk.wide_keys(t.at("dk_qk")) + dK_W + by_row + by_column);
    chunk.write(dv, scaled(beta, X));

    Vector dbeta_rows = row_dots(X, V), dG_rows = row_dots(K, dK_W);
    const Vector from_W = row_dots(Y, expK), from_A = row_dots(dA, decay.product(K, K, kStrict));
    const Vector rows = row_dots(K, by_row), columns = row_dots(K, by_column);
    const Vector slope = chunk.scalars(slopes);
    for (std::size_t r = 0; r < dbeta_rows.size(); ++r) {
      dbeta_rows[r] = slope[r] * (dbeta_rows[r] + from_W[r] + from_A[r]);
      dG_rows[r] += rows[r] - columns[r];
    }
    if (t.contains("dG_qk"))
      add(dG_rows.data(), 1, chunk.scalars(t.at("dG_qk")).data(), chunk.rows());
    chunk.write(dbeta, dbeta_rows);
    chunk.write(dG, dG_rows);
  });
  t["dk"] = dk;
  t["dv"] = dv;
  t["dbeta"] = dbeta;
  t["dG"] = dG;
}

}  // namespace

const StageReferences& backward_references() {
  static const StageReferences references{{"bwd_dv_local", bwd_dv_local},
                                          {"bwd_dhu", bwd_dhu},
                                          {"bwd_dqkwg", bwd_dqkwg},
                                          {"wy_bwd", wy_bwd}};
  return references;
}

}  // namespace wyvern::testing
