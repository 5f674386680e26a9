#include "tools/wyvern/selection.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <type_traits>
#include <variant>

#include "runtime/base/nearest_names.hpp"
#include "runtime/operators/preset_calls.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/reject.hpp"

namespace wyvern::cli {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;

/// The whole text as a number, or nothing.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return {};
  return value;
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> pieces;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    pieces.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return pieces;
}

/// Boundaries from lengths: "5,0,77" is 0,5,5,82.
std::vector<std::int64_t> parse_seqlens(std::string_view text) {
  std::vector<std::int64_t> boundaries{0};
  for (const std::string_view piece : split(text)) {
    const auto length = number<std::int64_t>(piece);
    if (!length || *length < 0 || *length > kMostTokens)
      reject(
          "--seqlens has the length '{}'; it must be a list of integers from 0 to {}, as in "
          "5,0,77",
          piece, kMostTokens);
    boundaries.push_back(boundaries.back() + *length);
  }
  return boundaries;
}

std::vector<PresetCall> calls_of_preset(const SelectionFlags& flags) {
  const Preset& preset = find_preset(*flags.preset);
  if (preset.op == flags.op)
    return preset_calls(preset.name, parse_element_type("--dtype", flags.dtype));
  std::vector<std::string_view> names;
  for (const Preset& p : presets())
    if (p.op == flags.op) names.push_back(p.name);
  reject("--preset {} is a shape of {}; the presets of {} are {}", preset.name, preset.op, flags.op,
         nearest_names(preset.name, names));
}

Problem from_shape(const SelectionFlags& flags) {
  if (flags.tokens)
    reject("--tokens is {}; with --shape it must be left out, T is part of the shape",
           *flags.tokens);
  if (flags.batch)
    reject("--batch is {}; with --shape it must be left out, B is part of the shape", *flags.batch);
  Problem problem = flags.seqlens ? parse_shape(*flags.shape, Problem{}, {"H", "K"})
                                  : parse_shape(*flags.shape, Problem{}, {"T", "H", "K"});
  problem.op = flags.op;
  problem.dtype = problem.beta_dtype = parse_element_type("--dtype", flags.dtype);
  problem.initial_state = problem.output_final_state = true;
  return problem;
}

void apply_seqlens(std::string_view text, bool tokens_given, Selection& selection) {
  Problem& problem = selection.problem;
  selection.cu_seqlens = parse_seqlens(text);
  const std::int64_t total = selection.cu_seqlens.back();
  if (tokens_given && problem.T != total)
    reject("T is {} but the lengths of --seqlens add up to {}; leave T out or make them equal",
           problem.T, total);
  if (problem.B != 1) reject("B is {}; a packed batch (--seqlens) must have B=1", problem.B);
  problem.T = total;
  problem.N = static_cast<std::int64_t>(selection.cu_seqlens.size()) - 1;
  problem.packed = true;
}

/// With a state updated in place there is neither an initial nor a final state beside it; a summary
/// has no final state, and backward no initial one. Rows that are convolved have their windows
/// where the states are: in a pool, or one where a state is given and another where one is wanted.
void apply_states(const SelectionFlags& flags, Problem& problem) {
  problem.inplace_conv_state = problem.short_conv && problem.inplace_state;
  problem.initial_conv_state =
      problem.short_conv && !problem.inplace_state && problem.initial_state;
  problem.output_conv_state =
      problem.short_conv && !problem.inplace_state && problem.output_final_state;
  if (problem.inplace_state) problem.initial_state = problem.output_final_state = false;
  if (problem.summary)
    (problem.pass == Pass::forward ? problem.output_final_state : problem.initial_state) = false;
  problem.state_index = flags.fields.find("state_slots") != nullptr;
}

/// A preset's bound goes with the gate that it shapes; one that is given stays, to be judged.
void apply_gate(const SelectionFlags& flags, const OptionFlags& options, Problem& problem) {
  if (!problem.use_gate_in_kernel && !problem.safe_gate && options.find("lower_bound") == nullptr)
    problem.lower_bound.reset();
  problem.has_dt_bias = problem.use_gate_in_kernel && flags.fields.find("has_dt_bias") == nullptr;
}

/// Sets a field to its option's value.
struct FieldSetter {
  const FieldOption& option;
  const std::string& text;

  void operator()(std::int64_t& value) const {
    value = parse_integer(option.name, text, option.least, option.most);
  }
  void operator()(std::optional<std::int64_t>& value) const {
    value = parse_integer(option.name, text, option.least, option.most);
  }
  void operator()(std::optional<float>& value) const {
    if (text == "none")
      value.reset();
    else
      value = parse_float(option.name, text);
  }
  void operator()(std::optional<Precision>& value) const {
    value = parse_precision(text);
    if (!value) reject("{} is '{}'; it must be one of ieee, tf32x3, tf32", option.name, text);
  }
  void operator()(std::optional<Activation>& value) const {
    value = parse_activation(text);
    if (!value) reject("{} is '{}'; it must be one of silu, sigmoid, none", option.name, text);
  }
  void operator()(bool& value) const {
    value = (text == "true") != option.name.starts_with("--no-");
  }
  template <class T>
    requires std::is_same_v<T, DType> || std::is_same_v<T, std::optional<DType>>
  void operator()(T& value) const {
    const auto type = parse_dtype(text);
    if (!type || !is_floating(*type))
      reject("{} is '{}'; it must be one of bf16, fp16, fp32, float8_e4m3, float8_e5m2",
             option.name, text);
    value = *type;
  }
  void operator()(Pass& value) const { value = parse_pass(text); }
  void operator()(std::string& value) const { value = text; }
};

/// Sets a field to the text that --problem has for it.
struct TextSetter {
  std::string_view name, text;

  void operator()(std::string& value) const { value = text; }
  void operator()(Pass& value) const { value = parse_pass(text); }
  void operator()(std::int64_t& value) const { value = integer(); }
  void operator()(std::optional<std::int64_t>& value) const { value = integer(); }
  void operator()(std::optional<float>& value) const { value = parse_float(name, text); }
  void operator()(bool& value) const {
    if (text != "true" && text != "false" && text != "1" && text != "0")
      reject("{} is '{}'; it must be true or false", name, text);
    value = text == "true" || text == "1";
  }
  template <class T>
    requires std::is_same_v<T, DType> || std::is_same_v<T, std::optional<DType>>
  void operator()(T& value) const {
    const auto type = parse_dtype(text);
    if (!type) reject("{} is '{}'; it must be one of fp32, fp16, bf16, int32, int64", name, text);
    value = *type;
  }
  void operator()(std::optional<Precision>& value) const {
    value = parse_precision(text);
    if (!value) reject("{} is '{}'; it must be one of ieee, tf32x3, tf32", name, text);
  }
  void operator()(std::optional<Activation>& value) const {
    value = parse_activation(text);
    if (!value) reject("{} is '{}'; it must be one of silu, sigmoid, none", name, text);
  }

 private:
  std::int64_t integer() const { return parse_integer(name, text, 0, kMostTokens); }
};

/// The option that gives a field the value it has; empty for the value that it has without one.
struct OptionWriter {
  const FieldOption& option;

  std::string operator()(const auto& value, const auto& otherwise) const {
    return value == otherwise ? "" : fmt::format("{} {}", option.name, text(value));
  }
  std::string operator()(bool value, bool otherwise) const {
    return value == otherwise ? "" : std::string(option.name);
  }

 private:
  template <class T>
  static std::string text(const T& value) {
    if constexpr (std::is_enum_v<T>)
      return std::string(to_string(value));
    else
      return fmt::format("{}", value);
  }
  template <class T>
  static std::string text(const std::optional<T>& value) {
    return value ? text(*value) : "none";
  }
};

void require_problem(const SelectionFlags& flags) {
  require_operator(flags.op);
  if (flags.preset && flags.shape)
    reject("--preset and --shape are both given; only one of them may be");
  if (!flags.preset && !flags.shape)
    reject("--preset or --shape is missing; give one, as in --preset qwen3-next-80b");
}

std::optional<Pass> given_pass(const OptionFlags& options) {
  const std::string* const text = options.find("pass");
  return text != nullptr ? std::optional(parse_pass(*text)) : std::nullopt;
}

/// A preset's call with its batch and tokens; a recurrent call has more than its own only where the
/// pass was asked for alone.
Problem with_tokens(const SelectionFlags& flags, Problem problem, bool alone) {
  if (flags.batch) problem.B = problem.N = parse_integer("--batch", *flags.batch, 0, kMostTokens);
  const std::int64_t most = problem.T;
  if (most == 0) problem.T = kDefaultTokens;
  if (flags.tokens) {
    problem.T = parse_integer("--tokens", *flags.tokens, 0, kMostTokens);
    if (most > 0 && !alone) problem.T = std::clamp<std::int64_t>(problem.T, 1, most);
  }
  if (problem.packed && !flags.seqlens) {
    problem.T *= problem.B;
    problem.B = 1;
  }
  return problem;
}

/// The boundaries of a packed batch whose sequences are equally long, but for the first where a
/// hint says how long one is.
std::vector<std::int64_t> assumed_lengths(const Problem& problem) {
  std::vector<std::int64_t> boundaries{0};
  const std::int64_t first = longest_sequence(problem);
  for (std::int64_t n = 0; n < problem.N; ++n)
    boundaries.push_back(first + (n == 0 ? 0 : n * (problem.T - first) / (problem.N - 1)));
  return boundaries;
}

/// The problem with everything that the options say.
Selection finished(const SelectionFlags& flags, const OptionFlags& options, Problem problem) {
  Selection selection{std::move(problem), {}};
  selection.problem.state_dtype = DType::fp32;
  // A call that is packed by itself has the boundaries' dtype of its library.
  if (!selection.problem.packed) selection.problem.seqlens_dtype = DType::int64;
  if (flags.seqlens) {
    const bool tokens_given = flags.tokens.has_value() ||
                              (flags.shape && (flags.shape->starts_with("T=") ||
                                               flags.shape->find(",T=") != std::string::npos));
    apply_seqlens(*flags.seqlens, tokens_given, selection);
  }
  apply(flags.fields, selection.problem);
  apply(options, selection.problem);
  apply_states(flags, selection.problem);
  apply_gate(flags, options, selection.problem);
  validate(selection.problem);
  return selection;
}

}  // namespace

void add_operator(CLI::App& verb, std::string& op) {
  verb.add_option("OP", op, fmt::format("operator: {}", fmt::join(operators(), ", ")));
}

void add_dtype(CLI::App& verb, std::string& dtype) {
  verb.add_option("--dtype", dtype, "bf16 (default), fp16 or fp32");
}

void add_selection(CLI::App& verb, SelectionFlags& flags, bool all_calls) {
  add_operator(verb, flags.op);
  verb.add_option("--preset", flags.preset,
                  all_calls ? "the calls of a model, such as qwen3-next-80b: first prefill, "
                              "continued prefill, training step, decoding; --pass and options "
                              "say which and how"
                            : "the call of a model, such as qwen3-next-80b, in its first prefill "
                              "(or of --pass): shape and options");
  verb.add_option("--shape", flags.shape,
                  "B=..,T=..,H=..,HV=..,K=..,V=.. (without them B=1, HV=H, V=K)");
  verb.add_option("--seqlens", flags.seqlens, "lengths of a packed batch, such as 5,0,77");
  verb.add_option("--tokens", flags.tokens,
                  fmt::format("T of a preset (default {}, {} for the recurrent pass)",
                              kDefaultTokens, kDecodedTokens));
  verb.add_option("--batch", flags.batch, "B of a preset (default 1)");
  add_dtype(verb, flags.dtype);
  flags.fields.add(verb, FieldOption::For::synthetic);
}

void add_pass(CLI::App& verb, std::optional<std::string>& pass, const std::string& otherwise) {
  verb.add_option("--pass", pass,
                  fmt::format("forward, backward or recurrent (default {})", otherwise));
}

void add_options(CLI::App& verb, OptionFlags& flags) { flags.add(verb, FieldOption::For::every); }

void FieldFlags::add(CLI::App& verb, FieldOption::For verbs) {
  for (const ProblemField& field : problem_fields()) {
    if (field.option.verbs != verbs) continue;
    std::string help(field.help);
    if (const std::string scope = scope_text(field.scope); !scope.empty()) help += "; " + scope;
    std::optional<std::string>& text = texts_[field.name];
    const std::string name(field.option.name);
    if (std::holds_alternative<bool Problem::*>(field.member))
      add_switch(verb, name, [&text](bool given) { text = given ? "true" : "false"; }, help);
    else
      verb.add_option(name, text, help);
  }
}

const std::string* FieldFlags::find(std::string_view field) const {
  const auto found = texts_.find(field);
  return found == texts_.end() || !found->second ? nullptr : &*found->second;
}

void FieldFlags::set(std::string_view field, const std::string& text) {
  texts_[problem_field(field).name] = text;
}

void add_device(CLI::App& verb, std::optional<std::string>& device) {
  verb.add_option("--device", device, "cpu or cuda:N (default: the first GPU, else the CPU)");
}

void require_operator(std::string_view op) {
  const auto all = operators();
  if (op.empty()) reject("OP is missing; it must be one of {}", nearest_names("", all));
  if (std::find(all.begin(), all.end(), op) == all.end())
    reject("OP is '{}'; it must be one of {}", op, nearest_names(op, all));
}

Problem parse_shape(std::string_view text, Problem base,
                    std::initializer_list<std::string_view> needed) {
  constexpr std::array<std::string_view, 6> kNames{"B", "T", "H", "HV", "K", "V"};
  std::map<std::string_view, std::int64_t> given;
  for (const std::string_view piece : split(text)) {
    const std::size_t equals = piece.find('=');
    const std::string_view name = piece.substr(0, equals);
    const auto value = equals == std::string_view::npos
                           ? std::nullopt
                           : number<std::int64_t>(piece.substr(equals + 1));
    if (!value || std::find(kNames.begin(), kNames.end(), name) == kNames.end())
      reject("--shape has the piece '{}'; it must be a list of NAME=INTEGER with the names {}",
             piece, fmt::join(kNames, ", "));
    const std::int64_t least = name == "T" || name == "B" ? 0 : 1;
    if (*value < least || *value > kMostTokens)
      reject("{} is {} in --shape; it must be an integer from {} to {}", name, *value, least,
             kMostTokens);
    if (!given.emplace(name, *value).second) reject("--shape names {} twice", name);
  }
  for (const std::string_view name : needed)
    if (!given.contains(name))
      reject("--shape is '{}' and lacks {}; it must give {}", text, name, fmt::join(needed, ", "));
  const auto get = [&](std::string_view name, std::int64_t otherwise) {
    const auto found = given.find(name);
    return found == given.end() ? otherwise : found->second;
  };
  base.B = base.N = get("B", base.B);
  base.T = get("T", base.T);
  base.H = get("H", base.H);
  base.HV = get("HV", given.contains("H") ? base.H : base.HV);
  base.K = get("K", base.K);
  base.V = get("V", given.contains("K") ? base.K : base.V);
  return base;
}

Problem problem_from_fields(const std::string& op, std::string_view text) {
  require_operator(op);
  std::map<std::string_view, std::string_view> given;
  for (const std::string_view piece : split(text)) {
    const std::size_t equals = piece.find('=');
    if (equals == std::string_view::npos)
      reject("--problem has the piece '{}'; it must be a list of FIELD=VALUE", piece);
    if (!given.emplace(piece.substr(0, equals), piece.substr(equals + 1)).second)
      reject("--problem names {} twice", piece.substr(0, equals));
  }
  Problem problem;
  std::vector<std::string_view> names;
  for (const ProblemField& field : problem_fields()) {
    names.push_back(field.name);
    const auto found = given.find(field.name);
    if (found != given.end() && field.name != "op")
      visit_field(field, problem, TextSetter{field.name, found->second});
  }
  for (const auto& [name, value] : given)
    if (name == "op" || std::find(names.begin(), names.end(), name) == names.end())
      reject("--problem names '{}'; it must name fields: {}", name,
             nearest_names(name, std::span(names).subspan(1)));
  problem.op = op;
  if (!given.contains("HV")) problem.HV = problem.H;
  if (!given.contains("V")) problem.V = problem.K;
  if (!given.contains("N") && !problem.packed) problem.N = problem.B;
  validate(problem);
  return problem;
}

void apply(const FieldFlags& flags, Problem& problem) {
  for (const ProblemField& field : problem_fields())
    if (const std::string* text = flags.find(field.name))
      visit_field(field, problem, FieldSetter{field.option, *text});
}

Selection select(const SelectionFlags& flags, const OptionFlags& options) {
  require_problem(flags);
  if (!flags.preset) return finished(flags, options, from_shape(flags));
  const Pass pass = given_pass(options).value_or(Pass::forward);
  const std::vector<PresetCall> calls = calls_of_preset(flags);
  const auto call = std::ranges::find_if(
      calls, [&](const PresetCall& each) { return each.problem.pass == pass; });
  return finished(flags, options, with_tokens(flags, call->problem, true));
}

std::vector<SelectedCall> select_calls(const SelectionFlags& flags, const OptionFlags& options,
                                       std::vector<LeftOutCall>& left_out) {
  require_problem(flags);
  if (!flags.preset) return {{"", select(flags, options)}};
  const std::optional<Pass> pass = given_pass(options);
  std::vector<SelectedCall> selected;
  std::optional<Error> refused;
  for (const PresetCall& call : calls_of_preset(flags)) {
    if (pass && call.problem.pass != *pass) continue;
    try {
      if (!pass && flags.seqlens && call.problem.pass == Pass::recurrent)
        reject("--seqlens is {}; the recurrent pass has it with --pass recurrent only",
               *flags.seqlens);
      Selection one = finished(flags, options, with_tokens(flags, call.problem, pass.has_value()));
      if (call.finish != nullptr) {
        const std::int64_t tokens = one.problem.T;
        call.finish(one.problem);
        // Steps may have become tokens.
        if (tokens > 0)
          for (std::int64_t& end : one.cu_seqlens) end = end * one.problem.T / tokens;
      }
      validate(one.problem);
      if (one.problem.packed && !flags.seqlens) one.cu_seqlens = assumed_lengths(one.problem);
      const std::string key = problem_key(one.problem).to_string();
      const auto same = [&](const SelectedCall& other) {
        return problem_key(other.selection.problem).to_string() == key;
      };
      if (std::ranges::none_of(selected, same)) selected.push_back({call.name, std::move(one)});
    } catch (const Error& error) {
      if (!refused) refused = error;
      left_out.push_back({call.name, error.what()});
    }
  }
  if (selected.empty()) throw *refused;
  return selected;
}

std::vector<std::string> run_options(const Problem& p) {
  const Problem plain;
  std::vector<std::string> options;
  for (const ProblemField& field : problem_fields()) {
    if (field.option.verbs != FieldOption::For::every) continue;
    std::string text = std::visit(
        [&](auto member) { return OptionWriter{field.option}(p.*member, plain.*member); },
        field.member);
    if (!text.empty()) options.push_back(std::move(text));
  }
  return options;
}

Device open_device(const std::optional<std::string>& name) {
  return name ? Device::open(*name) : Device::best();
}

std::string describe(const Problem& problem) {
  const std::string tokens = problem.packed
                                 ? fmt::format("T={} in {} sequences", problem.T, problem.N)
                                 : fmt::format("B={},T={}", problem.B, problem.T);
  const std::string pass =
      problem.pass == Pass::forward ? "" : fmt::format("{} ", to_string(problem.pass));
  const std::string steps =
      problem.num_householder == 1 ? "" : fmt::format(",n={}", problem.num_householder);
  return fmt::format("{}{},H={},HV={},K={},V={}{} {}", pass, tokens, problem.H, problem.HV,
                     problem.K, problem.V, steps, to_string(problem.dtype));
}

std::int64_t parse_integer(std::string_view option, std::string_view text, std::int64_t least,
                           std::int64_t most) {
  const auto value = number<std::int64_t>(text);
  if (!value || *value < least || *value > most)
    reject("{} is '{}'; it must be an integer from {} to {}", option, text, least, most);
  return *value;
}

std::uint64_t parse_seed(std::string_view text) {
  const auto value = number<std::uint64_t>(text);
  if (!value) reject("--seed is '{}'; it must be an integer from 0 to {}", text, UINT64_MAX);
  return *value;
}

float parse_float(std::string_view option, std::string_view text) {
  const auto value = number<float>(text);
  if (!value || !std::isfinite(*value))
    reject("{} is '{}'; it must be a finite number", option, text);
  return *value;
}

DType parse_element_type(std::string_view option, std::string_view text) {
  const auto type = parse_dtype(text);
  if (!type || !is_floating(*type) || is_float8(*type))
    reject("{} is '{}'; it must be one of bf16, fp16, fp32", option, text);
  return *type;
}

Pass parse_pass(std::string_view text) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent})
    if (text == to_string(pass)) return pass;
  reject("--pass is '{}'; it must be one of forward, backward, recurrent", text);
}

std::int64_t parse_bytes(std::string_view option, std::string_view text) {
  const std::size_t unit_at = std::min(text.find_first_not_of("0123456789"), text.size());
  const auto value = number<std::int64_t>(text.substr(0, unit_at));
  const std::string_view unit = text.substr(unit_at);
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (!value || shift < 0 || *value > (INT64_MAX >> shift))
    reject("{} is '{}'; it must be a size in bytes such as 500000000, 500M or 2G", option, text);
  return *value << shift;
}

double parse_seconds(std::string_view option, std::string_view text) {
  const std::size_t unit_at = std::min(text.find_first_not_of("0123456789."), text.size());
  const auto value = number<double>(text.substr(0, unit_at));
  const std::string_view unit = text.substr(unit_at);
  const double factor = unit == "ms"                  ? 1e-3
                        : unit == "s" || unit.empty() ? 1.0
                        : unit == "m"                 ? 60.0
                                                      : 0.0;
  if (!value || factor == 0.0 || !(*value > 0.0) || *value * factor > 1e6)
    reject("{} is '{}'; it must be a positive time such as 60s, 500ms or 2m", option, text);
  return *value * factor;
}

const std::string& require(const std::optional<std::string>& value, std::string_view option,
                           std::string_view what) {
  if (!value || value->empty()) reject("{} is missing; it must be {}", option, what);
  return *value;
}

}  // namespace wyvern::cli
