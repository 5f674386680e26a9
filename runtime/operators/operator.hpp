// An operator as one value: everything outside templates/ that depends on the operator. README.md
// of this folder says how to add one.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/arguments.hpp"
#include "runtime/operators/recurrence.hpp"
#include "runtime/operators/tensors.hpp"
#include "runtime/plan.hpp"

namespace wyvern {

/// How the layers of a library call an operator. All of them leave the norms of q and k to it, and
/// where wyvern.layers serves them as a whole the convolution in front and the norm behind too.
struct CallStyle {
  std::string_view library;     ///< "transformers", "fla"; with what distinguishes the calls
  bool gate_in_kernel = false;  ///< A_log and dt_bias are given, g has q's dtype; else g is fp32
  bool beta_sigmoid = false;    ///< beta are logits
  bool state_v_first = false;
  bool no_gate = false;                ///< no g, where the decay is optional
  bool no_lower_bound = false;         ///< not even the preset's
  void (*decode)(Problem&) = nullptr;  ///< turns a call into the decoding call, where they differ
  std::int64_t short_prefill = 0;      ///< a prefill of at most so many tokens is recurrent
  bool packs_masked = false;    ///< with an attention mask the batch is packed, cu_seqlens int32
  bool packs_training = false;  ///< training steps may have packed batches, cu_seqlens int32
  bool fp32_beta = false;       ///< beta is fp32, else it has q's dtype
  /// Of the gate of the norm, where a layer is served as a whole. A step of decoding is then a call
  /// of the recurrent pass without a pack; of an operator that has none, a prefill that continues.
  std::optional<Activation> layer = std::nullopt;
  bool decodes_in_place = false;  ///< a whole layer: the states of its cache are a pool
};

/// A preset with the libraries whose models have its heads, the main one first.
struct ModelPreset : Preset {
  std::span<const CallStyle> styles;
};

/// An operator's features, from which follow its legal options and test cases.
struct OperatorFacts {
  std::string_view name;
  std::string_view summary;  ///< one line
  std::string_view source;   ///< the paper or repository it comes from
  GateKind gate = GateKind::none;
  bool optional_gate = false;  ///< has_g may be false: no decay then
  bool lower_bound = false;    ///< its gate takes lower_bound, and so safe_gate
  bool beta = false;           ///< there is a beta, which may be logits
  bool householder = false;    ///< num_householder may be above 1
  std::span<const ModelPreset> presets = {};

  bool gated() const noexcept { return gate != GateKind::none; }
};

/// One operator. Made once, never changed; thread-safe.
class OperatorDefinition {
 public:
  /// Throws std::logic_error when a rule names no tensor of Arguments, or two the same.
  OperatorDefinition(const OperatorFacts& facts, TensorRules tensors);
  virtual ~OperatorDefinition() = default;
  OperatorDefinition(const OperatorDefinition&) = delete;
  OperatorDefinition& operator=(const OperatorDefinition&) = delete;

  const OperatorFacts& facts() const noexcept { return facts_; }
  const TensorRules& tensors() const noexcept { return tensors_; }
  /// The rule of kArguments[index], or null where the operator has no such tensor.
  const TensorRule* rule(std::size_t index) const noexcept { return by_argument_[index]; }
  /// The rule of a tensor by its name; throws Error(kBadInput) where there is none.
  const TensorRule& rule(std::string_view name) const;

  /// Throws Error(kBadInput) for rules beyond the facts; everything else has been checked.
  virtual void check(const Problem&) const {}
  /// The stages of the problem's pass, in order, without the stages that its options leave out.
  virtual std::vector<StageUse> stages(const Problem& problem) const = 0;
  /// Constants of its own stages, beside those that problem_constants() sets for every operator.
  virtual Values constants(const Problem&) const { return {}; }
  /// Every chunk size that templates offer, in the order to try them; lives forever.
  virtual std::span<const std::int64_t> chunk_sizes(const Problem& problem,
                                                    DeviceKind device) const;
  /// The recurrence of value head `head` of sequence `sequence` in float64. It refers to the
  /// problem and the host tensors.
  virtual std::unique_ptr<Recurrence> recurrence(const Problem& problem, const Arguments& host,
                                                 std::int64_t sequence,
                                                 std::int64_t head) const = 0;
  /// Useful FLOPs of the pass.
  virtual double flops(const Problem& problem) const = 0;
  /// Bytes that the pass must write and read again beside its tensors.
  virtual double rebuilt_bytes(const Problem& problem) const = 0;

 private:
  OperatorFacts facts_;
  TensorRules tensors_;
  std::array<const TensorRule*, kOperatorTensors> by_argument_{};
};

/// All operators of the build, by name.
std::span<const OperatorDefinition* const> operator_definitions();
/// Null where there is none of that name.
const OperatorDefinition* find_operator(std::string_view name) noexcept;
/// Throws Error(kBadInput) that lists the names.
const OperatorDefinition& definition_of(const Problem& problem);

/// The names of the operators for which `has` holds: "kda or gdn2".
std::string operators_with(bool (*has)(const OperatorFacts&));

/// The work of a pass, independent of the plan.
struct Work {
  double bytes = 0;
  double flops = 0;
};

/// bytes: every tensor of the pass once (a state updated in place twice, of a pool only the slots
/// that sequences use), and intermediates that any plan must write and read; flops: the operator's
/// own count.
Work work_of(const Problem& problem);

}  // namespace wyvern
