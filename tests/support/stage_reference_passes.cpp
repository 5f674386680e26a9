// References of the backward passes in two and three kernels, written from
// templates/backward/stages.hpp.
#include <algorithm>
#include <cmath>

#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {
namespace {

/// The inputs as all stages prepare them: rows with their norms, sums of gates, of channels or
/// of heads, factors of beta.
TensorMap prepared(const StageContext& c, const TensorMap& t, bool of_channels = false) {
  TensorMap own;
  for (const char* const name : {"q", "k", "beta", "erase", "write", "g", "A_log", "dt_bias"})
    if (const auto at = t.find(name); at != t.end()) own.insert(*at);
  if (c.qk_l2norm)
    for (const std::string x : {"q", "k"}) {
      TensorMap rows{{"x", own.at(x)}};
      run_reference("l2norm_rstd", c, rows);
      own[x + "_rstd"] = rows.at("rstd");
    }
  if (own.contains("g")) {
    if (c.gate_in_kernel) run_reference(of_channels ? "kda_gate" : "gate", c, own);
    run_reference("chunk_local_cumsum", c, own);
    own.erase(of_channels ? "G" : "Gk");
  }
  return own;
}

/// beta, at least 2^-40 from 0.
Vector divisors(Vector beta) {
  for (double& b : beta)
    if (std::abs(b) < 0x1p-40) b = std::signbit(b) ? -0x1p-40 : 0x1p-40;
  return beta;
}

/// The weights of rows: beta; 1 where elementwise gates replace it.
Vector row_rates(const StageContext& c, const TensorMap& own) {
  if (own.contains("erase")) return Vector(zeros(c, 1).size(), 1.0);
  return divisors(beta_factors(c, own));
}

Matrix ones(std::int64_t rows, std::int64_t cols) {
  Matrix m(rows, cols);
  std::fill_n(m[0], rows * cols, 1.0);
  return m;
}

/// (I + A)^-1 x for a strictly lower triangular A, or with A transposed.
Matrix solved(const Matrix& A, Matrix x, bool transpose) {
  const std::int64_t n = A.rows();
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t r = transpose ? n - 1 - i : i;
    for (std::int64_t j = 0; j < i; ++j) {
      const std::int64_t s = transpose ? n - 1 - j : j;
      add(x[r], -(transpose ? A[s][r] : A[r][s]), x[s], x.cols());
    }
  }
  return x;
}

Vector inverses(Vector x) {
  for (double& each : x) each = 1 / each;
  return x;
}

/// Columns times factors.
Matrix by_columns(Matrix m, const Vector& factors) {
  for (std::int64_t r = 0; r < m.rows(); ++r)
    for (std::int64_t s = 0; s < m.cols(); ++s) m[r][s] *= factors[static_cast<std::size_t>(s)];
  return m;
}

/// One chunk's rows and decays. `erasing` are keys where they read the state.
struct Rows {
  Chunk chunk;
  Decay decay;
  Matrix Q, K, erasing;
  Vector b;

  Rows(const StageContext& c, const TensorMap& own, const Vector& q, const Vector& k,
       const Vector& beta, std::size_t slot, std::int64_t head)
      : chunk(c.layout, c.dims, slot, head),
        decay(chunk, decays(own)),
        Q(chunk.keys(q)),
        K(chunk.keys(k)),
        erasing(own.contains("erase") ? hadamard(chunk.wide_keys(own.at("erase")), K) : K),
        b(chunk.scalars(beta)) {}
};

/// Scales by norms of each chunk's rows of q, then of k: 0 behind its last one.
Vector row_scales(const StageContext& c, const TensorMap& own) {
  const std::int64_t BT = c.layout.BT, NT = std::ssize(c.layout.slots);
  Vector all(static_cast<std::size_t>(NT * c.dims.HV * 2 * BT));
  for (std::int64_t slot = 0; slot < NT; ++slot)
    for (std::int64_t head = 0; head < c.dims.HV; ++head) {
      if (c.layout.slots[static_cast<std::size_t>(slot)].sequence < 0) continue;
      const Chunk chunk(c.layout, c.dims, static_cast<std::size_t>(slot), head);
      for (const bool of_k : {false, true}) {
        const Vector scales = chunk.read(own.at(of_k ? "k_rstd" : "q_rstd"), c.dims.H, 1).data();
        std::copy(scales.begin(), scales.end(),
                  all.begin() + ((slot * c.dims.HV + head) * 2 + (of_k ? 1 : 0)) * BT);
      }
    }
  return all;
}

/// A matrix at place `at` of a tensor [..., rows, columns] that has room for `rows` of them.
Matrix get(const Vector& tensor, std::int64_t at, std::int64_t rows, std::int64_t columns,
           std::int64_t used) {
  Matrix m(used, columns);
  std::copy_n(tensor.begin() + at * rows * columns, used * columns, m[0]);
  return m;
}
void put(Vector& tensor, std::int64_t at, std::int64_t rows, const Matrix& m) {
  std::copy_n(m[0], m.rows() * m.cols(), tensor.begin() + at * rows * m.cols());
}

/// The same for square matrices, whose first rows and columns are used.
Matrix get_corner(const Vector& tensor, std::int64_t at, std::int64_t rows, std::int64_t used) {
  Matrix m(used, used);
  for (std::int64_t r = 0; r < used; ++r)
    std::copy_n(tensor.begin() + (at * rows + r) * rows, used, m[r]);
  return m;
}
void put_corner(Vector& tensor, std::int64_t at, std::int64_t rows, const Matrix& m) {
  for (std::int64_t r = 0; r < m.rows(); ++r)
    std::copy_n(m[r], m.cols(), tensor.begin() + (at * rows + r) * rows);
}

void delta_states(const StageContext& c, TensorMap& t) {
  const TensorMap own = prepared(c, t);
  const Vector q = queries(own), k = keys(own), beta = divisors(beta_factors(c, own));
  const auto [H, HV, K, V] = c.dims;
  const std::int64_t BT = c.layout.BT, NT = std::ssize(c.layout.slots);
  Vector states(static_cast<std::size_t>(NT * HV * K * V));
  Vector z(static_cast<std::size_t>(NT * HV * BT * V));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < HV; ++head) {
      const auto sequence = static_cast<std::size_t>(n);
      const std::int64_t begin = c.layout.chunk_offsets[sequence],
                         end = c.layout.chunk_offsets[sequence + 1];
      Matrix S = read_state(c, optional(t, "initial_state"), n, head);
      for (std::int64_t slot = begin; slot < end; ++slot) {
        const Rows x(c, own, q, k, beta, static_cast<std::size_t>(slot), head);
        put(states, slot * HV + head, V, transposed(S));
        const Matrix A = by_columns(x.decay.product(x.K, x.K, true), x.b);
        const Matrix Z =
            solved(A, x.chunk.values(t.at("v")) + -1.0 * (x.decay.entering(x.K) * S), false);
        put(z, slot * HV + head, BT, Z);
        S = x.decay.through(S) + transposed(x.decay.leaving(x.K)) * scaled(x.b, Z);
      }
    }
  t["states"] = states;
  t["z"] = z;
}

void delta_reverse(const StageContext& c, TensorMap& t) {
  const TensorMap own = prepared(c, t);
  const Vector q = queries(own), k = keys(own), beta = divisors(beta_factors(c, own));
  const auto [H, HV, K, V] = c.dims;
  Vector dstates(c.layout.slots.size() * static_cast<std::size_t>(HV * K * V)), dv = zeros(c, V);
  Vector dinitial = zero_states(c, static_cast<std::size_t>(c.layout.sequences()));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < HV; ++head) {
      const auto sequence = static_cast<std::size_t>(n);
      const std::int64_t begin = c.layout.chunk_offsets[sequence],
                         end = c.layout.chunk_offsets[sequence + 1];
      Matrix dS = read_state(c, optional(t, "dht"), n, head);
      for (std::int64_t slot = end - 1; slot >= begin; --slot) {
        const Rows x(c, own, q, k, beta, static_cast<std::size_t>(slot), head);
        put(dstates, slot * HV + head, V, transposed(dS));
        const Matrix A = by_columns(x.decay.product(x.K, x.K, true), x.b);
        const Matrix P = c.scale * by_columns(x.decay.product(x.Q, x.K, false), x.b);
        const Matrix dO = x.chunk.values(t.at("do"));
        const Matrix dV =
            solved(A, transposed(P) * dO + scaled(x.b, x.decay.leaving(x.K) * dS), true);
        x.chunk.write(dv, dV);
        dS = x.decay.through(dS) + c.scale * (transposed(x.decay.entering(x.Q)) * dO) +
             -1.0 * (transposed(x.decay.entering(x.K)) * dV);
      }
      write_state(c, dinitial, n, head, dS);
    }
  t["dstates"] = dstates;
  t["dv"] = dv;
  t["dinitial_state"] = dinitial;
  if (c.qk_l2norm) t["row_scales"] = row_scales(c, own);
}

void delta_scans(const StageContext& c, TensorMap& t) {
  delta_states(c, t);
  delta_reverse(c, t);
}

/// What has the states that enter chunks: delta_scans, kda_scans or a forward pass.
enum class Scan : std::uint8_t { delta, kda, kept };

/// delta_gradient, kda_gradient or delta_gradient_kept.
void gradients(const StageContext& c, TensorMap& t, Scan scan) {
  const bool of_channels = scan == Scan::kda, kept = scan == Scan::kept;
  TensorMap own = prepared(c, t, of_channels);
  const bool elements = own.contains("erase");
  const Vector q = queries(own), k = keys(own), beta = row_rates(c, own),
               slopes = elements ? beta : beta_slopes(c, own);
  const auto [H, HV, K, V] = c.dims;
  Vector dq = zeros(c, K), dk = dq, dbeta = zeros(c, 1), dG = of_channels ? dq : dbeta;
  Vector derase = dq, dv = zeros(c, V), dwrite = dv;
  for (std::size_t slot = 0; slot < c.layout.slots.size(); ++slot)
    for (std::int64_t head = 0; head < HV && c.layout.slots[slot].sequence >= 0; ++head) {
      const Rows x(c, own, q, k, beta, slot, head);
      const std::int64_t rows = x.chunk.rows(), at = static_cast<std::int64_t>(slot) * HV + head;
      const Matrix S = kept ? get(t.at("h"), at, K, V, K)
                            : transposed(get(t.at("states"), at, V, K, V)),
                   dS = transposed(get(t.at("dstates"), at, V, K, V)),
                   Z = kept ? scaled(inverses(x.b), x.chunk.values(t.at("v_new")))
                            : get(t.at("z"), at, c.layout.BT, V, rows);
      const Matrix dO = x.chunk.values(t.at("do")),
                   dV = x.chunk.values(t.at(of_channels ? "dwritten" : "dv"));
      const Matrix N = by_columns(dV * transposed(Z), x.b),
                   F = c.scale * by_columns(dO * transposed(Z), x.b);
      Vector own_F, own_N;
      for (std::int64_t r = 0; r < rows; ++r) {
        own_F.push_back(F[r][r]);
        own_N.push_back(N[r][r]);
      }
      const Matrix M = -1.0 * N;
      const Matrix dQ =
          c.scale * x.decay.entering(dO * transposed(S)) + x.decay.row_sums(F, x.K, true);
      const Matrix R = -1.0 * x.decay.entering(dV * transposed(S)) + x.decay.row_sums(M, x.K, true);
      const Matrix I = scaled(x.b, x.decay.leaving(Z * transposed(dS)));
      const Matrix inside =
          x.decay.column_sums(F, x.Q, true) + x.decay.column_sums(M, x.erasing, true);
      const Matrix dK = I + inside + scaled(own_F, x.Q);
      x.chunk.write(dq, dQ + scaled(own_F, x.K));
      if (elements) {
        x.chunk.write(dk, hadamard(x.chunk.wide_keys(t.at("erase")), R) + dK);
        x.chunk.write(derase, hadamard(x.K, R));
        x.chunk.write(dv, hadamard(x.chunk.values(t.at("write")), dV));
        x.chunk.write(dwrite, hadamard(x.chunk.values(t.at("v")), dV));
      } else {
        x.chunk.write(dk, R + dK);
      }

      Vector dbeta_rows = x.chunk.scalars(slopes);
      for (std::size_t r = 0; r < dbeta_rows.size(); ++r)
        dbeta_rows[r] *= own_N[r] / (x.b[r] * x.b[r]);
      x.chunk.write(dbeta, dbeta_rows);
      const Matrix dG_rows = hadamard(x.Q, dQ) + hadamard(x.erasing, R) +
                             -1.0 * hadamard(x.K, inside) +
                             leaving_gates(x.K, I, dS, x.decay.through(S));
      if (of_channels)
        x.chunk.write(dG, dG_rows);
      else
        x.chunk.write(dG, row_dots(dG_rows, ones(rows, K)));
    }
  if (elements)
    t["derase"] = derase, t["dv"] = dv, t["dwrite"] = dwrite;
  else
    t["dbeta"] = dbeta;
  for (const std::string row : {"q", "k"}) {
    TensorMap sums{{"dy_heads", row == "q" ? dq : dk}, {"x", t.at(row)}};
    run_reference("head_sum", c, sums);
    sums["dx"] = sums.at("dy");
    if (c.qk_l2norm) {
      sums["rstd"] = own.at(row + "_rstd");
      run_reference("l2norm_bwd", c, sums);
    }
    t["d" + row + "_given"] = sums.at("dx");
  }
  if (!own.contains("g")) return;
  own[of_channels ? "dGk" : "dG"] = dG;
  run_reference("chunk_local_reverse_cumsum", c, own);
  t["dg_given"] = own.at("dg");
  if (!c.gate_in_kernel) return;
  own["dg_log"] = own.at("dg");
  run_reference(of_channels ? "kda_gate_bwd" : "gate_bwd", c, own);
  t["dg_given"] = own.at("dg_raw");
  if (own.contains("dA_part")) t["dA_chunk"] = own.at("dA_part");
  if (own.contains("dbias_part")) t["dbias_chunk"] = own.at("dbias_part");
}

void delta_gradient(const StageContext& c, TensorMap& t) { gradients(c, t, Scan::delta); }
void delta_gradient_kept(const StageContext& c, TensorMap& t) { gradients(c, t, Scan::kept); }
void kda_gradient(const StageContext& c, TensorMap& t) { gradients(c, t, Scan::kda); }

void kda_bwd_prepare(const StageContext& c, TensorMap& t) {
  const TensorMap own = prepared(c, t, true);
  const Vector q = queries(own), k = keys(own), beta = row_rates(c, own);
  const auto [H, HV, K, V] = c.dims;
  const std::int64_t BT = c.layout.BT, NT = std::ssize(c.layout.slots);
  const auto sized = [&](std::int64_t count) {
    return Vector(static_cast<std::size_t>(NT * HV * count));
  };
  Vector decayed_rows = sized(3 * BT * K), squares = sized(2 * BT * BT), decay = sized(K),
         written = zeros(c, V);
  for (std::int64_t slot = 0; slot < NT; ++slot)
    for (std::int64_t head = 0; head < HV; ++head) {
      if (c.layout.slots[static_cast<std::size_t>(slot)].sequence < 0) continue;
      const Rows x(c, own, q, k, beta, static_cast<std::size_t>(slot), head);
      const std::int64_t at = slot * HV + head, rows = x.chunk.rows();
      put(decayed_rows, 3 * at, BT, -1.0 * x.decay.entering(x.erasing));
      put(decayed_rows, 3 * at + 1, BT, scaled(x.b, x.decay.leaving(x.K)));
      put(decayed_rows, 3 * at + 2, BT, c.scale * x.decay.entering(x.Q));
      Matrix identity(rows, rows);
      for (std::int64_t r = 0; r < rows; ++r) identity[r][r] = 1;
      if (own.contains("write"))
        x.chunk.write(written,
                      hadamard(x.chunk.values(own.at("write")), x.chunk.values(t.at("v"))));
      const Matrix A = by_columns(x.decay.product(x.erasing, x.K, true), x.b);
      put_corner(squares, 2 * at, BT, solved(A, identity, false) + -1.0 * identity);
      put_corner(squares, 2 * at + 1, BT,
                 c.scale * by_columns(x.decay.product(x.Q, x.K, false), x.b));
      put(decay, at, K, x.decay.through(ones(K, 1)));
    }
  t["decayed_rows"] = decayed_rows;
  t["squares"] = squares;
  t["decay"] = decay;
  if (c.qk_l2norm) t["row_scales"] = row_scales(c, own);
  if (own.contains("write")) t["written"] = written;
}

/// One chunk as kda_bwd_prepare has made it.
struct Prepared {
  Chunk chunk;
  Matrix k_entering, k_leaving, q_entering, T, P;
  Vector decay;

  Prepared(const StageContext& c, const TensorMap& t, std::int64_t slot, std::int64_t head)
      : chunk(c.layout, c.dims, static_cast<std::size_t>(slot), head) {
    const std::int64_t at = slot * c.dims.HV + head, BT = c.layout.BT, K = c.dims.K;
    const std::int64_t rows = chunk.rows();
    k_entering = get(t.at("decayed_rows"), 3 * at, BT, K, rows);
    k_leaving = get(t.at("decayed_rows"), 3 * at + 1, BT, K, rows);
    q_entering = get(t.at("decayed_rows"), 3 * at + 2, BT, K, rows);
    T = get_corner(t.at("squares"), 2 * at, BT, rows);
    P = get_corner(t.at("squares"), 2 * at + 1, BT, rows);
    const auto first = t.at("decay").begin() + at * K;
    decay.assign(first, first + K);
  }
};

/// One chunk of the reverse scan: dV from dO and dS, which it takes to the chunk's start.
Matrix step_back(const Prepared& x, const TensorMap& t, Matrix& dS) {
  const Matrix dO = x.chunk.values(t.at("do"));
  const Matrix rows = transposed(x.P) * dO + x.k_leaving * dS;
  const Matrix dV = rows + transposed(x.T) * rows;
  dS = scaled(x.decay, dS) + transposed(x.q_entering) * dO + transposed(x.k_entering) * dV;
  return dV;
}

void kda_scans_summary(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  Vector entering(static_cast<std::size_t>(c.layout.sequences() * HV * K * V));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < HV; ++head) {
      Matrix dS = read_state(c, optional(t, "dht"), n, head);
      const auto sequence = static_cast<std::size_t>(n);
      for (std::int64_t slot = c.layout.chunk_offsets[sequence + 1];
           slot-- > c.layout.chunk_offsets[sequence];)
        step_back(Prepared(c, t, slot, head), t, dS);
      put(entering, n * HV + head, K, dS);
    }
  t["dsummary"] = entering;
}

void kda_scans(const StageContext& c, TensorMap& t) {
  const auto [H, HV, K, V] = c.dims;
  const std::int64_t BT = c.layout.BT, NT = std::ssize(c.layout.slots);
  Vector states(static_cast<std::size_t>(NT * HV * K * V)), dstates = states, dv = zeros(c, V);
  Vector z(static_cast<std::size_t>(NT * HV * BT * V));
  Vector dinitial = zero_states(c, static_cast<std::size_t>(c.layout.sequences()));
  for (std::int64_t n = 0; n < c.layout.sequences(); ++n)
    for (std::int64_t head = 0; head < HV; ++head) {
      const auto sequence = static_cast<std::size_t>(n);
      const std::int64_t begin = c.layout.chunk_offsets[sequence],
                         end = c.layout.chunk_offsets[sequence + 1];
      Matrix S = read_state(c, optional(t, "initial_state"), n, head);
      for (std::int64_t slot = begin; slot < end; ++slot) {
        const Prepared x(c, t, slot, head);
        put(states, slot * HV + head, V, transposed(S));
        const Matrix rows = x.chunk.values(t.at("v")) + x.k_entering * S;
        const Matrix Z = rows + x.T * rows;
        put(z, slot * HV + head, BT, Z);
        S = scaled(x.decay, S) + transposed(x.k_leaving) * Z;
      }
      Matrix dS = read_state(c, optional(t, "dht"), n, head);
      for (std::int64_t slot = end - 1; slot >= begin; --slot) {
        const Prepared x(c, t, slot, head);
        put(dstates, slot * HV + head, V, transposed(dS));
        x.chunk.write(dv, step_back(x, t, dS));
      }
      write_state(c, dinitial, n, head, dS);
    }
  t["states"] = states;
  t["z"] = z;
  t["dstates"] = dstates;
  t["dv"] = dv;
  t["dinitial_state"] = dinitial;
}

}  // namespace

const StageReferences& pass_references() {
  static const StageReferences references{{"delta_scans", delta_scans},
                                          {"delta_reverse", delta_reverse},
                                          {"delta_gradient", delta_gradient},
                                          {"delta_gradient_kept", delta_gradient_kept},
                                          {"kda_bwd_prepare", kda_bwd_prepare},
                                          {"kda_scans", kda_scans},
                                          {"kda_scans_summary", kda_scans_summary},
                                          {"kda_gradient", kda_gradient}};
  return references;
}

}  // namespace wyvern::testing
