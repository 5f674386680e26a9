// References of gdn2's own stages: kda's, with a gate of one number an element in beta's place,
// erase for keys and write for values; gradients by the full formulas.
#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {
namespace {

constexpr bool kStrict = true;

void gdn2_intra(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  Vector Aqk = zeros(c, c.layout.BT), A = Aqk;
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix K = chunk.keys(k), erase = chunk.wide_keys(t.at("erase"));
    chunk.write(Aqk, decay.product(chunk.keys(q), K, !kStrict));
    chunk.write(A, decay.product(hadamard(erase, K), K, kStrict));
  });
  t["Aqk"] = Aqk;
  t["A"] = A;
}

void gdn2_recompute_w_u(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  Vector w = zeros(c, c.dims.K), qg = w, kg = w, u = zeros(c, c.dims.V);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Tinv = lower(chunk.square(t.at("Tinv")), !kStrict), K = chunk.keys(k);
    const Matrix erase = chunk.wide_keys(t.at("erase")), write = chunk.values(t.at("write"));
    chunk.write(w, Tinv * hadamard(erase, decay.entering(K)));
    chunk.write(u, Tinv * hadamard(write, chunk.values(t.at("v"))));
    chunk.write(qg, decay.entering(chunk.keys(q)));
    chunk.write(kg, decay.leaving(K));
  });
  t["w"] = w;
  t["u"] = u;
  t["qg"] = qg;
  t["kg"] = kg;
}

void gdn2_chunk_bwd(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  Vector dq = zeros(c, c.dims.K), dk = dq, dG = dq, derase = dq;
  Vector dv = zeros(c, c.dims.V), dwrite = dv;
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Q = chunk.keys(q), K = chunk.keys(k), expK = decay.entering(K);
    const Matrix V = chunk.values(t.at("v")), V_new = chunk.values(t.at("v_new"));
    const Matrix erase = chunk.wide_keys(t.at("erase")), write = chunk.values(t.at("write"));
    const Matrix S = chunk.state(t.at("h")), dS = chunk.state(t.at("dh"));
    const Matrix dO = chunk.values(t.at("do")), dU = chunk.values(t.at("du"));
    const Matrix Tinv = lower(chunk.square(t.at("Tinv")), !kStrict),
                 dW = -1.0 * (dU * transposed(S));
    const Matrix dTinv =
        dU * transposed(hadamard(write, V)) + dW * transposed(hadamard(erase, expK));
    const Matrix X = transposed(Tinv) * dU, Y = transposed(Tinv) * dW;
    const Matrix dP = c.scale * lower(dO * transposed(V_new), !kStrict);
    const Matrix dA = -1.0 * lower(transposed(Tinv) * dTinv * transposed(Tinv), kStrict);

    const Matrix erasing = hadamard(erase, K);
    const Matrix dQ = c.scale * decay.entering(dO * transposed(S));
    const Matrix dK_leaving = decay.leaving(V_new * transposed(dS));
    // Of the erasing keys: through W and, as rows, through A.
    const Matrix d_erasing = decay.entering(Y) + decay.row_sums(dA, K, kStrict);
    const Matrix dK_A = decay.column_sums(dA, erasing, kStrict);
    chunk.write(dq, dQ + decay.row_sums(dP, K, !kStrict));
    chunk.write(
        dk, dK_leaving + decay.column_sums(dP, Q, !kStrict) + hadamard(erase, d_erasing) + dK_A);
    chunk.write(derase, hadamard(K, d_erasing));
    // A row's terms with itself cancel between Q and K.
    chunk.write(dG, hadamard(Q, dQ + decay.row_sums(dP, K, kStrict)) +
                        leaving_gates(K, dK_leaving, dS, decay.through(S)) +
                        hadamard(erasing, d_erasing) +
                        -1.0 * hadamard(K, decay.column_sums(dP, Q, kStrict) + dK_A));
    chunk.write(dv, hadamard(write, X));
    chunk.write(dwrite, hadamard(V, X));
  });
  t["dq"] = dq;
  t["dk"] = dk;
  t["dv"] = dv;
  t["derase"] = derase;
  t["dwrite"] = dwrite;
  t["dGk"] = dG;
}

}  // namespace

const StageReferences& gdn2_references() {
  static const StageReferences references{{"gdn2_intra", gdn2_intra},
                                          {"gdn2_recompute_w_u", gdn2_recompute_w_u},
                                          {"gdn2_chunk_bwd", gdn2_chunk_bwd}};
  return references;
}

}  // namespace wyvern::testing
