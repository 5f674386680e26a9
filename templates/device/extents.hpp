// Sizes that are known at launch, not when a kernel is compiled. Compiled by the host and by every
// kernel, so that both have the same layout.
#pragma once

namespace wyvern {

/// Rows of o, [B T HV, V], of one part of a sum over all of them.
inline constexpr int kNormPartRows = 256;

/// Tokens of one part of a sum over all of them.
inline constexpr int kConvPartTokens = 256;

/// Columns of o that share a scale of o_scale.
inline constexpr int kScaledColumns = 128;

/// Sizes of a launch; passed to every kernel after its tensors.
struct Extents {
  long long B = 0;           ///< batch size; 1 for a packed batch
  long long T = 0;           ///< tokens per sequence; total tokens of a packed batch
  long long N = 0;           ///< sequences
  long long NT = 0;          ///< chunk slots over all sequences; an upper bound for a packed batch
  long long NS = 0;          ///< segment slots over all sequences, as NT
  long long S = 0;           ///< slots of the pool of states
  long long first_slot = 0;  ///< the least index of a slot: 1 where 0 stands for none
  long long CP = 0;          ///< rows of checkpoints
  float scale = 0.0F;        ///< factor on o
  float gate_floor = 0.0F;   ///< chunk_local_cumsum raises each g to at least this; -inf: leaves it
  float lower_bound = 0.0F;  ///< of the bounded gate, runtime/SPECIFICATION.md section 4
  float norm_eps = 0.0F;     ///< of the norm of o
  long long M = 1;           ///< columns of state_index
  long long R = 0;           ///< rows of intermediate_states in the recurrent pass
  long long D = 0;           ///< tokens a row of it and of parent
  long long P = 0;           ///< parts of a sum over all rows of o, kNormPartRows each
  long long TP = 0;          ///< parts of a sum over all tokens, kConvPartTokens each
  long long SR = 0;          ///< rows of o_scale
  long long SC = 0;          ///< columns of o_scale
  int H = 1;                 ///< query and key heads
  int HV = 1;                ///< value heads, a multiple of H
  int SEG = 0;               ///< chunks a segment; 0: sequences are not split

  /// Value heads of a query and key head.
  constexpr int group() const { return HV / H; }
  /// The query and key head of a value head.
  template <class Integer>
  constexpr Integer key_head(Integer head) const {
    return HV == H ? head : head / group();  // a division takes time
  }
};

}  // namespace wyvern
