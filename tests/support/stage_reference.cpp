#include "tests/support/stage_reference.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace wyvern::testing {
namespace {

using Slot = ChunkLayout::Slot;

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

/// Rows of a [tokens, heads, width] tensor.
struct Rows {
  const Vector& data;
  std::int64_t heads, width;
  const double* operator()(std::int64_t token, std::int64_t head) const {
    return data.data() + (token * heads + head) * width;
  }
};
struct MutableRows {
  Vector& data;
  std::int64_t heads, width;
  double* operator()(std::int64_t token, std::int64_t head) const {
    return data.data() + (token * heads + head) * width;
  }
};

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// y += factor * x.
void add(double* y, double factor, const double* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

void append_chunks(ChunkLayout& layout) {
  layout.chunk_offsets = {0};
  for (std::int64_t n = 0; n < layout.sequences(); ++n) {
    const std::int64_t end = layout.offsets[size(n) + 1];
    std::int64_t chunk = 0;
    for (std::int64_t begin = layout.offsets[size(n)]; begin < end; begin += layout.BT)
      layout.slots.push_back({n, chunk++, begin, std::min(layout.BT, end - begin)});
    layout.chunk_offsets.push_back(static_cast<std::int64_t>(layout.slots.size()));
  }
}

}  // namespace

ChunkLayout equal_layout(std::int64_t B, std::int64_t T, std::int64_t BT) {
  ChunkLayout layout;
  layout.BT = BT;
  for (std::int64_t n = 0; n <= B; ++n) layout.offsets.push_back(n * T);
  append_chunks(layout);
  return layout;
}

ChunkLayout packed_layout(std::span<const std::int64_t> cu_seqlens, std::int64_t BT,
                          std::int64_t NT) {
  ChunkLayout layout;
  layout.BT = BT;
  layout.offsets.assign(cu_seqlens.begin(), cu_seqlens.end());
  append_chunks(layout);
  if (static_cast<std::int64_t>(layout.slots.size()) > NT)
    throw std::invalid_argument("NT is too small for the chunks of cu_seqlens");
  layout.slots.resize(size(NT));
  return layout;
}

Vector l2norm(const Vector& x, std::int64_t K) {
  Vector y(x.size());
  for (std::size_t start = 0; start < x.size(); start += size(K)) {
    const double length = std::sqrt(dot(&x[start], &x[start], K) + 1e-6);
    for (std::size_t i = start; i < start + size(K); ++i) y[i] = x[i] / length;
  }
  return y;
}

Vector l2norm_rstd(const Vector& x, std::int64_t K) {
  Vector rstd;
  for (std::size_t start = 0; start < x.size(); start += size(K))
    rstd.push_back(1 / std::sqrt(dot(&x[start], &x[start], K) + 1e-6));
  return rstd;
}

Vector scaled_rows(const Vector& x, const Vector& scale) {
  if (scale.empty()) return x;
  Vector y(x.size());
  const std::size_t K = x.size() / scale.size();
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale[i / K];
  return y;
}

Vector gate(const Vector& g, const Vector& A_log, const Vector& dt_bias) {
  Vector g_log(g.size());
  for (std::size_t i = 0; i < g.size(); ++i) {
    const std::size_t head = i % A_log.size();
    const double x = g[i] + (dt_bias.empty() ? 0.0 : dt_bias[head]);
    g_log[i] = -std::exp(A_log[head]) * (std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))));
  }
  return g_log;
}

Vector beta_factor(const Vector& beta, bool sigmoid, bool neg_eigval) {
  if (!sigmoid) return beta;
  Vector factor(beta.size());
  for (std::size_t i = 0; i < beta.size(); ++i)
    factor[i] = (neg_eigval ? 2.0 : 1.0) / (1.0 + std::exp(-beta[i]));
  return factor;
}

Vector chunk_local_cumsum(const ChunkLayout& layout, std::int64_t HV, const Vector& g,
                          double floor) {
  Vector G(g.size());
  for (const Slot& slot : layout.slots)
    for (std::int64_t head = 0; head < HV; ++head) {
      double sum = 0;
      for (std::int64_t r = 0; r < slot.rows; ++r) {
        const std::size_t at = size((slot.begin + r) * HV + head);
        sum += std::max(g[at], floor);
        G[at] = sum;
      }
    }
  return G;
}

Vector scaled_dot_kkt(const ChunkLayout& layout, const Dims& dims, const Vector& k,
                      const Vector& beta, const Vector& G) {
  const std::int64_t group = dims.HV / dims.H;
  Vector A(size(layout.tokens() * dims.HV * layout.BT));
  const Rows key{k, dims.H, dims.K};
  const MutableRows out{A, dims.HV, layout.BT};
  for (const Slot& slot : layout.slots)
    for (std::int64_t head = 0; head < dims.HV; ++head)
      for (std::int64_t r = 0; r < slot.rows; ++r)
        for (std::int64_t s = 0; s < r; ++s) {
          const std::int64_t row = slot.begin + r, column = slot.begin + s;
          const double decay =
              std::exp(G[size(row * dims.HV + head)] - G[size(column * dims.HV + head)]);
          out(row, head)[s] = beta[size(row * dims.HV + head)] * decay *
                              dot(key(row, head / group), key(column, head / group), dims.K);
        }
  return A;
}

Vector solve_tril(const ChunkLayout& layout, std::int64_t HV, const Vector& A) {
  Vector Tinv(A.size());
  const Rows lower{A, HV, layout.BT};
  const MutableRows inverse{Tinv, HV, layout.BT};
  for (const Slot& slot : layout.slots)
    for (std::int64_t head = 0; head < HV; ++head)
      for (std::int64_t r = 0; r < slot.rows; ++r) {
        // Row r of (I + A) X = I by forward substitution.
        double* const row = inverse(slot.begin + r, head);
        for (std::int64_t s = 0; s < r; ++s)
          add(row, -lower(slot.begin + r, head)[s], inverse(slot.begin + s, head), s + 1);
        row[r] = 1;
      }
  return Tinv;
}

WU recompute_w_u(const ChunkLayout& layout, const Dims& dims, const Vector& k, const Vector& v,
                 const Vector& beta, const Vector& Tinv, const Vector& G) {
  const std::int64_t group = dims.HV / dims.H;
  WU out{Vector(size(layout.tokens() * dims.HV * dims.K)),
         Vector(size(layout.tokens() * dims.HV * dims.V))};
  const Rows key{k, dims.H, dims.K}, value{v, dims.HV, dims.V}, inverse{Tinv, dims.HV, layout.BT};
  const MutableRows w{out.w, dims.HV, dims.K}, u{out.u, dims.HV, dims.V};
  for (const Slot& slot : layout.slots)
    for (std::int64_t head = 0; head < dims.HV; ++head)
      for (std::int64_t r = 0; r < slot.rows; ++r)
        for (std::int64_t s = 0; s <= r; ++s) {
          const std::int64_t row = slot.begin + r, token = slot.begin + s;
          const std::size_t at = size(token * dims.HV + head);
          const double factor = inverse(row, head)[s] * beta[at];
          add(w(row, head), factor * std::exp(G[at]), key(token, head / group), dims.K);
          add(u(row, head), factor, value(token, head), dims.V);
        }
  return out;
}

namespace {

/// The state scan of one value head of one sequence.
class HeadScan {
 public:
  HeadScan(const Dims& dims, const Vector& G, std::int64_t head)
      : dims_(dims), G_(G), head_(head), S_(size(dims.K * dims.V)) {}

  Vector& state() { return S_; }

  void chunk(const Slot& slot, const Vector& k, const Vector& w, const Vector& u,
             double* v_new) {
    const Rows key{k, dims_.H, dims_.K}, rows_w{w, dims_.HV, dims_.K},
        rows_u{u, dims_.HV, dims_.V};
    for (std::int64_t r = 0; r < slot.rows; ++r) {
      const std::int64_t token = slot.begin + r;
      double* const out = v_new + (token * dims_.HV + head_) * dims_.V;
      std::copy_n(rows_u(token, head_), dims_.V, out);
      for (std::int64_t i = 0; i < dims_.K; ++i)
        add(out, -rows_w(token, head_)[i], &S_[size(i * dims_.V)], dims_.V);
    }
    const double last = decay_sum(slot.begin + slot.rows - 1);
    for (double& x : S_) x *= std::exp(last);
    for (std::int64_t r = 0; r < slot.rows; ++r) {
      const std::int64_t token = slot.begin + r;
      const double decay = std::exp(last - decay_sum(token));
      const double* const key_row = key(token, head_ / (dims_.HV / dims_.H));
      for (std::int64_t i = 0; i < dims_.K; ++i)
        add(&S_[size(i * dims_.V)], decay * key_row[i],
            v_new + (token * dims_.HV + head_) * dims_.V, dims_.V);
    }
  }

 private:
  double decay_sum(std::int64_t token) const { return G_[size(token * dims_.HV + head_)]; }

  const Dims& dims_;
  const Vector& G_;
  std::int64_t head_;
  Vector S_;  // [K, V]
};

std::size_t state_index(const Dims& dims, std::int64_t i, std::int64_t j, bool v_first) {
  return size(v_first ? j * dims.K + i : i * dims.V + j);
}

}  // namespace

States fwd_h(const ChunkLayout& layout, const Dims& dims, const Vector& k, const Vector& w,
             const Vector& u, const Vector& G, const Vector& initial_state, bool v_first) {
  const std::int64_t one = dims.K * dims.V;
  States out{Vector(layout.slots.size() * size(dims.HV * one)), Vector(u.size()),
             Vector(size(layout.sequences() * dims.HV * one))};
  for (std::int64_t n = 0; n < layout.sequences(); ++n)
    for (std::int64_t head = 0; head < dims.HV; ++head) {
      HeadScan scan(dims, G, head);
      const std::size_t base = size((n * dims.HV + head) * one);
      for (std::int64_t i = 0; i < dims.K && !initial_state.empty(); ++i)
        for (std::int64_t j = 0; j < dims.V; ++j)
          scan.state()[size(i * dims.V + j)] =
              initial_state[base + state_index(dims, i, j, v_first)];
      for (std::int64_t c = layout.chunk_offsets[size(n)]; c < layout.chunk_offsets[size(n) + 1];
           ++c) {
        std::copy(scan.state().begin(), scan.state().end(),
                  out.h.begin() + (c * dims.HV + head) * one);
        scan.chunk(layout.slots[size(c)], k, w, u, out.v_new.data());
      }
      for (std::int64_t i = 0; i < dims.K; ++i)
        for (std::int64_t j = 0; j < dims.V; ++j)
          out.final_state[base + state_index(dims, i, j, v_first)] =
              scan.state()[size(i * dims.V + j)];
    }
  return out;
}

Vector fwd_o(const ChunkLayout& layout, const Dims& dims, double scale, const Vector& q,
             const Vector& k, const Vector& v_new, const Vector& h, const Vector& G) {
  const std::int64_t group = dims.HV / dims.H;
  Vector o(size(layout.tokens() * dims.HV * dims.V));
  const Rows query{q, dims.H, dims.K}, key{k, dims.H, dims.K}, value{v_new, dims.HV, dims.V};
  const MutableRows out{o, dims.HV, dims.V};
  for (std::size_t c = 0; c < layout.slots.size(); ++c)
    for (std::int64_t head = 0; head < dims.HV; ++head)
      for (std::int64_t r = 0; r < layout.slots[c].rows; ++r) {
        const std::int64_t row = layout.slots[c].begin + r;
        const double G_r = G[size(row * dims.HV + head)];
        const double* const state =
            h.data() + (static_cast<std::int64_t>(c) * dims.HV + head) * dims.K * dims.V;
        for (std::int64_t i = 0; i < dims.K; ++i)
          add(out(row, head), scale * std::exp(G_r) * query(row, head / group)[i],
              state + i * dims.V, dims.V);
        for (std::int64_t s = 0; s <= r; ++s) {
          const std::int64_t token = layout.slots[c].begin + s;
          const double P = std::exp(G_r - G[size(token * dims.HV + head)]) *
                           dot(query(row, head / group), key(token, head / group), dims.K);
          add(out(row, head), scale * P, value(token, head), dims.V);
        }
      }
  return o;
}

namespace {

void run_chunk_index(const ChunkLayout& layout, TensorMap& t) {
  t["seq_offsets"] = Vector(layout.offsets.begin(), layout.offsets.end());
  t["chunk_offsets"] = Vector(layout.chunk_offsets.begin(), layout.chunk_offsets.end());
  Vector& table = t["chunk_index"];
  table.clear();
  for (const Slot& slot : layout.slots) {
    table.push_back(static_cast<double>(slot.sequence));
    table.push_back(static_cast<double>(slot.chunk));
  }
}

Vector optional(const TensorMap& t, std::string_view name) {
  const auto found = t.find(name);
  return found == t.end() ? Vector{} : found->second;
}

}  // namespace

void run_reference(std::string_view stage, const StageContext& c, TensorMap& t) {
  const auto in = [&](const char* name) -> const Vector& { return t.at(name); };
  const auto q = [&] { return scaled_rows(in("q"), optional(t, "q_rstd")); };
  const auto k = [&] { return scaled_rows(in("k"), optional(t, "k_rstd")); };
  const auto beta = [&] { return beta_factor(in("beta"), c.beta_sigmoid, c.neg_eigval); };
  if (stage == "chunk_index") {
    run_chunk_index(c.layout, t);
  } else if (stage == "l2norm") {
    t["y"] = l2norm(in("x"), c.dims.K);
  } else if (stage == "l2norm_rstd") {
    t["rstd"] = l2norm_rstd(in("x"), c.dims.K);
  } else if (stage == "gate") {
    t["g_log"] = gate(in("g"), in("A_log"), optional(t, "dt_bias"));
  } else if (stage == "chunk_local_cumsum") {
    t["G"] = chunk_local_cumsum(c.layout, c.dims.HV, t.contains("g_log") ? in("g_log") : in("g"),
                                c.gate_floor);
  } else if (stage == "scaled_dot_kkt") {
    t["A"] = scaled_dot_kkt(c.layout, c.dims, k(), beta(), in("G"));
  } else if (stage == "solve_tril") {
    t["Tinv"] = solve_tril(c.layout, c.dims.HV, in("A"));
  } else if (stage == "recompute_w_u") {
    WU out = recompute_w_u(c.layout, c.dims, k(), in("v"), beta(), in("Tinv"), in("G"));
    t["w"] = std::move(out.w);
    t["u"] = std::move(out.u);
  } else if (stage == "fwd_h") {
    States out = fwd_h(c.layout, c.dims, k(), in("w"), in("u"), in("G"),
                       optional(t, "initial_state"), c.state_v_first);
    t["h"] = std::move(out.h);
    t["v_new"] = std::move(out.v_new);
    t["final_state"] = std::move(out.final_state);
  } else if (stage == "fwd_o") {
    t["o"] = fwd_o(c.layout, c.dims, c.scale, q(), k(), in("v_new"), in("h"), in("G"));
  } else {
    throw std::invalid_argument("no reference for the stage " + std::string(stage));
  }
}

}  // namespace wyvern::testing
