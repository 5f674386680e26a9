// Shared by the operators of the chunked delta rule: parts of their stage lists, and their useful
// work. An operator's stages() puts parts together, or replaces one by its own.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/operators/operator.hpp"

namespace wyvern {

using Uses = std::vector<StageUse>;

/// The stages that depend on the kind of gate, and the names of some of their tensors.
struct ChunkedStages {
  const StageDefinition* gate = nullptr;  ///< null where there is no gate
  const StageDefinition* intra;
  const StageDefinition* recompute;
  const StageDefinition* output;
  const StageDefinition* dv_local;
  const StageDefinition* d_first;  ///< gradients of a chunk
  const StageDefinition* d_second;
  const StageDefinition* gate_bwd = nullptr;  ///< as `gate`
  /// The sums of gates in a chunk, and their gradient.
  std::string sums = "G", d_sums = "dG";
  /// Whether the gradient of q is finished by d_second (else by d_first).
  bool second_has_dq = false;
  /// Whether disable_recompute also keeps what intra to recompute make; else states and V' alone.
  bool keeps_intra = false;
  const StageDefinition* recurrent;
  /// The optional group that splits a forward pass into segments: `segment` computes the state
  /// entering each one, `resume` runs the segments from these states. Null: no such group.
  const StageDefinition* segment = nullptr;
  const StageDefinition* resume = nullptr;
  /// The optional group that is the whole backward pass; its last stage computes the gradients.
  /// Empty: no such group.
  std::vector<StageUse> whole_pass{};
  /// As `segment` and `resume`, before that group. Null: no such group.
  const StageDefinition* scans_segment = nullptr;
  const StageDefinition* scans_resume = nullptr;
  /// The same of a problem with disable_recompute, which needs the reverse scan alone. Empty and
  /// null: as without.
  std::vector<StageUse> kept_pass{};
  const StageDefinition* kept_resume = nullptr;
  /// The optional group that is a whole backward pass with `summary`. Empty: no such group.
  std::vector<StageUse> whole_summary{};
};

/// For no gate or a scalar gate per head: one decay factor per element of an intra-chunk product.
const ChunkedStages& scalar_gate_stages();
/// For a gate per key channel: queries and keys are scaled by the decay before the product.
const ChunkedStages& vector_gate_stages();

// Parts, in the order in which a pass has them. Each appends to `uses`.

/// Tables of a packed batch's chunks.
void add_chunk_tables(const Problem& problem, Uses& uses);
/// The optional group `segment`, but where maps are given, fwd_h_combine, `resume` in front of a
/// forward pass.
void add_segments(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The optional groups of the whole backward pass in front of the others.
void add_whole_pass(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// Sets which uses that group replaces, once all uses are in the list: all but the final sums of
/// the gate's parameters.
void end_whole_pass(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The scales of the rows of `x` (q or k), where they are normalized.
void add_row_scales(const Problem& problem, const std::string& x, Uses& uses);
/// The chunks' tables, and the scales of q and of k.
void add_row_preparation(const Problem& problem, Uses& uses);
/// The log decay from the gate's raw input (use_gate_in_kernel).
void add_gate(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The sums of gates in a chunk, where there is a gate.
void add_sums(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The gate and its sums.
void add_gate_sums(const Problem& problem, const ChunkedStages& stages, Uses& uses);
using Names = std::map<std::string, std::string, std::less<>>;
/// The intra-chunk part, up to W and U. `names` has tensors in the place of others.
void add_intra(const ChunkedStages& stages, Uses& uses, const Names& names = {});
/// The forward scan over chunks; templates cover its three stages at once, or each.
void add_forward_scan(const Problem& problem, Uses& uses);
/// The same for a problem with `summary`.
void add_forward_summary(Uses& uses);
void add_output(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// dv of a chunk, and the reverse scan.
void add_reverse_scan(const ChunkedStages& stages, Uses& uses);
/// The same for a problem with `summary`.
void add_reverse_summary(const ChunkedStages& stages, Uses& uses);
/// Gradients of q, k, v, beta and the summed gates.
void add_chunk_gradients(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The name of the gradient of `x` (q or k) in that stage: dq, or dq_heads where add_row_gradient()
/// finishes it.
std::string chunk_gradient(const Problem& problem, const std::string& x);
/// The gradient of `x` (q or k) from the gradient of every value head's scaled row of x, where
/// value heads share key heads or rows are normalized.
void add_row_gradient(const Problem& problem, const std::string& x, Uses& uses);
/// The gradient of the log decay from the gradient of the summed gates.
void add_sums_gradient(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The gradients of the gate's raw input and its parameters from the gradient of the log decay
/// (use_gate_in_kernel).
void add_raw_gate_gradient(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// Both of the above: from the gradient of the summed gates to the gradients of the gate's inputs.
void add_gate_gradient(const Problem& problem, const ChunkedStages& stages, Uses& uses);

/// The whole list of an operator that has exactly the parts above.
Uses chunked_stages(const Problem& problem, const ChunkedStages& stages);

/// Useful FLOPs, per token and value head, C the chunk size, 64 when the problem names none. A
/// product of two matrices has 2, times n = num_householder where its rows are those of k, v or
/// beta and not of q or o:
///   forward, the W-free form
///     (4 n + 2) K V             K S, the update K^T V', and Q S
///     + (2 n + 2) C V           Tinv (V - K S), and P V'
///     + (2 n + 2) C K / (HV/H)  K K^T, and Q K^T, shared by the value heads of a group (by none
///                               where the gate is a vector)
///     + 2 n C^2                 the triangular inverse
///   backward
///     (12 n + 4) K V            W S, K^T V'; K dS', W^T dV'; V' dS'^T, dV' S^T; and Q^T dO, dO S^T
///     + (6 n + 4) C V           U; Tinv^T dU, X V'^T; and P^T dO, dO V'^T
///     + (2 n + 2) C K / (HV/H)  K K^T, and Q K^T
///     + (8 n + 4) C K           W; Tinv^T dW, M K, M^T K; and dP K, dP^T Q
///     + 2 n C^2                 the inverse
///     less W S, K^T V', U, W and the inverse if the forward pass wrote them
///   recurrent
///     (4 n + 2) K V             S^T k, k u^T, and S^T q
///   forward, summary: without the products of Q, and with transition V + K in the place of V
///   backward, summary: as forward
/// K = V = 128, bf16, n = 1, HV/H = 1, 2, 4: forward 172, 156 and 147 kFLOP and 1030, 774 and 646
/// bytes, backward 483 kFLOP and 2828 bytes (HV = H).
double chunked_flops(const Problem& problem);

/// A backward pass that recomputes the states writes and reads those of every chunk.
double chunked_rebuilt_bytes(const Problem& problem);

/// An operator that has exactly the parts above; only its data differ.
class ChunkedDeltaRule : public OperatorDefinition {
 public:
  ChunkedDeltaRule(const OperatorFacts& facts, TensorRules tensors, const ChunkedStages& stages)
      : OperatorDefinition(facts, std::move(tensors)), stages_(stages) {}

  std::vector<StageUse> stages(const Problem& problem) const override {
    return chunked_stages(problem, stages_);
  }
  std::span<const std::int64_t> chunk_sizes(const Problem& problem,
                                            DeviceKind device) const override;
  /// Returns delta_recurrence().
  std::unique_ptr<Recurrence> recurrence(const Problem& problem, const Arguments& host,
                                         std::int64_t sequence, std::int64_t head) const override {
    return delta_recurrence(problem, host, sequence, head);
  }
  double flops(const Problem& problem) const override { return chunked_flops(problem); }
  double rebuilt_bytes(const Problem& problem) const override {
    return chunked_rebuilt_bytes(problem);
  }

 private:
  const ChunkedStages& stages_;
};

}  // namespace wyvern
