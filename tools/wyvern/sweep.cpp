#include "tools/wyvern/sweep.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <iterator>
#include <numeric>
#include <random>

#include "runtime/operators/operator.hpp"
#include "tools/wyvern/example.hpp"

namespace wyvern::cli {
namespace {

using Lengths = std::vector<std::int64_t>;

void pack(Case& c, const Lengths& lengths) {
  Problem& p = c.selection.problem;
  p.packed = true;
  p.B = 1;
  p.N = static_cast<std::int64_t>(lengths.size());
  c.selection.cu_seqlens.assign(1, 0);
  for (const std::int64_t length : lengths)
    c.selection.cu_seqlens.push_back(c.selection.cu_seqlens.back() + length);
  p.T = c.selection.cu_seqlens.back();
}

void size(Problem& p, std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t HV,
          std::int64_t K, std::int64_t V) {
  p.B = p.N = B;
  p.T = T;
  p.H = H;
  p.HV = HV;
  p.K = K;
  p.V = V;
}

const OperatorFacts& facts_of(const Problem& p) { return definition_of(p).facts(); }

void states(Problem& p) { p.initial_state = p.output_final_state = true; }

/// The gate in the kernel, for an operator that has one.
void gate_in_kernel(Problem& p) {
  p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
}

/// beta as logits, for an operator that has one.
void beta_sigmoid(Problem& p, bool allow_neg_eigval) {
  p.use_beta_sigmoid = facts_of(p).beta;
  p.allow_neg_eigval = p.use_beta_sigmoid && allow_neg_eigval;
}

/// One to three steps a token in turn, for an operator that has several; every fifth case has no
/// gate, if that is legal and the case is not about fast decay or none.
void vary_operator(std::vector<Case>& cases) {
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Problem& p = cases[i].selection.problem;
    if (facts_of(p).householder) p.num_householder = 1 + static_cast<std::int64_t>(i + 1) % 3;
    if (facts_of(p).optional_gate && i % 5 == 0 && !p.use_gate_in_kernel &&
        cases[i].gates == Gates::typical)
      p.has_g = false;
  }
}

/// Several options meet in each case, so that a few cases have them all.
std::vector<Case> chunked_cases(const Problem& base) {
  std::vector<Case> cases(8, Case{{base, {}}});
  const auto problem = [&](std::size_t i) -> Problem& { return cases[i].selection.problem; };
  size(problem(0), 2, 100, 2, 2, 64, 64);
  size(problem(1), 1, 130, 2, 4, 60, 100);
  states(problem(1));
  problem(1).scale = 0.5F;
  size(problem(2), 1, 0, 1, 2, 33, 48);
  pack(cases[2], {5, 0, 77, 64, 1});
  states(problem(2));
  problem(2).state_v_first = true;
  problem(2).state_dtype = DType::bf16;
  size(problem(3), 1, 150, 2, 4, 64, 32);
  states(problem(3));
  gate_in_kernel(problem(3));
  problem(3).use_qk_l2norm = true;
  beta_sigmoid(problem(3), false);
  size(problem(4), 1, 90, 1, 3, 48, 64);
  beta_sigmoid(problem(4), true);
  problem(4).chunk_size = 16;
  problem(4).initial_state = true;
  cases[4].gates = Gates::strong;
  size(problem(5), 1, 0, 2, 4, 32, 64);
  pack(cases[5], {40, 0, 97});
  states(problem(5));
  gate_in_kernel(problem(5));
  problem(5).disable_recompute = true;
  problem(5).chunk_size = 32;
  problem(5).use_qk_l2norm = true;
  size(problem(6), 1, 140, 1, 2, 128, 64);
  problem(6).return_intermediate_states = base.pass == Pass::forward;
  problem(6).state_v_first = problem(6).output_final_state = true;
  cases[6].gates = Gates::zero;
  size(problem(7), 1, 70, 1, 1, 256, 40);
  states(problem(7));
  return cases;
}

/// Values that the first cases leave out: the largest chunk and dimensions, the other chunk size
/// and dtypes. The last two stand where make_sweep() has 16-bit numbers, so that fp32 betas are not
/// all of them.
void add_more_chunked_cases(const Problem& base, std::vector<Case>& cases) {
  std::vector<Case> more(4, Case{{base, {}}});
  const auto problem = [&](std::size_t i) -> Problem& { return more[i].selection.problem; };
  more[0].optional = more[1].optional = true;
  size(problem(0), 1, 200, 1, 2, 64, 64);
  states(problem(0));
  problem(0).chunk_size = 128;
  size(problem(1), 1, 40, 1, 1, 256, 512);
  states(problem(1));
  size(problem(2), 1, 0, 2, 4, 72, 48);
  pack(more[2], {66, 0, 31});
  states(problem(2));
  gate_in_kernel(problem(2));
  problem(2).has_dt_bias = false;
  problem(2).seqlens_dtype = DType::int64;
  problem(2).beta_dtype = DType::fp32;
  problem(2).chunk_size = 64;
  problem(2).return_intermediate_states = base.pass == Pass::forward;
  size(problem(3), 2, 75, 2, 2, 40, 60);
  states(problem(3));
  problem(3).state_v_first = problem(3).disable_recompute = true;
  problem(3).beta_dtype = DType::fp32;
  problem(3).g_dtype = base.dtype;
  std::move(more.begin(), more.end(), std::back_inserter(cases));
}

/// The bounded gate: shaped in the kernel with and without A_log, and promised.
void add_bounded_cases(const Problem& base, std::vector<Case>& cases) {
  if (!facts_of(base).lower_bound) return;
  const bool recurrent = base.pass == Pass::recurrent;
  for (int i = 0; i < 3; ++i) {
    Case c{{base, {}}};
    Problem& p = c.selection.problem;
    size(p, recurrent ? 3 : 1, recurrent ? 2 : 110, 4, 4, 64, 32);
    states(p);
    p.lower_bound = i == 1 ? -1.0F : -5.0F;
    p.safe_gate = i == 2;
    p.use_gate_in_kernel = i != 2;
    p.has_A_log = p.has_dt_bias = i == 0;
    p.use_qk_l2norm = i == 0;
    p.g_dtype = i == 0 ? base.dtype : DType::fp32;
    cases.push_back(std::move(c));
  }
}

/// The option of serving, which only a CPU has yet.
void add_invariant_case(const Problem& base, std::vector<Case>& cases) {
  if (base.pass == Pass::backward) return;
  const bool recurrent = base.pass == Pass::recurrent;
  Case c{{base, {}}};
  c.optional = true;
  size(c.selection.problem, 1, 0, 1, 2, 32, 32);
  pack(c, recurrent ? Lengths{1, 0, 4} : Lengths{70, 0, 33});
  states(c.selection.problem);
  c.selection.problem.batch_invariant = true;
  cases.push_back(std::move(c));
}

/// States in place, which a recurrent pass has among its other cases.
void add_pool_cases(const Problem& base, std::vector<Case>& cases) {
  if (base.pass != Pass::forward) return;
  for (const DType index : {DType::int32, DType::int64}) {
    Case c{{base, {}}};
    Problem& p = c.selection.problem;
    size(p, 1, 0, 1, 2, 64, 32);
    pack(c, {70, 0, 33, 130});
    p.inplace_state = p.state_index = true;
    p.state_slots = 6;
    p.index_dtype = index;
    p.output_state_index = p.has_initial_state = p.state_v_first = index == DType::int64;
    p.null_slot_zero = index == DType::int32;
    cases.push_back(std::move(c));
  }
}

/// States inside sequences: at every 64 tokens, and inside chunks into a pool's problem.
void add_checkpoint_cases(const Problem& base, std::vector<Case>& cases) {
  if (base.pass != Pass::forward || facts_of(base).householder) return;
  for (const bool offsets : {false, true}) {
    Case c{{base, {}}};
    Problem& p = c.selection.problem;
    size(p, 1, 0, 1, 2, 64, 32);
    pack(c, {70, 0, 33, 130});
    p.checkpoint_offsets = offsets;
    p.checkpoint_every = offsets ? 0 : 64;
    p.inplace_state = p.has_initial_state = p.state_v_first = offsets;
    p.fp32_checkpoints = offsets;
    if (offsets) p.state_dtype = DType::bf16;
    p.use_qk_l2norm = true;
    cases.push_back(std::move(c));
  }
}

/// Rows of o normalized, of null sequences too; kept, quantized, and gradients of that.
void add_norm_cases(const Problem& base, std::vector<Case>& cases) {
  for (const Activation gate : {Activation::silu, Activation::sigmoid}) {
    Case c{{base, {}}};
    Problem& p = c.selection.problem;
    size(p, 1, 0, 1, 2, 64, gate == Activation::silu ? 128 : 60);
    if (base.pass == Pass::recurrent)
      pack(c, {2, 0, 5, 1});
    else
      pack(c, {70, 0, 33, 130});
    if (gate == Activation::silu && base.pass != Pass::backward) {
      p.inplace_state = p.state_index = p.null_slot_zero = true;
      p.state_slots = 6;
    } else {
      states(p);
      p.keep_output = base.pass == Pass::forward;
    }
    p.output_norm = gate;
    cases.push_back(c);
    if (base.pass == Pass::backward) continue;
    p.keep_output = false;
    p.output_dtype = DType::float8_e4m3;
    p.output_scale_tokens_last = gate == Activation::sigmoid;
    p.V = 128;
    cases.push_back(std::move(c));
  }
}

/// Rows convolved, of packed sequences shorter than the window and empty ones, and of a batch.
void add_conv_cases(const Problem& base, std::vector<Case>& cases) {
  for (const std::int64_t width : {2, 3, 4}) {
    Case c{{base, {}}};
    Problem& p = c.selection.problem;
    const bool recurrent = base.pass == Pass::recurrent;
    size(p, 2, recurrent ? 5 : 70, 1, 2, 64, width == 3 ? 60 : 64);
    if (width == 4) pack(c, {recurrent ? 5 : 70, 0, 2, recurrent ? 3 : 130});
    states(p);
    p.short_conv = width;
    if (width == 3) p.conv_activation = Activation::none;
    if (width == 3) p.conv_dtype = p.dtype;
    p.has_conv_bias = p.initial_conv_state = p.output_conv_state = width != 2;
    cases.push_back(c);
    if (base.pass == Pass::backward || width == 2) continue;
    p.initial_state = p.output_final_state = p.initial_conv_state = p.output_conv_state = false;
    p.inplace_state = p.inplace_conv_state = p.conv_tokens_first = true;
    if (width == 3) p.conv_columns = 4;
    cases.push_back(std::move(c));
  }
}

/// What sequences of one segment and of several do to a state, or to a gradient.
void add_summary_cases(const Problem& base, std::vector<Case>& cases) {
  for (const bool given : {false, true}) {
    Case c{{base, {}}};
    Problem& p = c.selection.problem;
    size(p, 1, 0, 1, 2, given ? 60 : 64, 48);
    pack(c, {70, 0, 290, 1});
    p.summary = true;
    p.transition = given && p.pass == Pass::forward;
    (p.pass == Pass::forward ? p.initial_state : p.output_final_state) = given;
    p.state_v_first = given;
    p.chunk_size = 16;  // segments of 256 tokens
    cases.push_back(std::move(c));
    Case segments = cases.back();
    if (base.pass != Pass::forward) continue;
    segments.selection.cu_seqlens.clear();
    size(segments.selection.problem, 2, 290, 1, 2, given ? 60 : 64, 48);
    segments.selection.problem.packed = false;
    segments.selection.problem.segment_chunks = given ? 16 : 8;
    cases.push_back(segments);
    segments.selection.problem.summary = segments.selection.problem.transition = false;
    segments.selection.problem.output_final_state = given;
    cases.push_back(std::move(segments));
  }
}

/// Drafts to verify: slots for each token's state, and a tree with its states in a buffer; rows of
/// o normalized, and also convolved.
void add_draft_cases(const Problem& base, std::vector<Case>& cases) {
  if (base.pass != Pass::recurrent || !facts_of(base).beta || facts_of(base).householder) return;
  for (const bool tree : {false, true}) {
    Case c{{base, {}}};
    Problem& p = c.selection.problem;
    size(p, 3, 5, 1, 2, 64, 32);
    p.inplace_state = p.state_index = p.use_qk_l2norm = true;
    p.state_slots = 16;
    p.disable_state_update = p.parent = p.state_v_first = tree;
    if (tree)
      p.intermediate_rows = 3;
    else
      p.index_columns = 5;
    p.output_norm = tree ? Activation::sigmoid : Activation::silu;
    cases.push_back(c);
    p.short_conv = 4, p.inplace_conv_state = p.conv_tokens_first = true;
    cases.push_back(std::move(c));
  }
}

std::vector<Case> recurrent_cases(const Problem& base) {
  std::vector<Case> cases(7, Case{{base, {}}});
  const auto problem = [&](std::size_t i) -> Problem& { return cases[i].selection.problem; };
  size(problem(0), 3, 1, 2, 2, 64, 64);
  states(problem(0));
  size(problem(1), 2, 8, 2, 4, 60, 100);
  problem(1).output_final_state = true;
  problem(1).scale = 0.5F;
  cases[1].gates = Gates::strong;
  size(problem(2), 1, 0, 1, 2, 33, 48);
  pack(cases[2], {2, 0, 5, 1});
  states(problem(2));
  problem(2).state_v_first = true;
  problem(2).state_dtype = DType::bf16;
  size(problem(3), 5, 1, 2, 4, 128, 64);
  problem(3).inplace_state = problem(3).state_index = true;
  problem(3).output_state_index = problem(3).null_slot_zero = true;
  problem(3).state_slots = 9;
  gate_in_kernel(problem(3));
  problem(3).use_qk_l2norm = true;
  beta_sigmoid(problem(3), false);
  size(problem(4), 4, 3, 1, 3, 48, 40);
  states(problem(4));
  problem(4).state_index = true;
  problem(4).state_slots = 6;
  problem(4).index_dtype = DType::int64;
  beta_sigmoid(problem(4), true);
  size(problem(5), 2, 4, 1, 1, 256, 512);
  problem(5).inplace_state = problem(5).state_v_first = true;
  cases[5].gates = Gates::zero;
  size(problem(6), 1, 0, 2, 4, 72, 48);
  pack(cases[6], {1, 8, 0});
  gate_in_kernel(problem(6));
  problem(6).has_dt_bias = false;
  problem(6).seqlens_dtype = DType::int64;
  problem(6).inplace_state = problem(6).has_initial_state = true;
  problem(6).state_dtype = DType::bf16;
  problem(6).beta_dtype = DType::fp32;
  problem(6).g_dtype = base.dtype;
  return cases;
}

/// Draws that are the same on every machine.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(count));
  }
  bool chance(std::int64_t in) { return below(in) == 0; }
  template <std::size_t N>
  std::int64_t one_of(const std::array<std::int64_t, N>& values) {
    return values[static_cast<std::size_t>(below(N))];
  }
  std::uint64_t seed() { return random_(); }

 private:
  std::mt19937_64 random_;
};

void draw_shape(Draw& draw, Case& c) {
  Problem& p = c.selection.problem;
  const bool recurrent = p.pass == Pass::recurrent;
  const std::int64_t H = 1 + draw.below(3);
  const std::int64_t most = recurrent ? 8 : 200;
  size(p, 1 + draw.below(2), 1 + draw.below(most), H, H * (1 + draw.below(3)),
       draw.one_of<9>({16, 24, 33, 60, 64, 72, 100, 128, 192}),
       draw.one_of<8>({16, 31, 48, 64, 80, 100, 128, 160}));
  if (!draw.chance(3)) return;
  Lengths lengths(static_cast<std::size_t>(1 + draw.below(5)));
  for (std::int64_t& length : lengths)
    length = draw.chance(4) ? 0 : 1 + draw.below(recurrent ? 8 : 100);
  pack(c, lengths);
}

void draw_states(Draw& draw, Problem& p) {
  p.initial_state = draw.chance(2);
  p.output_final_state = draw.chance(2);
  p.state_v_first = draw.chance(2);
  p.state_dtype = draw.chance(4) ? DType::bf16 : draw.chance(4) ? DType::fp16 : DType::fp32;
  if (p.pass == Pass::backward) return;
  const bool recurrent = p.pass == Pass::recurrent;
  p.inplace_state = draw.chance(recurrent ? 2 : 4);
  if (p.inplace_state) p.initial_state = p.output_final_state = false;
  p.state_index = (p.inplace_state || (recurrent && p.initial_state)) && draw.chance(2);
  if (p.state_index) p.state_slots = p.N + draw.below(4);
  p.output_state_index = p.inplace_state && p.state_index && draw.chance(2);
  p.null_slot_zero = p.state_index && draw.chance(2);
  p.has_initial_state = p.inplace_state && draw.chance(2);
}

void draw_gate(Draw& draw, Case& c) {
  Problem& p = c.selection.problem;
  c.gates = draw.chance(3) ? (draw.chance(2) ? Gates::zero : Gates::strong) : Gates::typical;
  if (gate_kind(p) == GateKind::none) return;
  // dA_log is a sum over all tokens: of one head it may nearly vanish, of four it seldom does.
  p.use_gate_in_kernel = (p.HV >= 4 || p.pass != Pass::backward) && draw.chance(2);
  p.has_dt_bias = p.use_gate_in_kernel && draw.chance(2);
  if (facts_of(p).lower_bound && draw.chance(2)) {
    p.lower_bound = -static_cast<float>(1 + draw.below(5));
    p.safe_gate = !p.use_gate_in_kernel || draw.chance(2);
    p.has_A_log = !p.use_gate_in_kernel || draw.chance(2);
  }
  if (draw.chance(3)) p.g_dtype = p.dtype;
}

Case random_case(const Problem& base, Draw& draw) {
  Case c{{base, {}}};
  c.seed = draw.seed();
  Problem& p = c.selection.problem;
  if (facts_of(p).optional_gate) p.has_g = !draw.chance(4);
  draw_shape(draw, c);
  draw_states(draw, p);
  draw_gate(draw, c);
  if (draw.chance(2)) p.beta_dtype = DType::fp32;
  p.use_qk_l2norm = draw.chance(2);
  if (facts_of(p).beta) {
    p.use_beta_sigmoid = draw.chance(2);
    p.allow_neg_eigval = p.use_beta_sigmoid && draw.chance(2);
  }
  if (facts_of(p).householder) p.num_householder = 1 + draw.below(3);
  if (draw.chance(4)) p.output_norm = draw.chance(2) ? Activation::silu : Activation::sigmoid;
  if (p.pass == Pass::recurrent) return c;
  if (draw.chance(2)) p.chunk_size = draw.one_of<3>({16, 32, 64});
  if (p.pass == Pass::forward && !facts_of(p).householder && draw.chance(3)) {
    p.checkpoint_offsets = draw.chance(2);
    p.checkpoint_every = p.checkpoint_offsets ? 0 : 64;
    return c;
  }
  if (p.inplace_state) return c;
  p.keep_output = p.pass == Pass::forward && p.output_norm && draw.chance(2);
  if (p.pass != Pass::recurrent && draw.chance(3)) {
    p.short_conv = 2 + draw.below(3);
    if (draw.chance(2)) p.conv_activation = Activation::none;
    p.has_conv_bias = draw.chance(2);
    if (draw.chance(2)) p.conv_dtype = p.dtype;
    p.initial_conv_state = draw.chance(2);
    p.output_conv_state = draw.chance(2);
  }
  p.disable_recompute = draw.chance(3);
  p.return_intermediate_states = p.pass == Pass::forward && !p.disable_recompute && draw.chance(3);
  p.summary = !p.output_norm && !p.short_conv && !p.disable_recompute &&
              !p.return_intermediate_states && draw.chance(3);
  if (!p.summary) return c;
  (p.pass == Pass::forward ? p.output_final_state : p.initial_state) = false;
  p.transition = p.pass == Pass::forward && draw.chance(2);
  return c;
}

Problem base_problem(std::string_view op, Pass pass, const Number& number) {
  Problem p;
  p.op = op;
  p.pass = pass;
  p.dtype = p.beta_dtype = number.dtype;
  p.precision = number.precision;
  p.g_dtype = DType::fp32;
  return p;
}

/// The same case with other numbers. Tensors of the inputs' dtype stay so.
void set_number(Problem& p, const Number& number) {
  if (p.beta_dtype == p.dtype) p.beta_dtype = number.dtype;
  if (p.g_dtype == p.dtype) p.g_dtype = number.dtype;
  if (p.conv_dtype == p.dtype) p.conv_dtype = number.dtype;
  p.dtype = number.dtype;
  p.precision = number.precision;
}

/// A gate input that gives exp(g) = 0, or one that gives 1, as far as the gate's form has one.
double extreme_gate(const Problem& p, bool erases) {
  if (!p.use_gate_in_kernel) return erases ? -1000 : 0;
  return erases ? 1000 : -200;
}

/// A promised bound holds for every gate.
bool has_strong_gates(const Case& c) {
  const Problem& p = c.selection.problem;
  return c.gates == Gates::strong && (!p.safe_gate || p.use_gate_in_kernel);
}

}  // namespace

std::vector<Number> numbers(const std::optional<std::string>& dtype,
                            const std::optional<std::string>& precision) {
  const DType only = dtype ? parse_element_type("--dtype", *dtype) : DType::bf16;
  OptionFlags options;
  if (precision) options.set("precision", *precision);
  Problem parsed;
  apply(options, parsed);
  std::vector<Number> chosen;
  for (const Number& number :
       {Number{DType::bf16, {}}, Number{DType::fp16, {}}, Number{DType::fp32, Precision::tf32x3},
        Number{DType::fp32, Precision::tf32}, Number{DType::fp32, Precision::ieee}}) {
    if (dtype && number.dtype != only) continue;
    // A precision says nothing about 16-bit inputs.
    if (precision && number.dtype == DType::fp32 && number.precision != parsed.precision) continue;
    chosen.push_back(number);
  }
  return chosen;
}

std::vector<Case> make_sweep(std::string_view op, Pass pass, const std::vector<Number>& numbers,
                             std::int64_t extra, std::uint64_t seed) {
  const Problem base = base_problem(op, pass, {DType::bf16, {}});
  std::vector<Case> cases = pass == Pass::recurrent ? recurrent_cases(base) : chunked_cases(base);
  if (pass != Pass::recurrent) add_more_chunked_cases(base, cases);
  add_bounded_cases(base, cases);
  add_pool_cases(base, cases);
  add_checkpoint_cases(base, cases);
  add_draft_cases(base, cases);
  add_norm_cases(base, cases);
  add_conv_cases(base, cases);
  if (base.pass != Pass::recurrent) add_summary_cases(base, cases);
  add_invariant_case(base, cases);
  vary_operator(cases);
  Draw draw(seed);
  for (Case& c : cases) c.seed = draw.seed();
  for (std::int64_t i = 0; i < extra; ++i) cases.push_back(random_case(base, draw));
  for (std::size_t i = 0; i < cases.size(); ++i)
    set_number(cases[i].selection.problem, numbers[i % numbers.size()]);
  return cases;
}

Tensors make_inputs(const Case& c) {
  const Problem& p = c.selection.problem;
  Tensors tensors = make_example(c.selection, c.seed);
  if (c.gates == Gates::typical || gate_kind(p) == GateKind::none) return tensors;
  const bool erases = has_strong_gates(c);
  HostTensor& g = tensors.at("g");
  std::mt19937_64 random(c.seed);
  for (std::int64_t i = 0; i < g.elements(); ++i)
    if (c.gates == Gates::zero)
      store(g, i, extreme_gate(p, false));
    else if (erases && random() % 8 == 0)
      store(g, i, extreme_gate(p, true));
  return tensors;
}

std::vector<std::string> options_of(const Case& c) {
  const Problem& p = c.selection.problem;
  const bool gated = gate_kind(p) != GateKind::none;
  const bool states = p.initial_state || p.inplace_state;
  std::vector<std::string> options;
  const auto add = [&](bool used, std::string name) {
    if (used) options.push_back(std::move(name));
  };
  const auto uneven = [](std::int64_t x) { return (x & (x - 1)) != 0; };
  add(p.HV > p.H, "GVA");
  add(uneven(p.K) || uneven(p.V), "K or V no power of two");
  add(p.K == 256 && p.V == 512, "K = 256, V = 512");
  add(p.scale.has_value(), "scale");
  add(p.num_householder > 1, "num_householder");
  add(p.beta_dtype != p.dtype, facts_of(p).beta ? "beta in fp32" : "erase and write in fp32");
  add(gated && p.g_dtype != DType::fp32, "g in 16 bits");
  add(p.packed, fmt::format("cu_seqlens {}", to_string(p.seqlens_dtype)));
  add(states, fmt::format("initial_state {}", to_string(p.state_dtype)));
  add(p.output_final_state || p.inplace_state, "output_final_state");
  add(p.state_v_first, "state_v_first");
  add(p.batch_invariant, "batch_invariant");
  add(p.use_qk_l2norm, "use_qk_l2norm");
  add(p.use_beta_sigmoid, "use_beta_sigmoid");
  add(p.allow_neg_eigval, "allow_neg_eigval");
  add(p.use_gate_in_kernel, "use_gate_in_kernel");
  add(p.use_gate_in_kernel && !p.has_dt_bias, "no dt_bias");
  add(p.lower_bound && p.use_gate_in_kernel, "lower_bound");
  add(p.use_gate_in_kernel && !p.has_A_log, "no A_log");
  add(p.safe_gate, "safe_gate");
  add(!p.has_g, "no g");
  add(gated && c.gates == Gates::zero, "no decay");
  add(gated && has_strong_gates(c), "strong gates");
  add(p.chunk_size.has_value(), fmt::format("chunk_size {}", p.chunk_size.value_or(0)));
  add(p.disable_recompute, "disable_recompute");
  add(p.return_intermediate_states, "return_intermediate_states");
  add(p.inplace_state, "inplace_state");
  add(p.state_index, fmt::format("state_index {}", to_string(p.index_dtype)));
  add(p.output_state_index, "output_state_index");
  add(p.null_slot_zero, "null_slot_zero");
  add(p.has_initial_state, "has_initial_state");
  add(p.checkpoint_every != 0, "checkpoint_every");
  add(p.checkpoint_offsets, "checkpoint_offsets");
  add(p.fp32_checkpoints, "fp32_checkpoints");
  add(p.index_columns != 0, "index_columns");
  add(p.intermediate_rows.has_value(), "intermediate_rows");
  add(p.parent, "parent");
  add(p.disable_state_update, "disable_state_update");
  if (p.output_norm) add(true, fmt::format("output_norm {}", to_string(*p.output_norm)));
  add(p.keep_output, "keep_output");
  if (p.output_dtype) add(true, fmt::format("output_dtype {}", to_string(*p.output_dtype)));
  add(p.output_scale_tokens_last, "output_scale_tokens_last");
  if (p.short_conv) add(true, fmt::format("short_conv {}", *p.short_conv));
  add(p.conv_activation == Activation::none, "conv_activation none");
  add(p.has_conv_bias, "conv_bias");
  add(p.short_conv && p.conv_dtype == p.dtype, "conv_weight as q");
  add(p.initial_conv_state, "initial_conv_state");
  add(p.output_conv_state, "output_conv_state");
  add(p.inplace_conv_state, "inplace_conv_state");
  add(p.conv_columns.has_value(), "conv_columns");
  add(p.conv_tokens_first, "conv_tokens_first");
  add(p.summary, "summary");
  add(p.transition, "transition");
  add(p.segment_chunks.has_value(), "segment_chunks");
  return options;
}

std::string describe(const Case& c) {
  constexpr std::array<std::string_view, 3> kGates{"", " gates=0", " strong gates"};
  const Problem& p = c.selection.problem;
  std::string text = describe(p);
  if (p.beta_dtype != p.dtype) text += fmt::format(" beta={}", to_string(p.beta_dtype));
  if (gate_kind(p) != GateKind::none && p.g_dtype != DType::fp32)
    text += fmt::format(" g={}", to_string(p.g_dtype));
  if (p.packed)
    text += fmt::format(" {} cu_seqlens={}", to_string(p.seqlens_dtype),
                        fmt::join(c.selection.cu_seqlens, ","));
  for (const std::string& option : run_options(p))
    if (!option.starts_with("--pass")) text += " " + option;
  if (p.initial_state) text += fmt::format(" initial_state={}", to_string(p.state_dtype));
  if (p.output_final_state) text += p.pass == Pass::backward ? " dht" : " final_state";
  if (p.state_index) text += fmt::format(" state_index of {} slots", p.state_slots);
  if (p.output_state_index) text += " output_state_index";
  if (p.has_initial_state) text += " has_initial_state";
  if (p.checkpoint_every != 0) text += fmt::format(" checkpoint_every={}", p.checkpoint_every);
  if (p.checkpoint_offsets) text += " checkpoint_offsets";
  if (p.fp32_checkpoints) text += " fp32_checkpoints";
  if (p.index_columns != 0) text += fmt::format(" index_columns={}", p.index_columns);
  if (p.intermediate_rows) text += fmt::format(" intermediate_rows={}", *p.intermediate_rows);
  if (p.parent) text += " parent";
  if (p.disable_state_update) text += " disable_state_update";
  if (p.has_conv_bias) text += " conv_bias";
  if (p.short_conv) text += fmt::format(" conv_weight={}", to_string(p.conv_dtype));
  if (p.initial_conv_state) text += " initial_conv_state";
  if (p.inplace_conv_state) text += " conv_state";
  if (p.output_conv_state)
    text += p.pass == Pass::backward ? " dfinal_conv_state" : " final_conv_state";
  if (!p.has_g) text += " no g";
  if (!p.has_A_log) text += " no A_log";
  if (p.has_dt_bias) text += " dt_bias";
  if (gate_kind(p) == GateKind::none) return text;
  return text + std::string(kGates[static_cast<std::size_t>(c.gates)]);
}

}  // namespace wyvern::cli
