#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "runtime/operators/operator.hpp"
#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

const OperatorFacts& facts_of(const Problem& p) { return definition_of(p).facts(); }

/// Whether an operator's recurrent pass takes drafts.
bool takes_drafts(const Problem& p) { return facts_of(p).beta && !facts_of(p).householder; }

/// A case, and another one that is tried with it: `into` is varied as `one` is too.
struct Together {
  std::string_view one, into;
};

/// Shapes and options that have little to do with each other, which every template meets one by one
/// in stages/, and cases that another one includes.
constexpr Together kTogether[] = {
    {"WideGroups", "K100V60"},
    {"Fp16", "K100V60"},
    {"K33V100", "NormalizedEqualHeads"},
    {"EqualHeads", "NormalizedEqualHeads"},
    {"Normalized", "NormalizedEqualHeads"},
    {"BetaLogits", "NormalizedEqualHeads"},
    {"K60V33", "Everything"},
    {"BetaLogitsDoubled", "Everything"},
    {"Chunk16", "K100V60"},
    {"States_fp16", "K100V60"},
    {"BetaFp32", "K128V128"},
    {"Chunk32", "K128V128"},
    {"GatesBf16", "K128V128"},
    {"States_bf16", "K128V128"},
    {"GateInKernelWithoutBias", "NoStates"},
    {"BoundedGateAlone", "InitialState"},
    {"Kept16", "Kept16Packed"},
    {"Kept32", "Kept32Packed"},
    {"PackedInt64", "Kept64Packed"},
    {"BatchInvariant", "Packed"},
    {"EveryStateKFirst", "EveryStatePackedKFirst"},
    {"InPlace_bf16", "InPlaceFromZeros"},
    {"InPlaceFewSlots", "InPlaceIndexedVFirst"},
};

/// Collects variations of one base problem.
class Cases {
 public:
  explicit Cases(const OperatorPass& which) : which_(which) {}

  template <class Vary>
  void add(std::string name, const Vary& vary, Gate gate = Gate::typical, Lengths lengths = {}) {
    OperatorCase one{std::move(name), base(which_), gate, std::move(lengths)};
    vary(one.problem);
    cases_.push_back(std::move(one));
    variations_.emplace_back(vary);
  }

  /// Tries together what kTogether says, where there are both.
  void join() {
    for (const Together& pair : kTogether) {
      const auto one = find(pair.one), into = find(pair.into);
      if (one == cases_.end() || into == cases_.end()) continue;
      const auto vary = variations_.begin() + (one - cases_.begin());
      (*vary)(into->problem);
      variations_.erase(vary);
      cases_.erase(one);
    }
  }

  bool recurrent() const { return which_.pass == Pass::recurrent; }
  GateKind gate() const { return gate_kind(base(which_)); }
  const OperatorFacts& facts() const { return facts_of(base(which_)); }
  std::vector<OperatorCase> take() { return std::move(cases_); }

 private:
  std::vector<OperatorCase>::iterator find(std::string_view name) {
    return std::find_if(cases_.begin(), cases_.end(),
                        [name](const OperatorCase& one) { return one.name == name; });
  }

  OperatorPass which_;
  std::vector<OperatorCase> cases_;
  std::vector<std::function<void(Problem&)>> variations_;  ///< of each case
};

void states(Problem& p) { p.initial_state = p.output_final_state = true; }

void add_shapes(Cases& cases) {
  const bool recurrent = cases.recurrent();
  const auto dims = [](std::int64_t K, std::int64_t V) {
    return [=](Problem& p) { p.K = K, p.V = V; };
  };
  cases.add("Plain", [](Problem&) {});
  cases.add("WideGroups", [](Problem& p) { p.H = 2, p.HV = 6; });
  cases.add("EqualHeads", [](Problem& p) { p.H = p.HV = 3; });
  cases.add("K60V33", dims(60, 33));
  cases.add("K33V100", dims(33, 100));
  cases.add("K100V60", dims(100, 60));
  cases.add("K128V128", dims(128, 128));
  cases.add("K256V512",
            [=](Problem& p) { p.H = p.HV = 1, p.K = 256, p.V = 512, p.T = recurrent ? 3 : 70; });
  cases.add(
      "K256V256Packed",
      [](Problem& p) {
        p.packed = p.use_qk_l2norm = true, p.H = 1, p.HV = 2, p.K = p.V = 256, states(p);
      },
      Gate::mixed, recurrent ? Lengths{3, 0, 1} : Lengths{330, 0, 1, 64});
  cases.add("Batch", [=](Problem& p) { p.B = p.N = 3, p.T = recurrent ? 8 : 50; });
  cases.add("OneToken", [](Problem& p) { p.T = 1, states(p); });
  cases.add("NoTokens", [](Problem& p) { p.T = 0, states(p); });
  cases.add("NoSequences", [](Problem& p) { p.B = p.N = 0, states(p); });
  const auto ragged = [](Problem& p) { p.packed = true, states(p); };
  const Lengths lengths = recurrent ? Lengths{1, 0, 3, 8, 0} : Lengths{65, 0, 1, 64, 130, 0};
  cases.add("Packed", ragged, Gate::mixed, lengths);
  cases.add(
      "PackedInt64", [](Problem& p) { p.packed = true, p.seqlens_dtype = DType::int64; },
      Gate::typical, lengths);
  if (!recurrent)
    for (const std::int64_t hint : {0, 130, 1 << 20})
      cases.add(
          fmt::format("PackedHint{}", hint), [=](Problem& p) { ragged(p), p.seqlens_hint = hint; },
          Gate::mixed, lengths);
  cases.add("PackedAllEmpty", ragged, Gate::typical, {0, 0, 0});
  cases.add("PackedOfNone", ragged, Gate::typical, {});
}

/// Chunks of many more rows than keys have elements, and nothing that decays: most of what enters
/// the state is overwritten inside the chunk, and rounding errors add up that a larger K would
/// hide.
void add_few_keys(Cases& cases) {
  const auto few = [](Problem& p) { states(p), p.K = 16, p.V = 128; };
  cases.add("FewKeysReflected",
            [=](Problem& p) {
              few(p), p.packed = true, p.H = p.HV = 2;
              p.use_beta_sigmoid = p.allow_neg_eigval = facts_of(p).beta;
            },
            Gate::zero, {0, 5, 77, 0});
  cases.add(
      "FewKeysNormalized",
      [=](Problem& p) {
        few(p), p.initial_state = false, p.use_qk_l2norm = true, p.H = 1, p.HV = 2;
      },
      Gate::zero);
}

void add_states(Cases& cases) {
  cases.add("InitialState",
            [](Problem& p) { p.initial_state = true, p.output_final_state = false; });
  cases.add("NoStates", [](Problem& p) { p.output_final_state = false; });
  cases.add("States", states);
  cases.add("StatesVFirst", [](Problem& p) { states(p), p.state_v_first = true, p.V = 40; });
  for (const DType dtype : {DType::bf16, DType::fp16})
    cases.add(fmt::format("States_{}", to_string(dtype)),
              [=](Problem& p) { states(p), p.state_dtype = dtype; });
}

void add_numbers(Cases& cases) {
  const auto all = [](DType dtype) {
    return [=](Problem& p) { p.dtype = p.beta_dtype = dtype, states(p); };
  };
  cases.add("Fp16", all(DType::fp16));
  for (const Precision floor : {Precision::tf32, Precision::tf32x3, Precision::ieee})
    cases.add(fmt::format("Fp32_{}", to_string(floor)),
              [=](Problem& p) { all(DType::fp32)(p), p.precision = floor; });
  cases.add("BetaFp32", [](Problem& p) { p.beta_dtype = DType::fp32; });
  if (cases.gate() == GateKind::none) return;
  cases.add("GatesBf16", [](Problem& p) { p.g_dtype = DType::bf16; });
  if (cases.gate() == GateKind::vector)
    cases.add("Fp32GatesFp16", [=](Problem& p) { all(DType::fp32)(p), p.g_dtype = DType::fp16; });
}

void add_gates(Cases& cases) {
  if (cases.gate() == GateKind::none) return;
  for (const Gate gate : {Gate::zero, Gate::typical, Gate::mixed, Gate::very_negative}) {
    for (const DType dtype : {DType::bf16, DType::fp32})
      cases.add(
          fmt::format("Gate_{}_{}", to_string(gate), to_string(dtype)),
          [=](Problem& p) { p.dtype = p.beta_dtype = dtype, states(p); }, gate);
    cases.add(
        fmt::format("GateInKernel_{}", to_string(gate)),
        [](Problem& p) { p.use_gate_in_kernel = p.has_dt_bias = true, states(p); }, gate);
    if (!cases.facts().lower_bound) continue;
    cases.add(
        fmt::format("SafeGate_{}", to_string(gate)),
        [](Problem& p) { p.safe_gate = true, p.lower_bound = -5.0F, states(p); }, gate);
    cases.add(
        fmt::format("BoundedGate_{}", to_string(gate)),
        [](Problem& p) {
          p.use_gate_in_kernel = p.has_dt_bias = true, p.lower_bound = -5.0F, states(p);
        },
        gate);
  }
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    const auto fast = [=](Problem& p) { p.dtype = p.beta_dtype = dtype, states(p); };
    const std::string name = fmt::format("Gate_fast_{}", to_string(dtype));
    cases.add(name, fast, Gate::fast);
    if (cases.facts().householder)
      cases.add(
          name + "_Steps3",
          [=](Problem& p) { fast(p), p.num_householder = 3, p.packed = p.use_qk_l2norm = true; },
          Gate::fast, {65, 0, 1, 64});
  }
  cases.add("GateInKernelWithoutBias", [](Problem& p) { p.use_gate_in_kernel = true; });
  if (cases.facts().optional_gate) cases.add("NoGate", [](Problem& p) { p.has_g = false; });
  if (!cases.facts().lower_bound) return;
  cases.add("BoundedGateWithoutRate", [](Problem& p) {
    p.use_gate_in_kernel = p.has_dt_bias = true, p.has_A_log = false, p.lower_bound = -2.0F;
  });
  cases.add("BoundedGateAlone", [](Problem& p) {
    p.use_gate_in_kernel = true, p.has_A_log = false, p.lower_bound = -2.0F;
  });
}

void add_options(Cases& cases) {
  cases.add("Normalized", [](Problem& p) { p.use_qk_l2norm = true; });
  cases.add("NormalizedEqualHeads", [](Problem& p) { p.use_qk_l2norm = true, p.H = p.HV = 2; });
  if (cases.facts().beta) {
    cases.add("BetaLogits", [](Problem& p) { p.use_beta_sigmoid = true; });
    cases.add("BetaLogitsDoubled",
              [](Problem& p) { p.use_beta_sigmoid = p.allow_neg_eigval = true; });
  }
  if (cases.facts().householder)
    for (const std::int64_t steps : {1, 3, 4})
      cases.add(fmt::format("Steps{}", steps),
                [=](Problem& p) { p.num_householder = steps, states(p); });
  cases.add("Scale", [](Problem& p) { p.scale = 0.5F; });
  cases.add("Everything", [](Problem& p) {
    p.use_qk_l2norm = p.state_v_first = true;
    p.use_beta_sigmoid = p.allow_neg_eigval = facts_of(p).beta;
    if (facts_of(p).householder) p.num_householder = 3;
    p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
    states(p);
  });
}

void add_chunks(Cases& cases, Pass pass) {
  for (const std::int64_t size : {16, 32, 64}) {
    cases.add(
        fmt::format("Chunk{}", size), [=](Problem& p) { p.chunk_size = size, states(p); },
        Gate::mixed);
    const auto kept = [=](Problem& p) {
      p.disable_recompute = true, p.chunk_size = size, states(p);
    };
    cases.add(fmt::format("Kept{}", size), kept, Gate::mixed);
    cases.add(fmt::format("Kept{}Packed", size),
              [=](Problem& p) { kept(p), p.packed = p.use_qk_l2norm = true; }, Gate::typical,
              {size + 1, 0, 2 * size, 1});
  }
  if (pass != Pass::forward) return;
  add_few_keys(cases);
  for (const bool v_first : {false, true}) {
    const auto every = [=](Problem& p) {
      p.return_intermediate_states = true, p.state_v_first = v_first, p.V = 40, states(p);
    };
    const std::string order = v_first ? "VFirst" : "KFirst";
    cases.add("EveryState" + order, every);
    cases.add("EveryStatePacked" + order,
              [=](Problem& p) { every(p), p.packed = true, p.chunk_size = 32; }, Gate::mixed,
              {33, 0, 64, 1, 0});
  }
}

/// States in place. Of a forward pass the sequences are few, as tokens are many.
void add_pools_in_place(Cases& cases) {
  const bool recurrent = cases.recurrent();
  const auto inplace = [](Problem& p) {
    p.inplace_state = true, p.initial_state = p.output_final_state = false;
  };
  const auto pool = [=](Problem& p) {
    inplace(p), p.B = p.N = 6, p.state_index = true, p.state_slots = 9;
    if (!recurrent) p.T = 70;
  };
  const Lengths lengths = recurrent ? Lengths{1, 8, 0, 2, 1, 3} : Lengths{65, 130, 0, 2, 64, 17};
  cases.add("InPlace", inplace);
  for (const DType dtype : {DType::bf16, DType::fp16})
    cases.add(fmt::format("InPlace_{}", to_string(dtype)),
              [=](Problem& p) { inplace(p), p.state_dtype = dtype; });
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    cases.add(
        fmt::format("InPlaceIndexed_{}", to_string(dtype)),
        [=](Problem& p) { pool(p), p.dtype = p.beta_dtype = dtype; }, Gate::mixed);
  cases.add("InPlaceIndexedVFirst", [=](Problem& p) {
    pool(p), p.state_v_first = true, p.V = 40;
    if (recurrent) p.T = 1;
  });
  cases.add(
      "InPlaceIndexedPacked", [=](Problem& p) { pool(p), p.packed = p.use_qk_l2norm = true; },
      Gate::typical, lengths);
  cases.add("InPlaceNoSlots", [=](Problem& p) { pool(p), p.state_slots = 0; });
  cases.add("InPlaceFewSlots", [=](Problem& p) { pool(p), p.state_slots = 2; });
  cases.add("InPlaceFromZeros",
            [=](Problem& p) { inplace(p), p.B = p.N = 4, p.has_initial_state = true; });
  cases.add("InPlaceOutputSlots", [=](Problem& p) {
    pool(p), p.state_slots = 16, p.output_state_index = p.null_slot_zero = true;
  });
  cases.add(
      "InPlaceEverything",
      [=](Problem& p) {
        pool(p), p.state_slots = 16, p.packed = p.state_v_first = true;
        p.output_state_index = p.null_slot_zero = p.has_initial_state = true;
        p.index_dtype = DType::int64, p.state_dtype = DType::bf16;
      },
      Gate::mixed, lengths);
}

/// Elements of 8 bits, with a scale for each slot and head.
void add_float8_pools(Cases& cases) {
  const bool recurrent = cases.recurrent();
  for (const DType states : {DType::float8_e4m3, DType::float8_e5m2}) {
    const auto pool = [=](Problem& p) {
      p.initial_state = p.output_final_state = false;
      p.inplace_state = p.state_index = true, p.state_dtype = states;
      p.B = p.N = 6, p.state_slots = 40, p.T = recurrent ? 3 : 70;
    };
    const std::string name(to_string(states));
    cases.add(
        "Pool_" + name,
        [=](Problem& p) {
          pool(p), p.output_state_index = p.has_initial_state = p.null_slot_zero = true;
        },
        Gate::mixed);
    cases.add("PoolVFirst_" + name, [=](Problem& p) {
      pool(p), p.state_v_first = true, p.V = 40, p.K = 60, p.dtype = p.beta_dtype = DType::fp32;
    });
    cases.add("PoolWithoutIndex_" + name, [=](Problem& p) {
      pool(p), p.state_index = false, p.state_slots = 0, p.K = 33, p.V = 7;
    });
    if (recurrent)
      cases.add("Columns_" + name, [=](Problem& p) { pool(p), p.index_columns = 5; }, Gate::mixed);
  }
}

/// States inside sequences, at every so many tokens and after so many of each.
void add_checkpoints(Cases& cases) {
  const auto every = [](Problem& p) { states(p), p.checkpoint_every = 64; };
  const auto offsets = [](Problem& p) { states(p), p.checkpoint_offsets = true; };
  const Lengths lengths{65, 0, 1, 64, 130, 0, 200, 16};
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    const auto of = [=](Problem& p) { p.dtype = p.beta_dtype = dtype, p.B = p.N = 3; };
    cases.add(
        fmt::format("CheckpointsEvery_{}", to_string(dtype)), [=](Problem& p) { every(p), of(p); },
        Gate::mixed);
    cases.add(
        fmt::format("CheckpointOffsets_{}", to_string(dtype)),
        [=](Problem& p) { offsets(p), of(p); }, Gate::mixed);
  }
  for (const std::int64_t size : {16, 32, 64})
    cases.add(
        fmt::format("CheckpointOffsetsChunk{}", size),
        [=](Problem& p) { offsets(p), p.B = p.N = 4, p.chunk_size = size; }, Gate::very_negative);
  cases.add(
      "CheckpointsEveryPacked",
      [=](Problem& p) { every(p), p.packed = p.use_qk_l2norm = p.state_v_first = true, p.V = 40; },
      Gate::typical, lengths);
  cases.add(
      "CheckpointOffsetsPacked",
      [=](Problem& p) {
        offsets(p), p.packed = p.use_qk_l2norm = p.state_v_first = true, p.V = 40, p.K = 60;
        p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
      },
      Gate::typical, lengths);
  cases.add("CheckpointsEvery128Chunk64",
            [=](Problem& p) { every(p), p.checkpoint_every = 128, p.chunk_size = 64, p.T = 300; });
  cases.add(
      "CheckpointsFewRows", [=](Problem& p) { every(p), p.packed = true, p.checkpoint_rows = 2; },
      Gate::typical, lengths);
  cases.add("CheckpointsNoRows", [=](Problem& p) { every(p), p.checkpoint_rows = 0; });
  cases.add(
      "CheckpointsMoreRows", [=](Problem& p) { every(p), p.packed = true, p.checkpoint_rows = 9; },
      Gate::typical, lengths);
  cases.add("CheckpointsPastTheEnd", [=](Problem& p) { every(p), p.checkpoint_every = 1 << 30; });
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    const auto wide = [=](Problem& p) { p.state_dtype = dtype, p.fp32_checkpoints = true; };
    cases.add(
        fmt::format("CheckpointsEveryFp32Of_{}", to_string(dtype)),
        [=](Problem& p) { every(p), wide(p), p.packed = true; }, Gate::mixed, lengths);
    cases.add(
        fmt::format("CheckpointOffsetsFp32Of_{}", to_string(dtype)),
        [=](Problem& p) { offsets(p), wide(p), p.state_v_first = true, p.B = p.N = 3; },
        Gate::mixed);
  }
  if (cases.facts().beta && !cases.facts().householder)
    cases.add(
        "CheckpointsEveryFp32OfFloat8",
        [=](Problem& p) {
          every(p), p.initial_state = p.output_final_state = false;
          p.inplace_state = p.state_index = p.fp32_checkpoints = true;
          p.state_slots = 4, p.B = p.N = 3, p.state_dtype = DType::float8_e4m3;
        },
        Gate::mixed);
  cases.add("CheckpointsAndEveryState",
            [=](Problem& p) { offsets(p), p.return_intermediate_states = true; });
  for (const bool some : {false, true})
    cases.add(
        some ? "CheckpointOffsetsInPlace" : "CheckpointsEveryInPlace",
        [=](Problem& p) {
          some ? offsets(p) : every(p);
          p.initial_state = p.output_final_state = false;
          p.inplace_state = p.state_index = p.packed = p.output_state_index = true;
          p.has_initial_state = p.null_slot_zero = true;
          p.state_slots = 16, p.index_dtype = DType::int64;
          p.state_dtype = some ? DType::fp16 : DType::bf16;
        },
        Gate::mixed, lengths);
}

/// Drafts to verify: a slot for each token's state, states of each token in a buffer, trees.
void add_drafts(Cases& cases) {
  const auto pool = [](Problem& p) {
    p.initial_state = p.output_final_state = false;
    p.inplace_state = p.state_index = true;
    p.B = p.N = 6, p.T = 4, p.state_slots = 40;
  };
  const auto columns = [=](Problem& p) { pool(p), p.index_columns = 5; };
  const auto buffer = [=](Problem& p) {
    pool(p), p.intermediate_rows = 7, p.disable_state_update = true;
  };
  const auto tree = [=](Problem& p) { buffer(p), p.parent = true, p.T = 8; };
  const Lengths lengths{1, 8, 0, 2, 5, 3};
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const bool v_first : {false, true}) {
      const std::string name = fmt::format("{}{}", to_string(dtype), v_first ? "VFirst" : "");
      const auto of = [=](Problem& p) {
        p.dtype = p.beta_dtype = dtype, p.state_v_first = v_first;
        if (v_first) p.index_dtype = DType::int64, p.has_initial_state = p.null_slot_zero = true;
        if (v_first && dtype != DType::fp32) p.state_dtype = dtype;
      };
      cases.add("Columns_" + name, [=](Problem& p) { columns(p), of(p); }, Gate::mixed);
      cases.add("Intermediate_" + name, [=](Problem& p) { buffer(p), of(p); }, Gate::mixed);
      cases.add("Tree_" + name, [=](Problem& p) { tree(p), of(p); }, Gate::mixed);
    }
  cases.add(
      "ColumnsPacked",
      [=](Problem& p) { columns(p), p.packed = p.use_qk_l2norm = true, p.K = 60, p.V = 40; },
      Gate::typical, lengths);
  cases.add("ColumnsOneToken", [=](Problem& p) { columns(p), p.T = p.index_columns = 1; });
  cases.add("ColumnsNoSlots", [=](Problem& p) { columns(p), p.state_slots = 0; });
  cases.add("ColumnsAndIntermediate", [=](Problem& p) { columns(p), p.intermediate_rows = 4; });
  cases.add("ColumnsReadOnly", [=](Problem& p) { columns(p), p.disable_state_update = true; });
  cases.add(
      "IntermediatePacked",
      [=](Problem& p) {
        pool(p), p.packed = true, p.output_state_index = true;
        p.intermediate_rows = 8, p.draft_tokens = 6;
      },
      Gate::typical, lengths);
  cases.add("IntermediateOfInitialState", [](Problem& p) {
    p.B = p.N = 3, p.initial_state = p.output_final_state = true, p.intermediate_rows = 3;
  });
  cases.add("IntermediateNoRows", [=](Problem& p) { buffer(p), p.intermediate_rows = 0; });
  cases.add(
      "TreePacked",
      [=](Problem& p) {
        tree(p), p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = true;
        p.index_columns = 8, p.draft_tokens = 6, p.intermediate_rows = 6;
        p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
      },
      Gate::typical, lengths);
  cases.add("TreeOf16",
            [=](Problem& p) { tree(p), p.T = 16, p.dtype = p.beta_dtype = DType::fp32; });
  cases.add("TreeFromZeros", [=](Problem& p) {
    tree(p), p.inplace_state = p.state_index = p.disable_state_update = false, p.state_slots = 0;
  });
}

/// Rows of o normalized and gated, of null sequences and null tokens too, and gradients of that.
void add_output_norms(Cases& cases, const Problem& base) {
  const auto norm = [](Problem& p) { p.output_norm = Activation::silu; };
  const auto pool = [=](Problem& p) {
    norm(p), p.initial_state = p.output_final_state = false;
    p.inplace_state = p.state_index = true;
    p.B = p.N = 6, p.T = 4, p.state_slots = 40;
  };
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    cases.add(fmt::format("Norm_{}", to_string(dtype)), [=](Problem& p) {
      norm(p), states(p), p.dtype = p.beta_dtype = dtype, p.K = p.V = 128;
      if (dtype == DType::fp16) p.output_norm = Activation::sigmoid;
    });
  cases.add("NormK33V100", [=](Problem& p) {
    p.output_norm = Activation::sigmoid, p.norm_eps = 1e-3F, p.K = 33, p.V = 100;
  });
  cases.add("NormK256V512",
            [=](Problem& p) { norm(p), states(p), p.H = p.HV = 1, p.K = 256, p.V = 512; });
  cases.add("NormPacked",
            [=](Problem& p) {
              norm(p), states(p), p.packed = p.use_qk_l2norm = p.state_v_first = true, p.V = 40;
              p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
            },
            Gate::mixed, {1, 0, base.pass == Pass::recurrent ? 3 : 70, 8, 0});
  cases.add("NormNoTokens", [=](Problem& p) { norm(p), states(p), p.T = 0; });
  if (base.pass == Pass::backward) {
    cases.add("NormKept", [=](Problem& p) { norm(p), p.disable_recompute = true, p.V = 48; });
    return;
  }
  const auto quantized = [=](Problem& p) {
    norm(p), p.output_dtype = DType::float8_e4m3, p.K = 64, p.V = 128;
  };
  for (const DType dtype : {DType::fp16, DType::fp32})
    cases.add(fmt::format("NormE4m3_{}", to_string(dtype)), [=](Problem& p) {
      quantized(p), states(p), p.dtype = p.beta_dtype = dtype, p.V = 256;
      p.output_scale_tokens_last = dtype == DType::fp16;
    });
  cases.add("NormE4m3Packed",
            [=](Problem& p) {
              quantized(p), states(p), p.packed = p.output_scale_tokens_last = true;
              p.short_conv = 4;
            },
            Gate::mixed, {1, 0, base.pass == Pass::recurrent ? 3 : 70, 6, 0});
  cases.add(
      "NormE4m3Pool",
      [=](Problem& p) { pool(p), quantized(p), p.T = base.pass == Pass::recurrent ? 4 : 40; },
      Gate::mixed);
  cases.add("NormE4m3NoTokens",
            [=](Problem& p) { quantized(p), p.output_scale_tokens_last = true, p.T = 0; });
  if (base.pass == Pass::forward) {
    cases.add("NormKept", [=](Problem& p) { norm(p), p.keep_output = true, p.V = 48; });
    cases.add("NormPool", [=](Problem& p) { pool(p), p.T = 40; }, Gate::mixed);
    cases.add("NormStates", [=](Problem& p) {
      norm(p), p.return_intermediate_states = p.state_v_first = true, p.V = 48;
    });
    return;
  }
  if (!takes_drafts(base)) return;
  cases.add(
      "NormColumns", [=](Problem& p) { pool(p), p.index_columns = 5, p.state_dtype = DType::bf16; },
      Gate::mixed);
  cases.add(
      "NormTree",
      [=](Problem& p) {
        pool(p), p.intermediate_rows = 7, p.disable_state_update = p.parent = true, p.T = 8;
      },
      Gate::mixed);
}

/// Windows in slots of a pool: of every width, that have room for more rows, with channels or
/// tokens first; null sequences, sequences from zeros, and sequences without tokens.
void add_conv_pools(Cases& cases, Pass pass) {
  const auto pool = [](Problem& p) {
    p.initial_state = p.output_final_state = false;
    p.short_conv = 4, p.inplace_state = p.inplace_conv_state = true;
  };
  const auto slots = [=](Problem& p) {
    pool(p), p.packed = p.state_index = p.has_initial_state = p.output_state_index = true;
    p.state_slots = 20, p.V = 40;
  };
  const bool recurrent = pass == Pass::recurrent;
  // Sequences that begin in each row around a tile's end, one of 1, 2 and 3 tokens each.
  const Lengths lengths =
      recurrent ? Lengths{1, 0, 2, 3, 4, 7, 1, 1, 0} : Lengths{62, 1, 1, 0, 2, 61, 3, 64, 1, 70, 0};
  cases.add("ConvPool", [=](Problem& p) { pool(p), p.has_conv_bias = true; });
  cases.add("ConvPoolTokensFirst", [=](Problem& p) {
    pool(p), p.conv_tokens_first = true, p.dtype = p.beta_dtype = DType::fp16;
  });
  cases.add("ConvPoolSlots", slots, Gate::mixed, lengths);
  cases.add(
      "ConvPoolColumns",
      [=](Problem& p) {
        slots(p), p.conv_columns = 6, p.short_conv = 3, p.null_slot_zero = true;
        p.index_dtype = DType::int64, p.dtype = p.beta_dtype = DType::fp32;
      },
      Gate::typical, lengths);
  cases.add(
      "ConvPoolColumnsTokensFirst",
      [=](Problem& p) {
        slots(p), p.conv_columns = 2, p.short_conv = 2, p.conv_tokens_first = true;
        p.output_state_index = false;
      },
      Gate::typical, lengths);
  cases.add("ConvPoolK33V100", [=](Problem& p) {
    pool(p), p.state_index = true, p.B = p.N = 6, p.T = 5, p.state_slots = 4, p.K = 33, p.V = 100;
  });
  cases.add("ConvPoolNoTokens",
            [=](Problem& p) { slots(p), p.packed = false, p.B = p.N = 6, p.T = 0; });
  cases.add("ConvPoolNorm", [=](Problem& p) { pool(p), p.output_norm = Activation::silu; });
  if (pass == Pass::forward && !cases.facts().householder) {
    cases.add(
        "ConvPoolCheckpoints", [=](Problem& p) { slots(p), p.checkpoint_every = 64; }, Gate::mixed,
        lengths);
    cases.add("ConvCheckpointOffsets", [](Problem& p) {
      p.short_conv = 4, p.initial_state = p.initial_conv_state = p.checkpoint_offsets = true;
    });
  }
  if (recurrent && !cases.facts().householder && cases.facts().beta)
    cases.add("ConvPoolReadOnly", [=](Problem& p) { pool(p), p.disable_state_update = true; });
}

/// Drafts of rows that are convolved: windows in front of any token of the step before.
void add_conv_drafts(Cases& cases) {
  const auto columns = [](Problem& p) {
    p.initial_state = p.output_final_state = false;
    p.short_conv = 4, p.inplace_state = p.inplace_conv_state = p.state_index = true;
    p.B = p.N = 6, p.T = 4, p.state_slots = 40, p.index_columns = 5;
  };
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const bool tokens_first : {false, true})
      for (const std::int64_t W : {2, 3, 4})
        cases.add(
            fmt::format("ConvColumns_{}W{}{}", to_string(dtype), W,
                        tokens_first ? "TokensFirst" : ""),
            [=](Problem& p) {
              columns(p), p.dtype = p.beta_dtype = dtype, p.short_conv = W;
              p.conv_tokens_first = tokens_first, p.has_conv_bias = W != 3;
              if (W == 2) p.conv_activation = Activation::none;
              if (tokens_first) p.conv_columns = 9, p.index_dtype = DType::int64;
              if (W == 3) p.has_initial_state = p.null_slot_zero = true;
            },
            Gate::mixed);
  for (const bool tokens_first : {false, true})
    cases.add(fmt::format("ConvColumnsPacked{}", tokens_first ? "TokensFirst" : ""),
              [=](Problem& p) {
                columns(p), p.packed = p.use_qk_l2norm = true, p.K = 60, p.V = 40;
                p.conv_tokens_first = tokens_first;
              },
              Gate::typical, {1, 8, 0, 2, 5, 3});
  cases.add("ConvColumnsOneToken", [=](Problem& p) { columns(p), p.T = p.index_columns = 1; });
  cases.add("ConvColumnsK33V100", [=](Problem& p) { columns(p), p.K = 33, p.V = 100; });
  const auto buffer = [=](Problem& p) {
    columns(p), p.index_columns = 0, p.intermediate_rows = 7, p.disable_state_update = true;
  };
  const auto tree = [=](Problem& p) { buffer(p), p.parent = true, p.T = 8; };
  const Lengths lengths{1, 8, 0, 2, 5, 3};
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const bool tokens_first : {false, true}) {
      const std::string name =
          fmt::format("{}{}", to_string(dtype), tokens_first ? "TokensFirst" : "");
      const auto of = [=](Problem& p) {
        p.dtype = p.beta_dtype = dtype, p.conv_tokens_first = tokens_first;
        p.short_conv = dtype == DType::bf16 ? 4 : dtype == DType::fp16 ? 3 : 2;
        p.has_conv_bias = dtype != DType::fp16;
        if (tokens_first) p.conv_columns = 9, p.index_dtype = DType::int64;
        if (tokens_first) p.has_initial_state = p.null_slot_zero = true;
      };
      cases.add("ConvIntermediate_" + name, [=](Problem& p) { buffer(p), of(p); }, Gate::mixed);
      cases.add("ConvTree_" + name, [=](Problem& p) { tree(p), of(p); }, Gate::mixed);
    }
  cases.add(
      "ConvIntermediatePacked",
      [=](Problem& p) {
        columns(p), p.index_columns = 0, p.packed = p.output_state_index = true;
        p.intermediate_rows = 8, p.draft_tokens = 6;
      },
      Gate::typical, lengths);
  cases.add("ConvIntermediateOfInitialState", [](Problem& p) {
    p.short_conv = 4, p.initial_conv_state = p.output_conv_state = true;
    p.B = p.N = 3, p.initial_state = p.output_final_state = true, p.intermediate_rows = 3;
  });
  cases.add("ConvColumnsAndIntermediate",
            [=](Problem& p) { columns(p), p.intermediate_rows = 4, p.K = 33, p.V = 100; });
  cases.add(
      "ConvTreePacked",
      [=](Problem& p) {
        tree(p), p.packed = p.use_qk_l2norm = p.conv_tokens_first = true;
        p.index_columns = 8, p.draft_tokens = 6, p.intermediate_rows = 6;
      },
      Gate::typical, lengths);
  cases.add("ConvTreeOf16", [=](Problem& p) { tree(p), p.T = 16, p.K = 33, p.V = 100; });
  cases.add("ConvTreeFromZeros", [=](Problem& p) {
    tree(p), p.inplace_state = p.state_index = p.disable_state_update = false, p.state_slots = 0;
    p.inplace_conv_state = false;
  });
  cases.add("ConvColumnsReadOnly", [=](Problem& p) { columns(p), p.disable_state_update = true; });
}

/// q, k and v convolved: shapes, sequences shorter than the window, empty ones, all windows, those
/// of pools, and in the backward pass sequences that end in each row around a part of the tokens.
void add_short_convs(Cases& cases, Pass pass) {
  const auto windows = [](Problem& p) {
    states(p), p.short_conv = 4, p.initial_conv_state = p.output_conv_state = true;
  };
  const bool forward = pass == Pass::forward, recurrent = pass == Pass::recurrent;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    cases.add(fmt::format("Conv_{}", to_string(dtype)), [=](Problem& p) {
      windows(p), p.dtype = p.beta_dtype = p.conv_dtype = dtype, p.K = p.V = 128;
      p.has_conv_bias = dtype != DType::fp16;
    });
  cases.add("ConvK33V100", [](Problem& p) {
    p.short_conv = 3, p.conv_activation = Activation::none, p.K = 33, p.V = 100;
  });
  cases.add("ConvK256V512", [=](Problem& p) { windows(p), p.H = p.HV = 1, p.K = 256, p.V = 512; });
  cases.add("ConvPacked",
            [=](Problem& p) {
              windows(p), p.packed = p.use_qk_l2norm = p.has_conv_bias = true, p.V = 40;
              p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
            },
            Gate::mixed, {1, 0, recurrent ? 6 : 70, 2, 3, 4, 0});
  cases.add("ConvPackedFromZeros",
            [](Problem& p) { p.short_conv = 2, p.packed = p.output_conv_state = true; },
            Gate::typical, {2, 1, 1, recurrent ? 5 : 65, 0});
  cases.add("ConvNoTokens", [=](Problem& p) { windows(p), p.T = 0; });
  cases.add("ConvFewTokens", [=](Problem& p) { windows(p), p.T = 2, p.B = p.N = 3; });
  cases.add("ConvNorm", [=](Problem& p) {
    p.short_conv = 4, p.output_norm = Activation::silu, p.keep_output = forward;
    p.disable_recompute = !recurrent;
  });
  if (pass != Pass::backward) add_conv_pools(cases, pass);
  if (recurrent) {
    cases.add("ConvIndexed", [=](Problem& p) {
      windows(p), p.state_index = true, p.B = p.N = 6, p.state_slots = 9;
      p.initial_state = p.output_final_state = true;
    });
    cases.add("ConvIndexedFromZeros", [=](Problem& p) {
      windows(p), p.state_index = p.null_slot_zero = true, p.B = p.N = 6, p.state_slots = 9;
      p.initial_state = true, p.initial_conv_state = false;
    });
    return;
  }
  if (forward) {
    cases.add("ConvStates", [=](Problem& p) {
      windows(p), p.return_intermediate_states = p.state_v_first = true, p.V = 48;
    });
    return;
  }
  const auto parts = [=](Problem& p) {
    windows(p), p.packed = p.has_conv_bias = true, p.H = 1, p.HV = 2, p.K = p.V = 16;
  };
  cases.add("ConvParts", parts, Gate::typical, {253, 1, 1, 1, 254, 257, 2, 0, 30});
  cases.add("ConvPartsFromZeros",
            [=](Problem& p) { parts(p), p.initial_conv_state = p.output_conv_state = false; },
            Gate::typical, {255, 256, 3, 251});
  cases.add("ConvWindowsOfOneSide",
            [=](Problem& p) { windows(p), p.short_conv = 3, p.output_conv_state = false; });
}

/// Without the options that summaries exclude.
void summarize(Problem& p) {
  p.summary = true;
  p.batch_invariant = p.disable_recompute = p.return_intermediate_states = false;
  p.inplace_state = p.state_index = p.output_state_index = p.has_initial_state = false;
  p.null_slot_zero = p.checkpoint_offsets = p.fp32_checkpoints = p.keep_output = false;
  p.state_slots = p.checkpoint_every = 0;
  p.checkpoint_rows.reset(), p.output_norm.reset(), p.norm_eps.reset();
  p.output_dtype.reset(), p.output_scale_tokens_last = false;
  if (is_float8(p.state_dtype)) p.state_dtype = DType::fp32;
  (p.pass == Pass::forward ? p.output_final_state : p.initial_state) = false;
}

/// What sequences of one segment, of several and of none do to a state, and to a gradient.
void add_summaries(Cases& cases, Pass pass) {
  const auto sum = [=](Problem& p) { summarize(p), p.transition = pass == Pass::forward; };
  // Chunks of 16 make segments of 256 tokens.
  const auto several = [=](Problem& p) { sum(p), p.chunk_size = 16, p.T = 560; };
  const auto given = [=](Problem& p) {
    (pass == Pass::forward ? p.initial_state : p.output_final_state) = true;
  };
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    cases.add(fmt::format("Summary_{}", to_string(dtype)), [=](Problem& p) {
      several(p), given(p), p.dtype = p.beta_dtype = dtype, p.use_qk_l2norm = true;
    });
  cases.add("SummaryK33V100VFirst", [=](Problem& p) {
    several(p), given(p), p.K = 33, p.V = 100, p.state_v_first = true, p.state_dtype = DType::bf16;
  });
  cases.add("SummaryPacked",
            [=](Problem& p) { several(p), given(p), p.packed = true, p.transition = false; },
            Gate::mixed, {300, 0, 1, 256, 64, 0});
  cases.add("SummaryEverything",
            [=](Problem& p) {
              sum(p), p.output_final_state = false, p.packed = p.use_qk_l2norm = true,
                      p.scale = 0.5F;
              p.H = p.HV = 2, p.K = 60, p.V = 24, p.seqlens_dtype = DType::int64;
              p.use_beta_sigmoid = p.allow_neg_eigval = facts_of(p).beta;
              p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
            },
            Gate::typical, {65, 0, 130, 0});
  cases.add("SummaryK128V64", [=](Problem& p) {
    sum(p), given(p), p.H = p.HV, p.K = 128, p.T = 330, p.state_v_first = p.use_qk_l2norm = true;
  });
  cases.add("SummaryK256V512",
            [=](Problem& p) { sum(p), p.H = p.HV = 1, p.K = 256, p.V = 512, p.T = 70; });
  cases.add("SummaryNoTokens", [=](Problem& p) { sum(p), given(p), p.T = 0; });
  cases.add("SummaryNoSequences", [=](Problem& p) { sum(p), p.B = p.N = 0; });
  if (pass == Pass::backward) return;
  // The maps that a summary returns, and the pass that goes on from them.
  const auto take = [=](Problem& p) {
    several(p), given(p), p.summary = p.transition = false;
    p.segment_chunks = 8, p.output_final_state = true;
  };
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    cases.add(fmt::format("SegmentsGiven_{}", to_string(dtype)),
              [=](Problem& p) { take(p), p.dtype = p.beta_dtype = dtype, p.use_qk_l2norm = true; });
  cases.add("SegmentsGivenK33V100VFirst", [=](Problem& p) {
    take(p), p.K = 33, p.V = 100, p.state_v_first = true, p.state_dtype = DType::bf16;
    p.chunk_size = 32, p.segment_chunks = 16;
  });
  cases.add("SegmentsGivenStates", [=](Problem& p) {
    take(p), p.initial_state = false, p.return_intermediate_states = true;
  });
  cases.add("SegmentsGivenNoTokens", [=](Problem& p) { take(p), p.T = 0; });
  cases.add("SegmentsGivenNoSequences", [=](Problem& p) { take(p), p.B = p.N = 0; });
}

void add_pools(Cases& cases) {
  const auto indexed = [](Problem& p) {
    p.B = p.N = 6, p.state_index = p.initial_state = true, p.state_slots = 9;
  };
  cases.add("Indexed", indexed);
  cases.add("IndexedInt64", [=](Problem& p) { indexed(p), p.index_dtype = DType::int64; });
  cases.add("IndexedFewSlots", [=](Problem& p) { indexed(p), p.state_slots = 2; });
  cases.add("IndexedNoSlots", [=](Problem& p) { indexed(p), p.state_slots = 0; });
  cases.add("IndexedZeroIsNull", [=](Problem& p) { indexed(p), p.null_slot_zero = true; });
}

}  // namespace

std::vector<Plan> plans_with_all(const Device& device, const Problem& problem,
                                 std::int64_t chunk_size) {
  std::vector<Plan> chosen;
  std::set<std::string> known;
  for (const Plan& plan : plans(device, problem, chunk_size)) {
    const std::size_t before = known.size();
    for (const PlanStep& step : plan) known.insert(step.template_id);
    if (known.size() != before) chosen.push_back(plan);
  }
  return chosen;
}

OperatorData pool_data(Problem problem, Gate gate, std::uint64_t seed, const Lengths& lengths) {
  problem.packed = problem.inplace_state = problem.state_index = true;
  problem.output_state_index = problem.has_initial_state = problem.null_slot_zero = true;
  problem.initial_state = problem.output_final_state = false;
  problem.state_slots = 20;
  OperatorData data = make_data(problem, gate, seed, lengths);
  const DType type = problem.index_dtype;
  data.tensors["state_index"] = HostTensor(type, {8}, {3, -1, 5, 0, 7, 20, 11, 12});
  data.tensors["output_state_index"] = HostTensor(type, {8}, {3, 2, 6, 8, 0, 4, 11, 13});
  data.tensors["has_initial_state"] = HostTensor(DType::boolean, {8}, {1, 1, 0, 1, 1, 1, 1, 1});
  return data;
}

OperatorData beyond_fp16(const OperatorPass& which, bool values, std::int64_t size,
                         std::uint64_t seed) {
  Problem p = base(which, DType::fp16);
  p.H = 1, p.HV = 2, p.K = p.V = size;
  p.packed = p.initial_state = true;
  p.state_v_first = values;
  p.scale = !values ? 1e-5F : which.pass == Pass::backward ? 1e-3F : 0.05F;
  OperatorData data = make_data(p, Gate::typical, seed, {150, 0, 33, 1});
  if (which.pass == Pass::backward) {  // so that its products with states are in range
    HostTensor& gradient = data.tensors.at("dht");
    for (std::int64_t i = 0; i < gradient.elements(); ++i) gradient.set(i, 1e-4 * gradient.at(i));
  }
  if (values) {
    // Values of changing signs under few keys: what a key has is nearly the opposite of its next
    // value, and both are near fp16's end.
    HostTensor &k = data.tensors.at("k"), &v = data.tensors.at("v");
    const std::int64_t keys = k.shape()[2] * k.shape()[3], row = v.shape()[2] * v.shape()[3];
    for (std::int64_t i = 0; i < k.elements(); ++i) k.set(i, k.at(i % (4 * keys)));
    for (std::int64_t i = 0; i < v.elements(); ++i)
      v.set(i, (i / row / 4 % 2 == 0 ? 1 : -1) * (5e4 + 3e3 * std::clamp(v.at(i), -3.0, 3.0)));
  } else {
    HostTensor& state = data.tensors.at("initial_state");
    for (std::int64_t i = 0; i < state.elements(); ++i) state.set(i, 1e5 * state.at(i));
  }
  return data;
}

std::vector<OperatorData> saturated_gates(Problem problem) {
  struct Given {
    double A_log, size, mean;
    std::optional<float> bound;
  };
  problem.use_gate_in_kernel = problem.initial_state = true;
  std::vector<OperatorData> all;
  for (const Given& given : {Given{88, 1, 0, {}},
                             {20, 1e30, 0, {}},
                             {100, 1, -200, {}},
                             {88, 1, 0, -5.0F},
                             {20, 1e30, 0, -5.0F},
                             {100, 0, 0, -5.0F}}) {
    if (given.bound && !facts_of(problem).lower_bound) continue;
    // Gradients of gates of that rate are beyond fp32.
    if (given.A_log == 100 && problem.pass == Pass::backward) continue;
    problem.lower_bound = given.bound;
    OperatorData data = make_data(problem, Gate::typical, 3);
    Engine engine(4);
    std::normal_distribution<double> raw;
    data.tensors.at("g").fill([&] { return given.mean + given.size * raw(engine); });
    data.tensors.at("A_log").fill([&] { return given.A_log; });
    all.push_back(std::move(data));
  }
  return all;
}

void close_rates(OperatorData& data) {
  HostTensor& beta = data.tensors.at("beta");
  const auto set = [&](std::int64_t i, double rate, double logit) {
    beta.set(i, data.problem.use_beta_sigmoid ? logit : rate);
  };
  const std::int64_t heads = data.problem.HV;
  for (std::int64_t i = 0; i < beta.elements(); ++i) {
    const std::int64_t turn = (i / heads + i % heads) % 6;
    if (turn % 3 == 0) set(i, 0, -200);
    if (turn == 1) set(i, 0x1p-30, -20.75);
    if (turn == 5) set(i, 1e-6, -13.75);
  }
}

std::vector<OperatorData> outputs_of_any_size(Problem problem) {
  problem.output_norm = Activation::silu;
  problem.initial_state = true;
  std::vector<OperatorData> all;
  const bool backward = problem.pass == Pass::backward;
  // A forward pass stores o before it is normalized, in fp16 with what that has of range.
  const bool stored = problem.pass != Pass::recurrent && problem.dtype == DType::fp16;
  for (const double size : {stored ? 1e-3 : 1e-6, 1.0, stored ? 1e4 : 1e6}) {
    OperatorData data = make_data(problem, Gate::typical, 8);
    const auto scale = [&](std::string_view name, double factor) {
      HostTensor& tensor = data.tensors.find(name)->second;
      for (std::int64_t i = 0; i < tensor.elements(); ++i) tensor.set(i, tensor.at(i) * factor);
    };
    scale(backward ? "o_raw" : "initial_state", size);
    // With values far below the state, a chunk's updates erase it and add nothing: the rounding
    // errors of 16-bit products then outlast the rest. fp16 has no range for values above 1e4.
    const bool in_range = problem.dtype != DType::fp16;
    if (!backward) scale("v", in_range ? size : std::min(size, 1.0));
    all.push_back(std::move(data));
  }
  return all;
}

OperatorData float8_data(const OperatorPass& which, DType type, bool v_first) {
  Problem p = base(which, DType::fp32);
  p.H = p.HV = 2, p.K = p.V = 16, p.T = 1, p.B = p.N = 6;
  p.output_final_state = false, p.state_v_first = v_first;
  p.inplace_state = p.state_index = p.output_state_index = true;
  p.state_slots = 1 + p.N, p.state_dtype = type;
  OperatorData data = make_data(p, Gate::zero, 51);
  data.tensors["beta"].fill([] { return 0.0; });
  HostTensor& state = data.tensors.at("state");
  for (std::int64_t i = 0; i < 2 * 256; ++i) {
    state.data()[i] = static_cast<unsigned char>(i);
    if (!std::isfinite(state.at(i))) state.set(i, 0);
  }
  data.tensors["state_index"].fill([] { return 0.0; });
  data.tensors["output_state_index"].fill([slot = 0]() mutable -> double { return ++slot; });
  // Of slot 0 one; of others such that numbers are kept, are halfway between two of the type,
  // become subnormal, or are more than it has.
  data.tensors["state_scale"] = HostTensor(
      DType::fp32, {7, 2}, {1, 1, 1, 0.75, 2, 8, 512, 3, 1.0 / 3, 0.3, 0.01, 5e-4, 1e6, 1.5});
  return data;
}

void expect_float8_rounded(const OperatorData& data, const HostTensor& after) {
  const HostTensor& before = data.tensors.at("state");
  const HostTensor& scales = data.tensors.at("state_scale");
  for (std::int64_t slot = 0; slot < scales.shape()[0]; ++slot)
    for (std::int64_t i = 0; i < 2 * 256; ++i) {
      HostTensor wanted(before.dtype(), {1});
      const auto factor = 1.0F / static_cast<float>(scales.at(slot * 2 + i / 256));
      wanted.set(0, static_cast<float>(before.at(i)) * factor);
      ASSERT_EQ(after.at(slot * 512 + i), wanted.at(0))
          << before.at(i) << " by " << scales.at(slot * 2 + i / 256);
    }
}

std::string name_of(const OperatorPass& which) {
  return fmt::format("{}_{}", which.op, to_string(which.pass));
}

std::vector<OperatorPass> chunked_passes() {
  std::vector<OperatorPass> all;
  for (const std::string_view op : operators())
    for (const Pass pass : {Pass::forward, Pass::backward}) all.push_back({std::string(op), pass});
  return all;
}

std::vector<OperatorPass> all_passes() {
  std::vector<OperatorPass> all = chunked_passes();
  for (const std::string_view op : operators()) all.push_back({std::string(op), Pass::recurrent});
  return all;
}

Problem base(const OperatorPass& which, DType dtype) {
  Problem p;
  p.op = which.op, p.pass = which.pass;
  p.dtype = p.beta_dtype = dtype;
  p.H = 2, p.HV = 4, p.K = p.V = 64;
  p.T = 130;
  if (which.pass == Pass::recurrent) p.T = 3, p.B = p.N = 2;
  if (facts_of(p).householder) p.num_householder = 2;
  p.output_final_state = true;
  return p;
}

std::vector<OperatorCase> listed_cases(const OperatorPass& which, DeviceKind kind) {
  Cases cases(which);
  add_shapes(cases);
  add_states(cases);
  add_numbers(cases);
  add_gates(cases);
  add_options(cases);
  if (which.pass == Pass::recurrent && takes_drafts(base(which)))
    add_drafts(cases), add_conv_drafts(cases);
  add_output_norms(cases, base(which));
  add_short_convs(cases, which.pass);
  if (which.pass != Pass::backward && takes_drafts(base(which))) add_float8_pools(cases);
  if (which.pass == Pass::recurrent)
    add_pools(cases);
  else
    add_chunks(cases, which.pass);
  if (which.pass != Pass::backward) add_pools_in_place(cases);
  if (which.pass == Pass::forward && !cases.facts().householder) add_checkpoints(cases);
  if (which.pass != Pass::backward)
    cases.add("BatchInvariant", [](Problem& p) { p.batch_invariant = true; });
  if (which.pass != Pass::recurrent) add_summaries(cases, which.pass);
  if (kind == DeviceKind::cpu) cases.join();
  return cases.take();
}

namespace {

/// Draws for random_case. Few values for what kernels are specialized on, so that compiled kernels
/// are met again.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed * 7919 + 13) {}

  std::int64_t below(std::int64_t count) {
    return std::uniform_int_distribution<std::int64_t>(0, count - 1)(engine_);
  }
  bool flip() { return below(2) == 1; }
  bool rarely() { return below(4) == 0; }
  template <class T, std::size_t N>
  const T& of(const T (&values)[N]) {
    return values[below(static_cast<std::int64_t>(N))];
  }

 private:
  Engine engine_;
};

void draw_numbers(Draw& draw, Problem& p) {
  constexpr DType kDTypes[] = {DType::bf16, DType::fp16, DType::fp32};
  constexpr std::int64_t kHeads[][2] = {{2, 4}, {1, 1}};
  constexpr std::int64_t kDims[][2] = {{64, 64}, {60, 100}, {33, 16}, {128, 128}};
  p.dtype = draw.of(kDTypes);
  p.beta_dtype = draw.flip() ? DType::fp32 : p.dtype;
  p.g_dtype = draw.flip() ? DType::fp32 : p.dtype;
  const auto& heads = draw.of(kHeads);
  const auto& dims = draw.of(kDims);
  p.H = heads[0], p.HV = heads[1], p.K = dims[0], p.V = dims[1];
  if (p.dtype == DType::fp32 && draw.flip())
    p.precision = draw.flip() ? Precision::tf32 : Precision::ieee;
  if (draw.flip()) p.scale = 0.5F;
}

void draw_gate(Draw& draw, Problem& p) {
  if (facts_of(p).optional_gate) p.has_g = !draw.rarely();
  if (gate_kind(p) == GateKind::none) return;
  p.use_gate_in_kernel = draw.flip();
  p.has_dt_bias = p.use_gate_in_kernel && draw.flip();
  if (!facts_of(p).lower_bound || draw.flip()) return;
  p.safe_gate = !p.use_gate_in_kernel || draw.flip();
  p.lower_bound = draw.flip() ? -5.0F : -1.5F;
  p.has_A_log = !p.use_gate_in_kernel || draw.flip();
}

/// Whether states of tokens are wanted, and of a tree; shapes follow those of tokens.
void draw_drafts(Draw& draw, Problem& p) {
  if (p.inplace_state && p.state_index && !p.output_state_index && draw.flip())
    p.index_columns = 9 + draw.below(3);
  p.disable_state_update = p.inplace_state && !p.output_state_index && draw.flip();
  if (draw.flip()) return;
  p.intermediate_rows = draw.below(6);
  p.parent = (!p.inplace_state || p.disable_state_update) && !p.output_final_state && draw.flip();
  // Where tokens go on from stored states these are rounded, and so is o.
  if (p.parent && p.dtype == DType::fp32) p.state_dtype = DType::fp32;
}

void draw_states(Draw& draw, Problem& p) {
  p.initial_state = draw.flip();
  p.state_dtype = draw.flip() ? DType::fp32 : draw.flip() ? DType::bf16 : DType::fp16;
  p.output_final_state = draw.flip();
  p.state_v_first = draw.flip();
  const bool recurrent = p.pass == Pass::recurrent;
  if (p.pass != Pass::backward) {
    p.inplace_state = draw.flip();
    if (p.inplace_state) p.output_final_state = p.initial_state = false;
    p.state_index = (p.inplace_state || (recurrent && p.initial_state)) && draw.flip();
    p.state_slots = p.state_index ? draw.below(12) : 0;
    p.index_dtype = draw.flip() ? DType::int64 : DType::int32;
    p.null_slot_zero = p.state_index && draw.flip();
    p.output_state_index = p.inplace_state && p.state_index && draw.flip();
    p.has_initial_state = p.inplace_state && draw.flip();
  }
  if (recurrent && takes_drafts(p)) draw_drafts(draw, p);
  if (draw.rarely()) p.output_norm = draw.flip() ? Activation::silu : Activation::sigmoid;
  if (p.output_norm && draw.flip()) p.norm_eps = 1e-5F;
  p.keep_output = p.pass == Pass::forward && p.output_norm && !p.inplace_state && draw.flip();
  if (p.inplace_state && takes_drafts(p) && !p.intermediate_rows && draw.rarely())
    p.state_dtype = draw.flip() ? DType::float8_e4m3 : DType::float8_e5m2;
  if (recurrent) return;
  constexpr std::int64_t kChunks[] = {16, 32, 64};
  if (draw.rarely()) p.chunk_size = draw.of(kChunks);
  if (p.pass == Pass::forward && !facts_of(p).householder && !has_state_scale(p) && draw.rarely()) {
    p.checkpoint_offsets = draw.flip();
    if (!p.checkpoint_offsets) p.checkpoint_every = 64;
    if (!p.checkpoint_offsets && draw.flip()) p.checkpoint_rows = draw.below(4);
    p.fp32_checkpoints = draw.flip();
    p.keep_output = false;
    return;
  }
  p.disable_recompute = !p.inplace_state && draw.rarely();
  p.return_intermediate_states =
      p.pass == Pass::forward && !p.inplace_state && !p.disable_recompute && draw.rarely();
}

void draw_conv(Draw& draw, Problem& p) {
  p.short_conv = 2 + draw.below(3);
  if (draw.flip()) p.conv_activation = Activation::none;
  p.has_conv_bias = draw.flip();
  p.conv_dtype = draw.flip() ? DType::fp32 : p.dtype;
  const bool window = draw.flip(), wanted = draw.flip();
  p.inplace_conv_state = p.inplace_state;
  p.initial_conv_state = !p.inplace_state && window;
  p.output_conv_state = !p.inplace_state && wanted;
  p.conv_tokens_first = p.inplace_state && window;
  if (p.inplace_state && wanted) p.conv_columns = *p.short_conv + draw.below(3);
}

}  // namespace

OperatorCase random_case(std::uint64_t seed) {
  Draw draw(seed);
  constexpr std::int64_t kTokens[] = {0, 1, 15, 16, 17, 63, 64, 65, 100, 130};
  constexpr Pass kPasses[] = {Pass::forward, Pass::backward, Pass::backward, Pass::recurrent};
  OperatorCase one{fmt::format("seed {}", seed), {}, Gate::zero, {}};
  Problem& p = one.problem;
  p.op = operators()[static_cast<std::size_t>(draw.below(std::ssize(operators())))];
  p.pass = draw.of(kPasses);
  draw_numbers(draw, p);
  draw_gate(draw, p);
  draw_states(draw, p);
  p.use_qk_l2norm = draw.flip();
  if (facts_of(p).beta) {
    p.use_beta_sigmoid = draw.flip();
    p.allow_neg_eigval = draw.flip();
  }
  if (facts_of(p).householder) p.num_householder = 1 + draw.below(4);
  p.packed = draw.flip();
  p.seqlens_dtype = draw.flip() ? DType::int64 : DType::int32;
  const auto tokens = [&] { return p.pass == Pass::recurrent ? draw.below(9) : draw.of(kTokens); };
  if (p.packed)
    for (std::int64_t n = 1 + draw.below(5); n > 0; --n) one.lengths.push_back(tokens());
  else
    p.T = tokens(), p.B = p.N = 1 + draw.below(3);
  if (p.packed && p.intermediate_rows) p.draft_tokens = 4 + draw.below(8);
  // dA_log and ddt_bias are sums of terms of either sign over all tokens, dbeta and dg over
  // columns. A single one may all but cancel, and its relative error then says nothing; the rms
  // over several does not.
  const std::int64_t count =
      p.packed ? std::accumulate(one.lengths.begin(), one.lengths.end(), std::int64_t{0})
               : p.B * p.T;
  if (p.pass == Pass::backward && p.HV == 1 && (p.use_gate_in_kernel || count < 4)) p.H = p.HV = 4;
  constexpr Gate kGates[] = {Gate::zero, Gate::typical, Gate::very_negative, Gate::mixed,
                             Gate::fast};
  one.gate = draw.of(kGates);
  if (p.pass != Pass::recurrent && draw.rarely()) {
    summarize(p);
    p.transition = p.pass == Pass::forward && draw.flip();
  }
  // What one token leaves of a state behind such gates is smaller than fp16 can tell.
  if (one.gate == Gate::fast && p.dtype == DType::fp16) one.gate = Gate::mixed;
  if (!p.summary && !has_checkpoints(p) && p.index_columns == 0 && !p.intermediate_rows &&
      draw.flip())
    draw_conv(draw, p);
  if (p.pass != Pass::backward && p.output_norm && !p.keep_output && draw.flip()) {
    p.output_dtype = DType::float8_e4m3, p.V = 128;
    p.output_scale_tokens_last = draw.flip();
  }
  return one;
}

}  // namespace wyvern::testing
