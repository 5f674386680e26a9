// References of the stages whose gate decays every key channel by itself; gradients by the
// full formulas of section 3 of runtime/SPECIFICATION.md.
#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {

Matrix leaving_gates(const Matrix& K, const Matrix& dK_leaving, const Matrix& dS,
                     const Matrix& S_through) {
  const Matrix leaving = hadamard(K, dK_leaving);
  Matrix dG(K.rows(), K.cols());
  const std::int64_t last = K.rows() - 1;
  const Vector states = row_dots(dS, S_through);
  add(dG[last], 1, states.data(), K.cols());
  for (std::int64_t r = 0; r < last; ++r) {
    add(dG[r], -1, leaving[r], K.cols());
    add(dG[last], 1, leaving[r], K.cols());
  }
  return dG;
}

namespace {

constexpr bool kStrict = true;

/// What stands before keys that erase, and before values: beta, or a gate an element for each.
class Rates {
 public:
  const bool elements;

  Rates(const StageContext& c, const TensorMap& t)
      : elements(t.contains("erase")), t_(t), betas_(elements ? Vector{} : beta_factors(c, t)) {}

  Matrix of_keys(const Chunk& chunk, const Matrix& x) const {
    if (elements) return hadamard(chunk.wide_keys(t_.at("erase")), x);
    return scaled(chunk.scalars(betas_), x);
  }
  Matrix of_values(const Chunk& chunk, const Matrix& x) const {
    if (elements) return hadamard(chunk.values(t_.at("write")), x);
    return scaled(chunk.scalars(betas_), x);
  }

 private:
  const TensorMap& t_;
  Vector betas_;
};

void kda_intra(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  const Rates rates(c, t);
  Vector Aqk = zeros(c, c.layout.BT), A = Aqk;
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Q = chunk.keys(q), K = chunk.keys(k);
    chunk.write(Aqk, decay.product(Q, K, !kStrict));
    chunk.write(A, decay.product(rates.of_keys(chunk, K), K, kStrict));
  });
  t["Aqk"] = Aqk;
  t["A"] = A;
}

void kda_recompute_w_u(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  const Rates rates(c, t);
  Vector w = zeros(c, c.dims.K), qg = w, kg = w, u = zeros(c, c.dims.V);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Tinv = lower(chunk.square(t.at("Tinv")), !kStrict), K = chunk.keys(k);
    chunk.write(w, Tinv * rates.of_keys(chunk, decay.entering(K)));
    chunk.write(u, Tinv * rates.of_values(chunk, chunk.values(t.at("v"))));
    chunk.write(qg, decay.entering(chunk.keys(q)));
    chunk.write(kg, decay.leaving(K));
  });
  t["w"] = w;
  t["u"] = u;
  t["qg"] = qg;
  t["kg"] = kg;
}

void kda_fwd_o(const StageContext& c, TensorMap& t) {
  Vector o = zeros(c, c.dims.V);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Matrix P = lower(chunk.square(t.at("Aqk")), !kStrict);
    chunk.write(o, c.scale * (chunk.wide_keys(t.at("qg")) * chunk.state(t.at("h")) +
                              P * chunk.values(t.at("v_new"))));
  });
  t["o"] = o;
}

void kda_bwd_dv_local(const StageContext& c, TensorMap& t) {
  Vector dv_local = zeros(c, c.dims.V);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Matrix P = lower(chunk.square(t.at("Aqk")), !kStrict);
    chunk.write(dv_local, c.scale * (transposed(P) * chunk.values(t.at("do"))));
  });
  t["dv_local"] = dv_local;
}

void kda_bwd_dqkg(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  const Rates rates(c, t);
  Vector dq = zeros(c, c.dims.K), dk = dq, dG = dq, dv = zeros(c, c.dims.V);
  Vector dbeta = zeros(c, 1), derase = dq, dwrite = dv;
  Vector dAqk = zeros(c, c.layout.BT), dA = dAqk;
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Q = chunk.keys(q), K = chunk.keys(k), expK = decay.entering(K);
    const Matrix V = chunk.values(t.at("v")), V_new = chunk.values(t.at("v_new"));
    const Matrix S = chunk.state(t.at("h")), dS = chunk.state(t.at("dh"));
    const Matrix dO = chunk.values(t.at("do")), dU = chunk.values(t.at("du"));
    const Matrix Tinv = lower(chunk.square(t.at("Tinv")), !kStrict),
                 dW = -1.0 * (dU * transposed(S));
    const Matrix dTinv =
        dU * transposed(rates.of_values(chunk, V)) + dW * transposed(rates.of_keys(chunk, expK));
    const Matrix X = transposed(Tinv) * dU, Y = transposed(Tinv) * dW;

    const Matrix dQ = c.scale * decay.entering(dO * transposed(S));
    const Matrix dK_leaving = decay.leaving(V_new * transposed(dS));
    const Matrix dK_W = rates.of_keys(chunk, decay.entering(Y));
    chunk.write(dq, dQ);
    chunk.write(dk, dK_leaving + dK_W);
    chunk.write(dG, hadamard(Q, dQ) + hadamard(K, dK_W) +
                        leaving_gates(K, dK_leaving, dS, decay.through(S)));
    chunk.write(dv, rates.of_values(chunk, X));
    chunk.write(dwrite, hadamard(V, X));
    chunk.write(derase, hadamard(K, decay.entering(Y)));
    Vector dbeta_rows = row_dots(X, V);
    add(dbeta_rows.data(), 1, row_dots(Y, expK).data(), chunk.rows());
    chunk.write(dbeta, dbeta_rows);
    chunk.write(dAqk, c.scale * lower(dO * transposed(V_new), !kStrict));
    chunk.write(dA, -1.0 * lower(transposed(Tinv) * dTinv * transposed(Tinv), kStrict));
  });
  t["dq_inter"] = dq;
  t["dk_inter"] = dk;
  t["dGk_inter"] = dG;
  t["dv"] = dv;
  if (rates.elements)
    t["derase_inter"] = derase, t["dwrite"] = dwrite;
  else
    t["dbeta_inter"] = dbeta;
  t["dAqk"] = dAqk;
  t["dA"] = dA;
}

void kda_intra_bwd(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  const Rates rates(c, t);
  const Vector slopes = rates.elements ? Vector{} : beta_slopes(c, t);
  Vector dq = zeros(c, c.dims.K), dk = dq, dG = dq, derase = dq, dbeta = zeros(c, 1);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Q = chunk.keys(q), K = chunk.keys(k);
    const Matrix dP = lower(chunk.square(t.at("dAqk")), !kStrict);
    const Matrix dA = lower(chunk.square(t.at("dA")), kStrict);
    const Matrix p = decay.row_sums(dA, K, kStrict), by_row = rates.of_keys(chunk, p);
    const Matrix by_column = decay.column_sums(dA, rates.of_keys(chunk, K), kStrict);
    chunk.write(dq, chunk.wide_keys(t.at("dq_inter")) + decay.row_sums(dP, K, !kStrict));
    chunk.write(dk, chunk.wide_keys(t.at("dk_inter")) + decay.column_sums(dP, Q, !kStrict) +
                        by_row + by_column);
    // A row's terms with itself cancel between Q and K.
    chunk.write(dG, chunk.wide_keys(t.at("dGk_inter")) +
                        hadamard(Q, decay.row_sums(dP, K, kStrict)) +
                        -1.0 * hadamard(K, decay.column_sums(dP, Q, kStrict)) +
                        hadamard(K, by_row) + -1.0 * hadamard(K, by_column));
    if (rates.elements)
      return chunk.write(derase, chunk.wide_keys(t.at("derase_inter")) + hadamard(K, p));
    Vector dbeta_rows = chunk.scalars(t.at("dbeta_inter"));
    add(dbeta_rows.data(), 1, row_dots(dA, decay.product(K, K, kStrict)).data(), chunk.rows());
    const Vector slope = chunk.scalars(slopes);
    for (std::size_t r = 0; r < dbeta_rows.size(); ++r) dbeta_rows[r] *= slope[r];
    chunk.write(dbeta, dbeta_rows);
  });
  t["dq"] = dq;
  t["dk"] = dk;
  t["dGk"] = dG;
  t[rates.elements ? "derase" : "dbeta"] = rates.elements ? derase : dbeta;
}

}  // namespace

const StageReferences& kda_references() {
  static const StageReferences references{
      {"kda_intra", kda_intra},       {"kda_recompute_w_u", kda_recompute_w_u},
      {"kda_fwd_o", kda_fwd_o},       {"kda_bwd_dv_local", kda_bwd_dv_local},
      {"kda_bwd_dqkg", kda_bwd_dqkg}, {"kda_intra_bwd", kda_intra_bwd}};
  return references;
}

}  // namespace wyvern::testing
