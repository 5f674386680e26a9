// What members of the chunked delta rule share: parts of their stage lists, and their useful work.
// A member's stages() puts parts together, or replaces one by its own.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/operators/operator.hpp"

namespace wyvern {

using Uses = std::vector<StageUse>;

/// The stages whose form hangs on the gate, and the names that some of their tensors go by.
struct ChunkedStages {
  const StageDefinition* gate = nullptr;  ///< null where there is no gate
  const StageDefinition* intra;
  const StageDefinition* recompute;
  const StageDefinition* output;
  const StageDefinition* dv_local;
  const StageDefinition* d_first;  ///< gradients of a chunk; null where d_second has all of them
  const StageDefinition* d_second;
  const StageDefinition* gate_bwd = nullptr;  ///< as `gate`
  /// The sums of gates in a chunk, and their gradient.
  std::string sums = "G", d_sums = "dG";
  /// Whether the gradient of q is finished by d_second (else by d_first).
  bool second_has_dq = false;
  const StageDefinition* recurrent;
  /// By which a plan may carry states from segment to segment before everything else, and what then
  /// goes on from them; null: not at all.
  const StageDefinition* segment = nullptr;
  const StageDefinition* resume = nullptr;
  /// By which a plan may have the whole backward pass: both walks over the chunks, then the
  /// gradients; null: not at all.
  const StageDefinition* scans = nullptr;
  const StageDefinition* gradient = nullptr;
};

/// For no gate and for one value a head: intra-chunk products decay by one factor an element.
const ChunkedStages& scalar_gate_stages();
/// For one value a key channel: queries and keys decay before they are multiplied.
const ChunkedStages& vector_gate_stages();

// Parts, in the order in which a pass has them. Each appends to `uses`.

/// Tables of a packed batch's chunks.
void add_chunk_tables(const Problem& problem, Uses& uses);
/// What a forward pass may do first: states are carried from segment to segment.
void add_segments(const ChunkedStages& stages, Uses& uses);
/// What a plan may have instead of the rest of a backward pass, in front of it.
void add_two_kernels(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// Says what the two kernels in front replace, once that is there: all but the last sums of the
/// gate's parameters.
void end_two_kernels(const ChunkedStages& stages, Uses& uses);
/// The scales of the rows of `x` (q or k), where they are normalized.
void add_row_scales(const Problem& problem, const std::string& x, Uses& uses);
/// The chunks' tables, and the scales of q and of k.
void add_row_preparation(const Problem& problem, Uses& uses);
/// The log decay from the gate's raw input, where that is what is given.
void add_gate(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The sums of gates in a chunk, where there is a gate.
void add_sums(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The gate and its sums.
void add_gate_sums(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// The intra-chunk part, up to W and U.
void add_intra(const ChunkedStages& stages, Uses& uses);
/// The forward scan over chunks; templates cover its three stages at once, or each.
void add_forward_scan(const Problem& problem, Uses& uses);
void add_output(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// dv of a chunk, and the reverse scan.
void add_reverse_scan(const ChunkedStages& stages, Uses& uses);
/// Gradients of q, k, v, beta and the summed gates.
void add_chunk_gradients(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// What that of `x` (q or k) is called there: dq, or dq_heads where add_row_gradient() finishes it.
std::string chunk_gradient(const Problem& problem, const std::string& x);
/// From the gradient of every value head's scaled row of `x` (q or k) to that of x, where value
/// heads share key heads or rows are normalized.
void add_row_gradient(const Problem& problem, const std::string& x, Uses& uses);
/// From the gradient of summed gates to that of the log decay.
void add_sums_gradient(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// From there to the gate's raw input and its parameters, where that is what is given.
void add_raw_gate_gradient(const Problem& problem, const ChunkedStages& stages, Uses& uses);
/// From the gradient of summed gates to those of the gates and of what they are made from.
void add_gate_gradient(const Problem& problem, const ChunkedStages& stages, Uses& uses);

/// The whole list of a member whose parts all are those above.
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
///     less W S, K^T V', U, W and the inverse where the forward pass kept them
///   recurrent
///     (4 n + 2) K V             S^T k, k u^T, and S^T q
/// K = V = 128, bf16, n = 1, HV/H = 1, 2, 4: forward 172, 156 and 147 kFLOP and 1030, 774 and 646
/// bytes, backward 483 kFLOP and 2828 bytes (HV = H).
double chunked_flops(const Problem& problem);

/// A backward pass that rebuilds the states writes and reads those of every chunk.
double chunked_rebuilt_bytes(const Problem& problem);

/// A member whose parts all are those above; what differs is data.
class ChunkedDeltaRule : public OperatorDefinition {
 public:
  ChunkedDeltaRule(const OperatorFacts& facts, TensorRules tensors, const ChunkedStages& stages)
      : OperatorDefinition(facts, std::move(tensors)), stages_(stages) {}

  std::vector<StageUse> stages(const Problem& problem) const override {
    return chunked_stages(problem, stages_);
  }
  std::span<const std::int64_t> chunk_sizes(const Problem& problem,
                                            DeviceKind device) const override;
  /// That of delta_recurrence().
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
