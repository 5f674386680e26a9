// References of the forward stages that delta_rule, gated_delta_rule and kda share.
#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {

Vector solve_tril(const ChunkLayout& layout, std::int64_t HV, const Vector& A) {
  Vector Tinv(A.size());
  const Dims dims{HV, HV, 1, 1};
  for_each_chunk(layout, dims, [&](const Chunk& chunk) {
    const Matrix lower_part = chunk.square(A);
    Matrix inverse(chunk.rows(), chunk.rows());
    for (std::int64_t r = 0; r < chunk.rows(); ++r) {
      // Row r of (I + A) X = I by forward substitution.
      for (std::int64_t s = 0; s < r; ++s) add(inverse[r], -lower_part[r][s], inverse[s], s + 1);
      inverse[r][r] = 1;
    }
    chunk.write(Tinv, inverse);
  });
  return Tinv;
}

namespace {

void scaled_dot_kkt(const StageContext& c, TensorMap& t) {
  const Vector k = keys(t), beta = beta_factors(c, t);
  Vector A = zeros(c, c.layout.BT);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Matrix K = chunk.keys(k);
    chunk.write(A, scaled(chunk.scalars(beta), Decay(chunk, decays(t)).product(K, K, true)));
  });
  t["A"] = A;
}

void solve(const StageContext& c, TensorMap& t) {
  t["Tinv"] = solve_tril(c.layout, c.dims.HV, t.at("A"));
}

void recompute_w_u(const StageContext& c, TensorMap& t) {
  const Vector k = keys(t), beta = beta_factors(c, t);
  Vector w = zeros(c, c.dims.K), u = zeros(c, c.dims.V);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Matrix Tinv = lower(chunk.square(t.at("Tinv")), false);
    const Matrix K = Decay(chunk, decays(t)).entering(chunk.keys(k));
    chunk.write(w, Tinv * scaled(chunk.scalars(beta), K));
    chunk.write(u, Tinv * scaled(chunk.scalars(beta), chunk.values(t.at("v"))));
  });
  t["w"] = w;
  t["u"] = u;
}

/// (exp(G_C - G) * K) of one chunk: kda's kg already is that.
Matrix leaving_keys(const TensorMap& t, const Vector& k, const Chunk& chunk, const Decay& decay) {
  return t.contains("kg") ? chunk.wide_keys(t.at("kg")) : decay.leaving(chunk.keys(k));
}

/// The state that enters sequence n: the first of its segments' states where there are such.
Matrix entering_state(const StageContext& c, const TensorMap& t, std::int64_t n,
                      std::int64_t head) {
  if (!t.contains("segment_state")) return read_state(c, optional(t, "initial_state"), n, head);
  const std::vector<ChunkLayout::Segment> segments = c.layout.segments(c.SEG);
  std::int64_t first = 0;
  while (segments[static_cast<std::size_t>(first)].sequence != n) ++first;
  StageContext key_first = c;
  key_first.state_v_first = false;
  return read_state(key_first, t.at("segment_state"), first, head);
}

void fwd_h(const StageContext& c, TensorMap& t) {
  const Vector k = t.contains("kg") ? Vector{} : keys(t);
  Vector h = zero_states(c, c.layout.slots.size()), v_new = zeros(c, c.dims.V);
  Vector final_state = zero_states(c, static_cast<std::size_t>(c.layout.sequences()));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < c.dims.HV; ++head) {
      Matrix S = entering_state(c, t, n, head);
      const auto first = static_cast<std::size_t>(n);
      for (std::int64_t slot = c.layout.chunk_offsets[first];
           slot < c.layout.chunk_offsets[first + 1]; ++slot) {
        const Chunk chunk(c.layout, c.dims, static_cast<std::size_t>(slot), head);
        const Decay decay(chunk, decays(t));
        chunk.write_state(h, S);
        const Matrix v = chunk.values(t.at("u")) + -1.0 * (chunk.wide_keys(t.at("w")) * S);
        chunk.write(v_new, v);
        S = decay.through(S) + transposed(leaving_keys(t, k, chunk, decay)) * v;
      }
      write_state(c, final_state, n, head, S);
    }
  t["h"] = h;
  t["v_new"] = v_new;
  t["final_state"] = final_state;
}

void fwd_o(const StageContext& c, TensorMap& t) {
  const Vector q = queries(t), k = keys(t);
  Vector o = zeros(c, c.dims.V);
  for_each_chunk(c.layout, c.dims, [&](const Chunk& chunk) {
    const Decay decay(chunk, decays(t));
    const Matrix Q = chunk.keys(q), P = decay.product(Q, chunk.keys(k), false);
    chunk.write(o, c.scale * (decay.entering(Q) * chunk.state(t.at("h")) +
                              P * chunk.values(t.at("v_new"))));
  });
  t["o"] = o;
}

void transpose_states(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  const Vector& h = t.at("h");
  Vector out(h.size());
  for (std::size_t i = 0; i < h.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i), within = at % (K * V);
    out[static_cast<std::size_t>(at - within + within % V * K + within / V)] = h[i];
  }
  t["h_v_first"] = out;
}

}  // namespace

const StageReferences& forward_references() {
  static const StageReferences references{{"scaled_dot_kkt", scaled_dot_kkt},
                                          {"solve_tril", solve},
                                          {"recompute_w_u", recompute_w_u},
                                          {"fwd_h", fwd_h},
                                          {"fwd_o", fwd_o},
                                          {"transpose_states", transpose_states}};
  return references;
}

}  // namespace wyvern::testing
