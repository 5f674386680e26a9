// Every stage of the chunked form (runtime/SPECIFICATION.md, section 3) in float64, written from
// the stage contracts of templates/README.md alone: plain loops over plain vectors, nothing shared
// with the runtime or with any template.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
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
  /// A run of SEG chunks of one sequence, its last run maybe shorter.
  struct Segment {
    std::int64_t sequence = -1;  ///< -1: an unused slot
    std::int64_t slot = 0;       ///< its first chunk slot
    std::int64_t chunks = 0;
    bool first = false, last = false;  ///< of its sequence
  };
  std::int64_t BT = 0;
  bool packed = false;
  std::vector<std::int64_t> offsets;        ///< [N+1] first token of each sequence, and the end
  std::vector<std::int64_t> chunk_offsets;  ///< [N+1] first slot of each sequence, and the end
  std::vector<Slot> slots;                  ///< [NT]

  std::int64_t sequences() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t tokens() const { return offsets.back(); }
  /// [NS] with SEG chunks a segment.
  std::vector<Segment> segments(std::int64_t SEG) const;
};

/// B sequences of T tokens each.
ChunkLayout equal_layout(std::int64_t B, std::int64_t T, std::int64_t BT);
/// A packed batch in NT slots, the unused ones last.
ChunkLayout packed_layout(std::span<const std::int64_t> cu_seqlens, std::int64_t BT,
                          std::int64_t NT);

struct Dims {
  std::int64_t H = 1, HV = 1, K = 1, V = 1;
};

/// g [tokens, heads] -> G [tokens, heads]; each g is raised to at least `floor` first.
Vector chunk_local_cumsum(const ChunkLayout& layout, const Vector& g, double floor);
/// A [tokens, HV, BT], strictly lower part -> Tinv [tokens, HV, BT] = (I + A)^-1.
Vector solve_tril(const ChunkLayout& layout, std::int64_t HV, const Vector& A);

/// A stage's context besides its tensors. A gate's kind follows from them: `Gk`, `G` or neither.
struct StageContext {
  ChunkLayout layout;
  Dims dims;
  double scale = 1;
  std::int64_t SEG = 8;               ///< chunks a segment
  double gate_floor = 0;              ///< of chunk_local_cumsum; -infinity leaves g alone
  std::optional<double> lower_bound;  ///< of kda's gate
  std::int64_t state_slots = 0;       ///< recurrent: of the pool of states
  std::int64_t first_slot = 0;        ///< the least index of one
  bool gate_in_kernel = false;        ///< recurrent: g is the gate's raw input
  bool qk_l2norm = false;             ///< recurrent: it normalizes q and k
  bool norm_silu = false;             ///< norm_gate goes through silu, else sigmoid
  double norm_eps = 0;                ///< of the norm of o
  bool scale_tokens_last = false;     ///< o_scale has tokens side by side
  bool conv_silu = false;             ///< convolved rows go through silu
  std::int64_t conv_width = 0;        ///< weights of a channel
  std::int64_t conv_columns = 0;      ///< columns of a slot of conv_state
  bool conv_tokens_first = false;     ///< slots of conv_state are [columns, channels]
  bool beta_sigmoid = false, neg_eigval = false, state_v_first = false;
  std::int64_t steps = 1;   ///< of a token
  bool backwards = false;   ///< fold: gradients, from the last range to the first
  bool summary = false;     ///< the maps of all segments are wanted
  bool transition = false;  ///< summaries have M beside R
};

/// Tensors by their contract's names.
using TensorMap = std::map<std::string, Vector, std::less<>>;

/// Runs one stage by name: reads its inputs from `tensors` (an absent optional one is missing
/// there) and adds its outputs. Stages run one after another compose as fused templates do, where a
/// plan connects them under other names: chunk_local_cumsum takes g_log before g and makes Gk too,
/// chunk_local_reverse_cumsum takes dGk for a missing dG, the gates' backward dg for a missing
/// dg_log. `recurrent` gives the whole pool as `state`, untouched slots included, where there is
/// one. Throws std::out_of_range for a missing input and std::invalid_argument for an unknown
/// stage.
void run_reference(std::string_view stage, const StageContext& context, TensorMap& tensors);

}  // namespace wyvern::testing
