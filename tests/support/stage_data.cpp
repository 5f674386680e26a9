#include "tests/support/stage_data.hpp"

#include <gtest/gtest.h>
#include <wyvern/reference.hpp>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "tests/support/coverage.hpp"

namespace wyvern::testing {
namespace {

StageContext make_context(const OperatorData& data, std::int64_t BT) {
  const Problem& p = data.problem;
  StageContext c;
  c.layout = p.packed ? packed_layout(data.cu_seqlens, BT, chunk_slots(p.B, p.T, p.N, p.packed, BT))
                      : equal_layout(p.B, p.T, BT);
  c.dims = {p.H, p.HV, p.K, p.V};
  c.scale = scale_of(p);
  c.gate_floor = -std::numeric_limits<double>::infinity();
  c.beta_sigmoid = p.use_beta_sigmoid;
  c.neg_eigval = p.use_beta_sigmoid && p.allow_neg_eigval;
  c.state_v_first = p.state_v_first;
  if (p.lower_bound) c.lower_bound = *p.lower_bound;
  c.state_slots = p.state_index ? p.state_slots : p.N;
  c.first_slot = p.null_slot_zero ? 1 : 0;
  c.gate_in_kernel = p.use_gate_in_kernel;
  c.qk_l2norm = p.use_qk_l2norm;
  c.norm_silu = p.output_norm == Activation::silu;
  c.norm_eps = norm_eps_of(p);
  c.scale_tokens_last = p.output_scale_tokens_last;
  c.conv_silu = p.conv_activation != Activation::none;
  c.conv_width = p.short_conv.value_or(0);
  c.conv_columns = conv_columns_of(p);
  c.conv_tokens_first = p.conv_tokens_first;
  c.steps = p.num_householder;
  c.backwards = p.pass == Pass::backward;
  c.summary = p.summary;
  c.transition = p.transition;
  return c;
}

/// A log decay matters through its exponential: next to 1, fp32 cannot represent a difference of
/// less than half a unit in the last place, so a gate that all but keeps everything (g near -1e-30)
/// is held to that much beside the relative bound.
double decay_resolution(std::string_view output, const Vector& reference) {
  double error = 0;
  if (output == "g_log" || output == "G" || output == "Gk") error = 6e-8;
  // Sums of up to 256 products of decays, where products below fp32's normal numbers may be 0.
  if (output == "segment_M" || output == "segment_dM")
    error = 256 * double{std::numeric_limits<float>::min()};
  double norm = 0;
  for (const double x : reference) norm += x * x;
  return norm == 0 ? 0 : error * std::sqrt(static_cast<double>(reference.size()) / norm);
}

/// Runs the references in order, storing each output as its contract does before the next reads it,
/// until the tensors are there that the template `user` has (all of them without one).
class Chain {
 public:
  Chain(const OperatorData& data, std::int64_t BT, std::uint64_t seed, const Template* user)
      : p_(data.problem), engine_(seed + 1), BT_(BT), needs_all_(user == nullptr) {
    if (user != nullptr)
      for (const Argument& argument : user->parameters)
        if (is_present(argument, problem_constants(p_))) missing_.emplace(argument.name);
    out_.problem = p_;
    out_.context = make_context(data, BT);
    NT_ = static_cast<std::int64_t>(out_.context.layout.slots.size());
    for (const auto& [name, tensor] : data.tensors) add(name, tensor);
  }

  StageData run() {
    if (p_.short_conv) short_conv();
    const bool backward = p_.pass == Pass::backward;
    if (backward && p_.output_norm &&
        needs({"do_raw", "dnorm_gate", "dnorm_weight_part", "dnorm_weight"}))
      output_norm_gradients();
    // What other stages make of the same names is not needed.
    if (backward && !needs_all_ && needs({"dq_conv", "dconv_weight_part", "dnorm_weight"})) {
      layer_gradients();
      return std::move(out_);
    }
    if (p_.pass == Pass::recurrent) {
      recurrent();
    } else if (p_.num_householder > 1) {
      steps();
    } else {
      tables();
      if (needs({"x", "y", "rstd", "dy_heads", "dy", "dx"})) rows();
      if (needs({"summaries", "order", "range_states"})) ranges();
      gates();
      forward();
      if (backward) this->backward();
    }
    if (backward) layer_gradients();
    return std::move(out_);
  }

 private:
  /// Whether any of these is still to be made.
  bool needs(std::initializer_list<std::string_view> names) const {
    return needs_all_ || std::any_of(names.begin(), names.end(), [this](std::string_view name) {
             return missing_.contains(name);
           });
  }
  bool done() const { return !needs_all_ && missing_.empty(); }

  bool vector() const { return gate_kind(p_) == GateKind::vector; }
  /// Whether gates an element stand in beta's place.
  bool erases() const { return out_.tensors.contains("erase"); }
  bool gated() const { return gate_kind(p_) != GateKind::none; }
  Shape heads(std::int64_t count) const { return {p_.B, p_.T, count}; }
  Shape heads(std::int64_t count, std::int64_t width) const { return {p_.B, p_.T, count, width}; }
  Shape gate_shape() const { return vector() ? heads(p_.HV, p_.K) : heads(p_.HV); }
  std::int64_t segment_slots() const {
    return std::ssize(out_.context.layout.segments(out_.context.SEG));
  }
  Shape states(std::int64_t count) const {
    return p_.state_v_first ? Shape{count, p_.HV, p_.V, p_.K} : Shape{count, p_.HV, p_.K, p_.V};
  }

  /// Other stages here take q, k and v as they are given.
  void short_conv() {
    run(p_.pass == Pass::recurrent ? "short_conv_step" : "short_conv");
    const std::int64_t rows = p_.T * p_.num_householder;
    store("q_conv", p_.dtype, heads(p_.H, p_.K));
    store("k_conv", p_.dtype, {p_.B, rows, p_.H, p_.K});
    store("v_conv", p_.dtype, {p_.B, rows, p_.HV, p_.V});
    store("final_conv_state", p_.dtype, {p_.N, conv_channels(p_), *p_.short_conv - 1});
  }

  /// The gradients of the convolution, and of all weights of the layer.
  void layer_gradients() {
    if (!p_.short_conv && !p_.output_norm) return;
    const std::int64_t channels = conv_channels(p_);
    if (p_.short_conv) {
      const std::int64_t W = *p_.short_conv, parts = (p_.B * p_.T + 255) / 256;
      Engine engine(static_cast<std::uint64_t>(2000 + p_.T));
      for (const std::string name : {"q", "k", "v"})
        add("d" + name + "_conv", normal(engine, p_.dtype, out_.tensors.at(name).shape()));
      run("short_conv_bwd");
      for (const std::string name : {"q", "k", "v"})
        store("d" + name, p_.dtype, out_.tensors.at(name).shape());
      store("dinitial_conv_state", p_.dtype, {p_.N, channels, W - 1});
      store("dconv_weight_part", DType::fp32, {parts, channels, W});
      store("dconv_bias_part", DType::fp32, {parts, channels});
    }
    run("layer_sum");
    if (p_.output_norm) store("dnorm_weight", DType::fp32, {p_.V});
    if (!p_.short_conv) return;
    store("dconv_weight", DType::fp32, {channels, *p_.short_conv});
    store("dconv_bias", DType::fp32, {channels});
  }

  void tables() {
    run("chunk_index");
    store("seq_offsets", DType::int32, {p_.N + 1});
    store("chunk_offsets", DType::int32, {p_.N + 1});
    store("chunk_index", DType::int32, {NT_, 2});
    for (const std::string name : {"q", "k"})
      if (p_.use_qk_l2norm) {
        TensorMap rows{{"x", values_.at(name)}};
        run_reference("l2norm_rstd", out_.context, rows);
        add(name + "_rstd", HostTensor(DType::fp32, heads(p_.H), rows.at("rstd")));
      }
  }

  void rows() {
    add("x", rows_of_many_lengths(p_.H, p_.K));
    run("l2norm");
    store("y", p_.dtype, heads(p_.H, p_.K));
    run("l2norm_rstd");
    store("rstd", DType::fp32, heads(p_.H));
    if (p_.pass == Pass::backward) row_gradients();
  }

  /// Maps of states of ranges of tokens, one for each sequence, in random order; for a few M is 0.
  void ranges() {
    Engine engine(static_cast<std::uint64_t>(p_.N + p_.K));
    std::vector<double> order(static_cast<std::size_t>(p_.N));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), engine);
    add("order", HostTensor(DType::int32, {p_.N}, order));
    const std::int64_t columns = p_.V + p_.K, one = p_.HV * p_.K * columns;
    HostTensor summaries = normal(engine, DType::fp32, {p_.N, p_.HV, p_.K, columns});
    const double length =
        1 / std::sqrt(static_cast<double>(p_.K));  // M keeps about what it is given
    for (std::int64_t i = 0; i < summaries.elements(); ++i)
      if (i % columns >= p_.V) summaries.set(i, i / one % 4 == 3 ? 0 : length * summaries.at(i));
    add("summaries", summaries);
    run("fold");
    store("range_states", DType::fp32, {p_.N, p_.HV, p_.K, p_.V});
  }

  void gates() {
    if (!gated()) return;
    if (p_.use_gate_in_kernel) {
      run(vector() ? "kda_gate" : "gate");
      store("g_log", DType::fp32, gate_shape());
    }
    run("chunk_local_cumsum");
    store("G", DType::fp32, gate_shape());
    if (vector())
      store("Gk", DType::fp32, gate_shape());
    else
      values_.erase("Gk");
  }

  void forward() {
    const Shape square = heads(p_.HV, BT_);
    run(vector() ? "kda_intra" : "scaled_dot_kkt");
    if (vector()) store("Aqk", DType::fp32, square);
    store("A", DType::fp32, square);
    run("solve_tril");
    store("Tinv", p_.dtype, square);
    run(vector() ? "kda_recompute_w_u" : "recompute_w_u");
    store("w", p_.dtype, heads(p_.HV, p_.K));
    store("u", problem_constants(p_).U_DTYPE, heads(p_.HV, p_.V));
    for (const char* name : {"qg", "kg"})
      if (vector()) store(name, p_.dtype, heads(p_.HV, p_.K));
    if (needs({"segment_M", "segment_R", "segment_state", "summary"})) segments();
    if (!erases() && needs({"share_M", "share_R"})) shares();
    run("fwd_h");
    store("h", p_.dtype, {NT_, p_.HV, p_.K, p_.V});
    store("v_new", p_.dtype, heads(p_.HV, p_.V));
    store("final_state", DType::fp32, states(p_.N));
    if (needs({"h_v_first"})) run("transpose_states");
    store("h_v_first", p_.dtype, {NT_, p_.HV, p_.V, p_.K});
    if (needs({"o"})) run(vector() ? "kda_fwd_o" : "fwd_o");
    store("o", p_.dtype, heads(p_.HV, p_.V));
    if (p_.output_norm && p_.pass == Pass::forward && needs({"o_raw"})) output_norm();
    if (p_.output_dtype && needs({"o_norm", "o_scale"})) quantized_output();
  }

  /// Gates of null sequences, whose rows are 0, are nobody's.
  void output_norm() {
    const HostTensor rows = rows_of_many_lengths(p_.HV, p_.V);
    HostTensor gate = out_.tensors.at("norm_gate");
    for (std::int64_t i = 0; i < rows.elements(); ++i)
      if (rows.at(i) == 0) gate.set(i, std::numeric_limits<double>::quiet_NaN());
    add("o_raw", rows);
    add("norm_gate", gate);
  }

  /// Rows of zeros have the least scale there is.
  void quantized_output() {
    add("o_norm", rows_of_many_lengths(p_.HV, p_.V));
    run("output_quantize");
    const ScaleShape scales = output_scale_shape(p_);
    store("o", *p_.output_dtype, heads(p_.HV, p_.V));
    store("o_scale", DType::fp32, {scales.rows, scales.columns});
  }

  /// Gradients that much smaller than rows are normalized by make all rows count alike.
  void output_norm_gradients() {
    const HostTensor rows = rows_of_many_lengths(p_.HV, p_.V);
    HostTensor dy = out_.tensors.at("do");
    for (std::int64_t row = 0; row < rows.elements(); row += p_.V) {
      double mean = 0;
      for (std::int64_t i = row; i < row + p_.V; ++i)
        mean += rows.at(i) * rows.at(i) / static_cast<double>(p_.V);
      const double length = std::sqrt(mean + double{norm_eps_of(p_)});
      for (std::int64_t i = row; i < row + p_.V; ++i) dy.set(i, dy.at(i) * length);
    }
    add("o_raw", rows);
    add("do", dy);
    run("output_norm_bwd");
    for (const char* name : {"do_raw", "dnorm_gate"}) store(name, p_.dtype, heads(p_.HV, p_.V));
    store("dnorm_weight_part", DType::fp32, {(p_.B * p_.T * p_.HV + 255) / 256, p_.V});
  }

  void segments() {
    const std::int64_t NS = segment_slots();
    run("fwd_h_segment");
    store("segment_M", DType::fp32, {NS, p_.HV, p_.K, p_.K});
    store("segment_R", DType::fp32, {NS, p_.HV, p_.K, p_.V});
    run("fwd_h_combine");
    store("segment_state", DType::fp32, {NS, p_.HV, p_.K, p_.V});
    if (!p_.summary || p_.pass != Pass::forward) return;
    run("fwd_h_summary");
    store("summary", DType::fp32, {p_.N, p_.HV, p_.K, problem_constants(p_).SUMMARY_COLUMNS});
  }

  void shares() {
    const std::int64_t NS = segment_slots();
    run(vector() ? "kda_segment" : "delta_segment");
    store("share_M", DType::fp32, {NS, p_.HV, p_.K, p_.K});
    store("share_R", DType::fp32, {NS, p_.HV, p_.K, p_.V});
  }

  void backward() {
    run(vector() ? "kda_bwd_dv_local" : "bwd_dv_local");
    store("dv_local", p_.dtype, heads(p_.HV, p_.V));
    if (needs({"segment_dM", "segment_dR", "segment_dstate", "dsummary"})) segment_gradients();
    run("bwd_dhu");
    store("dh", p_.dtype, {NT_, p_.HV, p_.K, p_.V});
    store("du", p_.dtype, heads(p_.HV, p_.V));
    store("dinitial_state", DType::fp32, states(p_.N));
    if (vector())
      kda_gradients();
    else
      gradients();
    store("dq", p_.dtype, heads(p_.HV, p_.K));
    store("dk", p_.dtype, heads(p_.HV, p_.K));
    store("dv", p_.dtype, heads(p_.HV, p_.V));
    if (!erases()) store("dbeta", p_.beta_dtype, heads(p_.HV));
    if (gated()) gate_gradients();
    whole_pass();
  }

  /// The pass of delta_scans and delta_gradient, or of kda's three kernels, whose gradients are of
  /// the given inputs.
  void whole_pass() {
    if (p_.dtype != DType::bf16 || BT_ != 64) return;
    if (!vector() && needs({"share_dM", "share_dR"})) {
      run("delta_scans_segment");
      store("share_dM", DType::fp32, {segment_slots(), p_.HV, p_.K, p_.K});
      store("share_dR", DType::fp32, {segment_slots(), p_.HV, p_.K, p_.V});
    }
    if (!needs({"decayed_rows", "states", "z", "dstates", "dq_given", "dk_given", "dg_given"}))
      return;
    if (vector()) prepared_chunks();
    if (vector() && p_.summary) {
      run("kda_scans_summary");
      store("dsummary", DType::fp32, {p_.N, p_.HV, p_.K, p_.V});
    }
    const Vector given = values_.at("v");
    if (erases()) values_["v"] = values_.at("written");
    run(vector() ? "kda_scans" : "delta_scans");
    values_["v"] = given;
    store("states", p_.dtype, {NT_, p_.HV, p_.V, p_.K});
    store("z", p_.dtype, {NT_, p_.HV, BT_, p_.V});
    store("dstates", p_.dtype, {NT_, p_.HV, p_.V, p_.K});
    if (p_.use_qk_l2norm) store("row_scales", DType::fp32, {NT_, p_.HV, 2, BT_});
    if (vector()) {
      values_["dwritten"] = values_.at("dv");
      store("dwritten", p_.dtype, heads(p_.HV, p_.V));
    }
    run(vector() ? "kda_gradient" : "delta_gradient");
    store("dq_given", p_.dtype, heads(p_.H, p_.K));
    store("dk_given", p_.dtype, heads(p_.H, p_.K));
    if (gated()) store("dg_given", p_.g_dtype, gate_shape());
    if (!gated() || !p_.use_gate_in_kernel) return;
    if (p_.has_A_log) store("dA_chunk", DType::fp32, {NT_, p_.HV});
    if (p_.has_dt_bias)
      store("dbias_chunk", DType::fp32, vector() ? Shape{NT_, p_.HV, p_.K} : Shape{NT_, p_.HV});
  }

  void prepared_chunks() {
    run("kda_bwd_prepare");
    store("decayed_rows", p_.dtype, {NT_, p_.HV, 3, BT_, p_.K});
    store("squares", p_.dtype, {NT_, p_.HV, 2, BT_, BT_});
    store("decay", DType::fp32, {NT_, p_.HV, p_.K});
    if (erases()) store("written", p_.dtype, heads(p_.HV, p_.V));
  }

  void segment_gradients() {
    const std::int64_t NS = segment_slots();
    run("bwd_dhu_segment");
    store("segment_dM", DType::fp32, {NS, p_.HV, p_.K, p_.K});
    store("segment_dR", DType::fp32, {NS, p_.HV, p_.K, p_.V});
    run("bwd_dhu_combine");
    store("segment_dstate", DType::fp32, {NS, p_.HV, p_.K, p_.V});
    if (!p_.summary) return;
    run("bwd_dhu_summary");
    store("dsummary", DType::fp32, {p_.N, p_.HV, p_.K, p_.V});
  }

  void gradients() {
    run("bwd_dqkwg");
    store("dk_qk", DType::fp32, heads(p_.HV, p_.K));
    store("dw", p_.dtype, heads(p_.HV, p_.K));
    store("dG_qk", DType::fp32, heads(p_.HV));
    run("wy_bwd");
    store("dG", DType::fp32, heads(p_.HV));
  }

  void kda_gradients() {
    run("kda_bwd_dqkg");
    for (const char* name : {"dq_inter", "dk_inter", "dGk_inter"})
      store(name, DType::fp32, heads(p_.HV, p_.K));
    if (erases())
      store("derase_inter", DType::fp32, heads(p_.HV, p_.K));
    else
      store("dbeta_inter", DType::fp32, heads(p_.HV));
    for (const char* name : {"dAqk", "dA"}) store(name, DType::fp32, heads(p_.HV, BT_));
    run("kda_intra_bwd");
    if (erases()) {
      store("derase", p_.beta_dtype, heads(p_.HV, p_.K));
      store("dwrite", p_.beta_dtype, heads(p_.HV, p_.V));
    }
    summed_gates();
  }

  void summed_gates() {
    if (done()) return;
    store("dGk", DType::fp32, gate_shape());
    values_["dG"] = values_.at("dGk");
    store("dG", DType::fp32, gate_shape());
  }

  void gate_gradients() {
    run("chunk_local_reverse_cumsum");
    store("dg", p_.use_gate_in_kernel ? DType::fp32 : p_.g_dtype, gate_shape());
    if (done() || !p_.use_gate_in_kernel) return;
    add("dg_log", out_.tensors.at("dg"));
    run(vector() ? "kda_gate_bwd" : "gate_bwd");
    store("dg_raw", p_.g_dtype, gate_shape());
    const Shape parameters = vector() ? Shape{p_.HV, p_.K} : Shape{p_.HV};
    store("dA_part", DType::fp32, {NT_, p_.HV});
    store("dbias_part", DType::fp32, vector() ? Shape{NT_, p_.HV, p_.K} : Shape{NT_, p_.HV});
    run("gate_param_sum");
    store("dA_log", DType::fp32, {p_.HV});
    store("ddt_bias", DType::fp32, parameters);
  }

  /// The gradient of a row grows with its scale; incoming rows that much smaller make all rows of
  /// dx count alike.
  void row_gradients() {
    HostTensor dy = normal(engine_, p_.dtype, heads(p_.HV, p_.K));
    const Vector& rstd = values_.at("rstd");
    for (std::int64_t i = 0; i < dy.elements(); ++i) {
      const std::int64_t row = i / p_.K;
      const std::int64_t at = row / p_.HV * p_.H + row % p_.HV / (p_.HV / p_.H);
      dy.set(i, dy.at(i) / rstd[static_cast<std::size_t>(at)]);
    }
    add("dy_heads", dy);
    run("head_sum");
    store("dy", p_.dtype, heads(p_.H, p_.K));
    run("l2norm_bwd");
    store("dx", p_.dtype, heads(p_.H, p_.K));
  }

  /// Between rows of tokens and rows of steps. All other stages count rows of one kind alone.
  void steps() {
    if (p_.packed) {
      run("step_seqlens");
      store("cu_seqlens_steps", p_.seqlens_dtype, {p_.N + 1});
    }
    const std::int64_t rows = p_.T * p_.num_householder;
    add("x", normal(engine_, p_.dtype, heads(p_.H, p_.K)));
    add("x_steps", normal(engine_, p_.dtype, {p_.B, rows, p_.H, p_.K}));
  }

  void recurrent() {
    run("recurrent");
    store("o", p_.dtype, heads(p_.HV, p_.V));
    store("final_state", DType::fp32, states(p_.N));
  }

  /// Rows whose squared lengths lie on both sides of the norms' 1e-6, some of them zero.
  HostTensor rows_of_many_lengths(std::int64_t count, std::int64_t width) const {
    // A seed that no case has: of dy's numbers, x would be parallel to it, and dx nothing.
    Engine engine(static_cast<std::uint64_t>(1000 + p_.T));
    HostTensor x = unit_rows(engine, p_.dtype, heads(count, width));
    std::uniform_real_distribution<double> exponent(-4, 1);
    for (std::int64_t row = 0; row < x.elements(); row += width) {
      const double length = row / width % 7 == 6 ? 0 : std::pow(10.0, exponent(engine));
      for (std::int64_t i = row; i < row + width; ++i) x.set(i, length * x.at(i));
    }
    return x;
  }

  void add(const std::string& name, HostTensor tensor) {
    values_[name] = tensor.values();
    out_.tensors[name] = std::move(tensor);
    missing_.erase(name);
  }
  void run(std::string_view stage) {
    if (!done()) run_reference(stage, out_.context, values_);
  }
  /// Does nothing where the stage was not run.
  void store(const std::string& name, DType dtype, Shape shape) {
    const auto made = values_.find(name);
    if (made == values_.end() && !needs_all_) return;
    add(name, HostTensor(dtype, std::move(shape), values_.at(name)));
  }

  const Problem& p_;
  Engine engine_;
  std::int64_t BT_, NT_ = 0;
  bool needs_all_;
  std::set<std::string, std::less<>> missing_;
  StageData out_;
  TensorMap values_;
};

/// Whether the operator has the rates of keys and values that the stage reads.
bool has_its_rates(const Problem& p, std::string_view stage) {
  const OperatorDefinition& op = definition_of(p);
  const Constants constants = problem_constants(p);
  for (const StageDefinition* definition : all_stages())
    for (const std::string_view rate : {"beta", "erase", "write"}) {
      const Argument* const argument = definition->name == stage ? definition->find(rate) : nullptr;
      if (argument != nullptr && is_present(*argument, constants) &&
          op.rule(argument_index(rate)) == nullptr)
        return false;
    }
  return true;
}

/// Whether the problem uses a stage that only some problems have.
bool uses_stage(const Problem& p, std::string_view stage) {
  const GateKind kind = gate_kind(p);
  const bool in_kernel = p.use_gate_in_kernel && kind != GateKind::none;
  const bool by_token = stage.ends_with("recurrent") || stage == "short_conv_step";
  if (by_token != (p.pass == Pass::recurrent)) return false;
  if (!has_its_rates(p, stage)) return false;
  if (by_token) return stage != "short_conv_step" || p.short_conv.has_value();
  const bool moves_steps = stage == "expand_steps" || stage == "compress_steps";
  if (stage == "short_conv") return p.short_conv.has_value();
  const bool backward = p.pass == Pass::backward;
  if (stage == "short_conv_bwd") return backward && p.short_conv;
  if (stage == "layer_sum") return backward && (p.short_conv || p.output_norm);
  if ((moves_steps || stage == "step_seqlens") != (p.num_householder > 1)) return false;
  if (stage == "kda_scans") return uses_stage(p, "kda_gradient");
  if (stage == "kda_scans_summary") return p.summary && kind == GateKind::vector;
  if (stage == "fwd_h_summary" || stage == "bwd_dhu_summary") return p.summary;
  if (stage == "step_seqlens") return p.packed;
  if (stage == "chunk_index") return p.packed;
  if (stage == "transpose_states") return p.return_intermediate_states;
  if (stage == "output_norm") return p.output_norm && p.pass == Pass::forward;
  if (stage == "output_norm_bwd") return p.output_norm && backward;
  if (stage == "output_quantize") return p.output_dtype.has_value();
  if (stage == "gate" || stage == "gate_bwd") return in_kernel && kind == GateKind::scalar;
  if (stage == "kda_gate" || stage == "kda_gate_bwd") return in_kernel && kind == GateKind::vector;
  if (stage == "gate_param_sum") return in_kernel;
  if (stage == "chunk_local_cumsum" || stage == "chunk_local_reverse_cumsum")
    return kind != GateKind::none;
  for (const std::string_view scalar :
       {"delta_scans", "delta_scans_segment", "delta_scans_resume", "delta_reverse",
        "delta_reverse_resume", "delta_gradient", "delta_gradient_kept", "delta_segment",
        "delta_resume", "scaled_dot_kkt", "recompute_w_u", "fwd_o", "bwd_dv_local", "bwd_dqkwg",
        "wy_bwd"})
    if (stage == scalar) return kind != GateKind::vector;
  return !stage.starts_with("kda_") || kind == GateKind::vector;
}

/// Whether a tensor has the contract's rank; GATE_HEADS counts heads and keys in one, and operators
/// have no dimension M where state_index has one column.
bool has_rank(const HostTensor& tensor, const Argument& argument) {
  const std::size_t rank = tensor.shape().size(), wanted = argument.shape.size();
  return rank == wanted ||
         (rank == wanted + 1 && argument.shape[wanted - 1].text() == "GATE_HEADS") ||
         (rank + 1 == wanted && argument.shape[wanted - 1].text() == "M");
}

}  // namespace

namespace {

/// Whether the template carries the stage out for such a problem: optional stages may be left out,
/// and others are done.
bool carries_out(const Cover& cover, const Constants& constants) {
  return !cover.done && (!cover.only_when || cover.only_when->holds(constants));
}

/// Carries a covered stage out on the template's tensors, under the stage's names for them.
void run_cover(const Cover& cover, const StageContext& context, TensorMap& values) {
  TensorMap view = values;
  for (const auto& [name, local] : cover.rename)
    if (const auto at = values.find(local); at != values.end()) view[name] = at->second;
  run_reference(std::string(cover.stage->name), context, view);
  for (const auto& [name, local] : cover.rename) {
    if (cover.stage->find(name)->access != Access::in) view[local] = view.at(name);
    view.erase(name);
    if (const auto at = values.find(name); at != values.end()) view[name] = at->second;
  }
  values = std::move(view);
}

}  // namespace

bool exercises(const Template& t, const Problem& problem) {
  const Constants constants = problem_constants(problem);
  for (const TensorMapUse& map : t.tensor_maps)
    if (!map.when.holds(constants)) return false;
  for (const Cover& cover : t.covers)
    if (carries_out(cover, constants) && !uses_stage(problem, std::string(cover.stage->name)))
      return false;
  // A gate's raw inputs are not log decays.
  return t.covers.front().stage->name != "chunk_local_cumsum" || !problem.use_gate_in_kernel;
}

bool exercises(const Template& t, const StageData& data) {
  if (!exercises(t, data.problem)) return false;
  const Constants constants = problem_constants(data.problem);
  bool writes = false;
  for (const Argument& argument : t.parameters) {
    if (!is_present(argument, constants)) continue;
    const auto tensor = data.tensors.find(argument.name);
    if (tensor == data.tensors.end()) return false;
    if (!has_rank(tensor->second, argument)) return false;
    writes |= argument.access != Access::in;
  }
  return writes;
}

namespace {

/// Whether it is one of the three kernels of kda's backward pass.
bool is_of_kda_pass(const Template& t) {
  return t.source.starts_with("backward/kda_") || t.name == "kda_bwd_prepare";
}

}  // namespace

/// Whether its blocks have whole rows of o, which they normalize.
bool has_whole_rows(const Template& t) {
  return t.id() == "delta_forward_norm.hopper" || t.id() == "kda_forward_norm.hopper";
}

bool keeps_states(const Template& t) {
  return std::ranges::any_of(t.keeps, [](const Keep& keep) { return keep.name == "h"; });
}

bool takes(const Template& t, const Limits& limits, const Problem& problem) {
  if (t.carries_out("output_quantize") && problem.V % 128 != 0) return false;
  const bool hopper = limits.wgmma && limits.tensor_copies && problem.dtype != DType::fp32;
  if (t.id() == "scaled_dot_kkt.hopper") return hopper && problem.K % 64 == 0;
  if (t.carries_out("recurrent") && t.variant == "hopper") {
    const Constants constants = problem_constants(problem);
    if (t.carries_out("short_conv_step") &&
        (problem.dtype == DType::fp32 || constants.INDEX_COLUMNS || constants.INTERMEDIATE_STATES))
      return false;
    return limits.tensor_copies && problem.pass == Pass::recurrent && !constants.PARENT &&
           (!constants.FINAL_STATE || constants.STATE_DTYPE == DType::fp32) &&
           (problem.K == 64 || problem.K == 128) && (problem.V == 64 || problem.V == 128);
  }
  if (is_of_kda_pass(t))
    return hopper && problem.dtype == DType::bf16 && problem.pass == Pass::backward &&
           (!problem_constants(problem).ERASE_WRITE || problem.beta_dtype == problem.dtype) &&
           !problem.disable_recompute && problem.H == problem.HV &&
           (problem.K == 64 || problem.K == 128) && (problem.V == 64 || problem.V == 128) &&
           !problem.allow_neg_eigval;
  if (t.source.starts_with("backward/"))
    return hopper && problem.dtype == DType::bf16 && problem.pass == Pass::backward &&
           !problem.disable_recompute && gate_kind(problem) != GateKind::vector &&
           (problem.K == 64 || problem.K == 128 || problem.K == 256) && problem.V % 64 == 0;
  const bool one_head_gate = t.source.starts_with("forward/delta_forward/");
  const bool scans = t.source.starts_with("forward/kda_fwd_h_o/");
  const bool prepared = scans || t.source.starts_with("forward/kda_prepare/");
  const bool one_kernel = t.source.starts_with("forward/kda_forward/");
  if (has_whole_rows(t) && (problem.V != 128 || problem.K > 128 ||
                            (problem.dtype == DType::fp16 && problem.use_qk_l2norm)))
    return false;
  const bool kept = problem.disable_recompute || problem.return_intermediate_states;
  if (keeps_states(t) && (problem.K > 128 || has_checkpoints(problem))) return false;
  if (t.id() == "fwd_h_o.portable")
    return problem.dtype != DType::fp32 && problem.pass == Pass::forward && !kept;
  if (one_head_gate || prepared || one_kernel)
    return hopper && (problem.K == 64 || problem.K == 128 || (problem.K == 256 && !one_kernel)) &&
           (!one_kernel || problem.dtype == DType::bf16) && problem.V % 64 == 0 &&
           (!problem_constants(problem).ERASE_WRITE || scans ||
            (prepared && problem.beta_dtype == problem.dtype)) &&
           problem.pass == Pass::forward && !problem.allow_neg_eigval && kept == keeps_states(t);
  return true;
}

Problem within_reach(const Template& t, const Limits& limits, const Problem& problem) {
  if (takes(t, limits, problem)) return problem;
  Problem p = problem;
  if (t.carries_out("output_quantize")) {
    p.V = (p.V + 127) / 128 * 128;
    return p;
  }
  if (t.id() == "fwd_h_o.portable") {
    p.pass = Pass::forward;
    if (p.dtype == DType::fp32) p.dtype = DType::bf16;
    p.disable_recompute = p.return_intermediate_states = false;
    return p;
  }
  p.K = p.K <= 64 ? 64 : 128;
  if (takes(t, limits, p)) return p;
  const bool whole_rows = has_whole_rows(t);
  p.V = p.V <= 64 && !whole_rows ? 64 : 128;
  if (whole_rows && p.dtype == DType::fp16) p.use_qk_l2norm = false;
  if (t.carries_out("recurrent")) {
    p.pass = Pass::recurrent;
    p.parent = false;
    if (t.carries_out("short_conv_step"))
      p.index_columns = 0, p.intermediate_rows.reset(), p.draft_tokens.reset();
    if (problem_constants(p).FINAL_STATE) p.state_dtype = DType::fp32;
    return p;
  }
  p.pass = Pass::forward;
  if (is_of_kda_pass(t)) p.HV = p.H;
  if (t.source.starts_with("backward/") || is_of_kda_pass(t)) {
    p.pass = Pass::backward;
    p.dtype = DType::bf16;
  }
  p.allow_neg_eigval = false;
  const bool keeps = keeps_states(t);
  p.return_intermediate_states = keeps && p.return_intermediate_states && !p.disable_recompute;
  p.disable_recompute = keeps && !p.return_intermediate_states;
  if (keeps) {
    p.checkpoint_offsets = p.fp32_checkpoints = false;
    p.inplace_state = p.state_index = p.output_state_index = p.has_initial_state = false;
  }
  if (p.op == "gdn2") {
    p.beta_dtype = p.dtype;
    if (!takes(t, limits, p)) p.op = "kda";
  }
  return p;
}

StageData make_stage_data(const Problem& problem, std::int64_t BT, Gate gate, std::uint64_t seed,
                          const std::vector<std::int64_t>& lengths, const Template* user) {
  Problem p = problem;
  if (p.state_index && p.state_slots == 0)
    p.state_slots = 3 + (p.packed ? std::ssize(lengths) : p.N);
  // Stages of a summary have inputs from stages that it leaves out.
  Problem whole = p;
  whole.summary = whole.transition = false;
  OperatorData data = make_data(whole, gate, seed, lengths);
  data.problem.summary = p.summary;
  data.problem.transition = p.transition;
  return Chain(data, BT, seed, user).run();
}

TensorMap reference_outputs(const Template& t, const StageData& data) {
  TensorMap values;
  for (const Argument& argument : t.parameters)
    if (argument.access != Access::out)
      if (const auto at = data.tensors.find(argument.name); at != data.tensors.end())
        values[std::string(argument.name)] = at->second.values();
  const Constants constants = problem_constants(data.problem);
  for (const Cover& cover : t.covers)
    if (carries_out(cover, constants)) run_cover(cover, data.context, values);
  // Where a gate is all but closed its gradients are too small for fp32's normal numbers: they
  // count as the 0 that they may be computed as.
  for (const Argument& argument : t.parameters)
    if (argument.access != Access::in)
      if (const auto at = values.find(argument.name); at != values.end())
        for (double& x : at->second)
          if (std::abs(x) < std::numeric_limits<float>::min()) x = 0;
  return values;
}

Written written_elements(const StageData& data, const Template* t) {
  const Problem& p = data.problem;
  const std::int64_t one = p.HV * p.K * p.V;
  const bool keeps = p.disable_recompute || p.return_intermediate_states;
  const ChunkLayout& layout = data.context.layout;
  const std::int64_t square = p.HV * p.K * p.K;
  const std::int64_t BT = layout.BT;
  // A chunk slot's part of a tensor [NT, ...].
  const std::map<std::string, std::int64_t> chunk_sizes{{"z", p.HV * BT * p.V},
                                                        {"decayed_rows", p.HV * 3 * BT * p.K},
                                                        {"squares", p.HV * 2 * BT * BT},
                                                        {"row_scales", p.HV * 2 * BT},
                                                        {"decay", p.HV * p.K}};
  std::set<std::string> of_ends;
  if (t != nullptr)
    for (const Keep& keep : t->keeps)
      if (!keep.whole.holds(problem_constants(p))) of_ends.emplace(keep.name);
  std::vector<bool> is_end(static_cast<std::size_t>(layout.tokens()));
  for (const ChunkLayout::Slot& slot : layout.slots)
    if (slot.rows > 0) is_end[static_cast<std::size_t>(slot.begin + slot.rows - 1)] = true;
  return [&slots = layout.slots, of_ends, is_end, row = p.HV * p.K,
          segments = layout.segments(data.context.SEG), one, square, chunk_sizes, keeps,
          all = p.summary](const std::string& name, std::int64_t i) {
    if (name.starts_with("segment_") || name.starts_with("share_")) {
      const bool is_square = name.ends_with("M");
      const auto& segment = segments[static_cast<std::size_t>(i / (is_square ? square : one))];
      if (segment.sequence < 0) return false;
      if (name.ends_with("_M") || name.ends_with("_R")) return all || !segment.last;
      return all || name == "segment_state" || name == "segment_dstate" || !segment.first;
    }
    if (of_ends.contains(name)) return is_end[static_cast<std::size_t>(i / row)];
    for (const auto& [tensor, size] : chunk_sizes)
      if (name == tensor) return slots[static_cast<std::size_t>(i / size)].sequence >= 0;
    const bool of_slots =
        name == "dh" || name == "states" || name == "dstates" || (name == "h" && !keeps);
    if (!of_slots) return true;
    return slots[static_cast<std::size_t>(i / one)].sequence >= 0;
  };
}

namespace {

/// The groups of outputs in runtime/SPECIFICATION.md, section 5.
enum class Row : std::uint8_t { forward, gradient, gate_gradient };

Row row_of(std::string_view output) {
  for (const std::string_view name : {"dG",
                                      "dG_qk",
                                      "dGk",
                                      "dGk_inter",
                                      "dg",
                                      "dg_raw",
                                      "dg_given",
                                      "dbeta",
                                      "derase",
                                      "dwrite",
                                      "dbeta_inter",
                                      "derase_inter",
                                      "dA_log",
                                      "ddt_bias",
                                      "dA_part",
                                      "dbias_part",
                                      "dA_chunk",
                                      "dbias_chunk",
                                      "dnorm_gate",
                                      "dnorm_weight",
                                      "dnorm_weight_part",
                                      "dconv_weight",
                                      "dconv_bias",
                                      "dconv_weight_part",
                                      "dconv_bias_part"})
    if (output == name) return Row::gate_gradient;
  for (const std::string_view name : {"dq",       "dk",
                                      "dq_given", "dk_given",
                                      "dv",       "du",
                                      "dh",       "dstates",
                                      "dv_local", "dw",
                                      "do_raw",   "dinitial_state",
                                      "dk_qk",    "dq_inter",
                                      "dk_inter", "dAqk",
                                      "dA",       "dy",
                                      "dx",       "segment_dR",
                                      "share_dR", "segment_dstate",
                                      "dsummary", "dinitial_conv_state"})
    if (output == name) return Row::gradient;
  return Row::forward;
}

/// Whether an fp32 output of a 16-bit problem comes from sums and functions in fp32 alone.
bool is_computed_in_fp32(const Template& t, const StageData& data, std::string_view output) {
  if (output == "A") return gate_kind(data.problem) != GateKind::vector;
  if (output == "o_scale") return !t.carries_out("output_norm");  // of rounded numbers
  // A scan of tiles in 16 bits, where other templates fold fp32 maps of segments.
  if (output == "dsummary") return t.name != "kda_scans_summary";
  for (const std::string_view name :
       {"G", "Gk", "g_log", "rstd", "dg", "dg_raw", "dA_part", "dbias_part", "dA_log", "ddt_bias",
        "range_states", "summary", "dnorm_weight", "dnorm_weight_part", "dconv_weight",
        "dconv_bias", "dconv_weight_part", "dconv_bias_part"})
    if (output == name) return true;
  return false;
}

/// The error of fp16 operands where fast decay makes a segment's product of chunks tiny: fp16
/// numbers are multiples of 2^-24, so each chunk rounds the product and its product with a factor
/// by up to 2^-25, for any size. Relative to the output's size.
double fp16_resolution(const StageData& data, std::string_view output) {
  if (data.problem.dtype != DType::fp16) return 0;
  const std::string name(output);
  const HostTensor& tensor = data.tensors.at(name);
  const Written written = written_elements(data);
  double count = 0, norm = 0;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    if (!written(name, i)) continue;
    ++count;
    norm += tensor.at(i) * tensor.at(i);
  }
  const auto SEG = static_cast<double>(data.context.SEG);
  return norm == 0 ? 0 : std::ldexp(std::sqrt(2 * SEG), -25) * std::sqrt(count / norm);
}

/// The error of a contract that takes products of at most 2^-30 for 0: the rms of a matrix with
/// such a norm, as a share of the output's size.
double skipped_products(const StageData& data, const std::string& output) {
  const HostTensor& tensor = data.tensors.at(output);
  const Written written = written_elements(data);
  double count = 0, norm = 0;
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    if (!written(output, i)) continue;
    ++count;
    norm += tensor.at(i) * tensor.at(i);
  }
  const auto K = static_cast<double>(data.problem.K);
  return norm == 0 ? 0 : std::ldexp(std::sqrt(count / K / norm), -30);
}

/// Whether no product of matrices, and so no precision, takes part.
bool is_scalar(std::string_view output) {
  for (const std::string_view name : {"G", "Gk", "g_log", "y", "rstd", "dg", "dg_raw", "dA_part",
                                      "dbias_part", "dA_log", "ddt_bias", "dy", "dx"})
    if (output == name) return true;
  return false;
}

}  // namespace

double stage_bound(const Template& t, const StageData& data, const Config& config,
                   std::string_view output) {
  const HostTensor& tensor = data.tensors.find(output)->second;
  if (!is_floating(tensor.dtype())) return 0;
  if (is_float8(tensor.dtype())) return error_bound(data.problem, output);
  for (const std::string_view moved :
       {"h_v_first", "x", "x_steps", "final_conv_state", "conv_state"})
    if (output == moved) return 0;
  // A running sum of up to 128 terms of one sign: each addition rounds to half a unit (6e-8) and
  // the roundings add up as a random walk, below 128^0.5 * 6e-8 = 7e-7.
  if ((output == "G" || output == "Gk") && !data.problem.use_gate_in_kernel) return 1e-6;
  const Value* precision = config.find("precision");
  const bool tf32 = precision != nullptr && std::get<Precision>(*precision) == Precision::tf32;
  const bool narrow = tensor.dtype() != DType::fp32 ||
                      (data.problem.dtype != DType::fp32 && !is_computed_in_fp32(t, data, output));
  const auto bound = [&](double narrow_bound, double fp32, double fp32_by_tf32) {
    return narrow ? narrow_bound : tf32 && !is_scalar(output) ? fp32_by_tf32 : fp32;
  };
  // A product of a segment's chunks, without a new term in any chunk: their rounding errors, each
  // at most half of the bound of a chunk's result, add up as a random walk.
  const double growth = std::sqrt(data.context.SEG) / 2;
  if (output == "segment_M")
    return growth * bound(5e-3, 1e-5, 1e-3) + fp16_resolution(data, output);
  if (output == "share_M")
    return growth * bound(5e-3, 1e-5, 1e-3) + skipped_products(data, "share_M");
  if (output == "share_dM")
    return growth * bound(8e-3, 2e-5, 2e-3) + skipped_products(data, "share_dM");
  if (output == "segment_dM")
    return growth * bound(8e-3, 2e-5, 2e-3) + fp16_resolution(data, output);
  switch (row_of(output)) {
    case Row::forward: return bound(5e-3, 1e-5, 1e-3);
    case Row::gradient: return bound(8e-3, 2e-5, 2e-3);
    case Row::gate_gradient: return bound(2e-2, 5e-5, 4e-3);
  }
  return 0;
}

void expect_stage_matches(const Device& device, const PlanStep& step, const StageData& data,
                          DeviceTensor::Guards guards) {
  SCOPED_TRACE(step.template_id + " {" + step.config.to_string() + "} " + describe(data.problem));
  const Template& t = *find_template(step.template_id);
  if (is_only_listed(data.problem, step.template_id)) return;
  const Written written = written_elements(data, &t);
  const Stage stage = prepare_stage(device, step, data.problem);
  const HostTensors outputs =
      run_stage(device, stage, problem_constants(data.problem), data.tensors, guards, written);
  const TensorMap expected = reference_outputs(t, data);
  for (const auto& [name, actual] : outputs) {
    const auto select = [&, &tensor = name](std::int64_t i) { return written(tensor, i); };
    const Vector& reference = expected.find(name)->second;
    if (!is_floating(actual.dtype()))
      EXPECT_EQ(actual.values(), reference) << name;
    else
      EXPECT_LE(rms_error(actual, reference, select),
                stage_bound(t, data, step.config, name) + decay_resolution(name, reference))
          << name;
  }
}

}  // namespace wyvern::testing
