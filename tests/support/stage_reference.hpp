// Every stage of the chunked form (specification, section 3) in float64, written from the stage
// contracts of templates/README.md alone: plain loops over plain vectors, nothing shared with the
// runtime or with any template.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern::testing {

using Vector = std::vector<double>;

/// Where sequences and chunks lie in the flattened [B*T] tokens.
struct ChunkLayout {
  struct Slot {
    std::int64_t sequence = -1;  ///< -1: an unused slot of a packed batch
    std::int64_t chunk = -1;     ///< which chunk of its sequence
    std::int64_t begin = 0;      ///< its first token
    std::int64_t rows = 0;       ///< its tokens, at most BT
  };
  std::int64_t BT = 0;
  std::vector<std::int64_t> offsets;        ///< [N+1] first token of each sequence, and the end
  std::vector<std::int64_t> chunk_offsets;  ///< [N+1] first slot of each sequence, and the end
  std::vector<Slot> slots;                  ///< [NT]

  std::int64_t sequences() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t tokens() const { return offsets.back(); }
};

/// B sequences of T tokens each.
ChunkLayout equal_layout(std::int64_t B, std::int64_t T, std::int64_t BT);
/// A packed batch in NT slots, the unused ones last.
ChunkLayout packed_layout(std::span<const std::int64_t> cu_seqlens, std::int64_t BT,
                          std::int64_t NT);

struct Dims {
  std::int64_t H = 1, HV = 1, K = 1, V = 1;
};

/// x [rows, K] -> y [rows, K].
Vector l2norm(const Vector& x, std::int64_t K);
/// x [rows, K] -> rstd [rows].
Vector l2norm_rstd(const Vector& x, std::int64_t K);
/// x [rows, K] with row r times scale[r]; as it is where `scale` is empty.
Vector scaled_rows(const Vector& x, const Vector& scale);
/// g [tokens, HV], A_log [HV], dt_bias [HV] or empty -> g_log [tokens, HV].
Vector gate(const Vector& g, const Vector& A_log, const Vector& dt_bias);
/// The factor that beta stands for: itself, its sigmoid, or twice that.
Vector beta_factor(const Vector& beta, bool sigmoid, bool neg_eigval);
/// g [tokens, HV] -> G [tokens, HV]; each g is raised to at least `floor` first.
Vector chunk_local_cumsum(const ChunkLayout& layout, std::int64_t HV, const Vector& g,
                          double floor);
/// k [tokens, H, K], beta factor and G [tokens, HV] -> A [tokens, HV, BT].
Vector scaled_dot_kkt(const ChunkLayout& layout, const Dims& dims, const Vector& k,
                      const Vector& beta, const Vector& G);
/// A [tokens, HV, BT], strictly lower part -> Tinv [tokens, HV, BT] = (I + A)^-1.
Vector solve_tril(const ChunkLayout& layout, std::int64_t HV, const Vector& A);

struct WU {
  Vector w;  ///< [tokens, HV, K]
  Vector u;  ///< [tokens, HV, V]
};
WU recompute_w_u(const ChunkLayout& layout, const Dims& dims, const Vector& k, const Vector& v,
                 const Vector& beta, const Vector& Tinv, const Vector& G);

struct States {
  Vector h;            ///< [NT, HV, K, V]; unused slots 0
  Vector v_new;        ///< [tokens, HV, V]
  Vector final_state;  ///< [N, HV, K, V], or [N, HV, V, K] with v_first
};
/// `initial_state` as final_state, or empty for zero.
States fwd_h(const ChunkLayout& layout, const Dims& dims, const Vector& k, const Vector& w,
             const Vector& u, const Vector& G, const Vector& initial_state, bool v_first);

/// -> o [tokens, HV, V].
Vector fwd_o(const ChunkLayout& layout, const Dims& dims, double scale, const Vector& q,
             const Vector& k, const Vector& v_new, const Vector& h, const Vector& G);

/// What a stage needs besides its tensors.
struct StageContext {
  ChunkLayout layout;
  Dims dims;
  double scale = 1;
  double gate_floor = 0;  ///< of chunk_local_cumsum; -infinity leaves g alone
  bool beta_sigmoid = false, neg_eigval = false, state_v_first = false;
};

/// Tensors by their contract's names.
using TensorMap = std::map<std::string, Vector, std::less<>>;

/// Runs one stage by name: reads its inputs from `tensors` (an absent optional one is missing
/// there) and adds its outputs. Stages run one after another compose as fused templates do:
/// chunk_local_cumsum takes g_log, where a gate made one, before g. Throws std::out_of_range for a
/// missing input and std::invalid_argument for an unknown stage.
void run_reference(std::string_view stage, const StageContext& context, TensorMap& tensors);

}  // namespace wyvern::testing
