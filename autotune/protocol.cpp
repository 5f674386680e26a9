#include "autotune/protocol.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "runtime/plan.hpp"

namespace wyvern {
namespace {

using nlohmann::json;

template <class T>
json text_of(const T& value) {
  return std::string(to_string(value));
}

/// Visits every field of a Problem as (name, reference); `Object` is a Problem or a const one.
template <class Object, class Visitor>
void for_each_field(Object& p, const Visitor& visit) {
  visit("op", p.op), visit("pass", p.pass);
  visit("B", p.B), visit("T", p.T), visit("N", p.N);
  visit("H", p.H), visit("HV", p.HV), visit("K", p.K), visit("V", p.V);
  visit("packed", p.packed);
  visit("dtype", p.dtype), visit("beta_dtype", p.beta_dtype), visit("g_dtype", p.g_dtype);
  visit("state_dtype", p.state_dtype), visit("seqlens_dtype", p.seqlens_dtype);
  visit("scale", p.scale), visit("precision", p.precision), visit("lower_bound", p.lower_bound);
  visit("safe_gate", p.safe_gate), visit("has_A_log", p.has_A_log);
  visit("use_qk_l2norm", p.use_qk_l2norm);
  visit("use_gate_in_kernel", p.use_gate_in_kernel), visit("has_dt_bias", p.has_dt_bias);
  visit("use_beta_sigmoid", p.use_beta_sigmoid), visit("allow_neg_eigval", p.allow_neg_eigval);
  visit("initial_state", p.initial_state), visit("output_final_state", p.output_final_state);
  visit("state_v_first", p.state_v_first), visit("chunk_size", p.chunk_size);
  visit("disable_recompute", p.disable_recompute);
  visit("return_intermediate_states", p.return_intermediate_states);
  visit("inplace_state", p.inplace_state), visit("state_index", p.state_index);
  visit("state_slots", p.state_slots), visit("index_dtype", p.index_dtype);
}

struct Writer {
  json& out;
  void operator()(const char* name, DType value) const { out[name] = text_of(value); }
  void operator()(const char* name, const std::optional<Precision>& value) const {
    if (value) out[name] = text_of(*value);
  }
  void operator()(const char* name, Pass value) const { out[name] = text_of(value); }
  template <class T>
  void operator()(const char* name, const std::optional<T>& value) const {
    if (value) out[name] = *value;
  }
  template <class T>
  void operator()(const char* name, const T& value) const {
    out[name] = value;
  }
};

struct Reader {
  const json& in;
  void operator()(const char* name, DType& value) const {
    value = parse_dtype(in.at(name).get<std::string>()).value();
  }
  void operator()(const char* name, std::optional<Precision>& value) const {
    if (in.contains(name)) value = parse_precision(in.at(name).get<std::string>()).value();
  }
  void operator()(const char* name, Pass& value) const {
    const auto text = in.at(name).get<std::string>();
    constexpr std::array kPasses{Pass::forward, Pass::backward, Pass::recurrent};
    const auto found = std::find_if(kPasses.begin(), kPasses.end(),
                                    [&](Pass pass) { return text == to_string(pass); });
    if (found == kPasses.end()) throw std::bad_optional_access();
    value = *found;
  }
  template <class T>
  void operator()(const char* name, std::optional<T>& value) const {
    if (in.contains(name)) value = in.at(name).get<T>();
  }
  template <class T>
  void operator()(const char* name, T& value) const {
    in.at(name).get_to(value);
  }
};

}  // namespace

json to_json(const Problem& problem) {
  json out;
  for_each_field(problem, Writer{out});
  return out;
}

Problem problem_from(const json& in) {
  Problem problem;
  try {
    for_each_field(problem, Reader{in});
  } catch (const json::exception& error) {
    throw Error(ErrorKind::kBadInput, fmt::format("problem is {}: {}", in.dump(), error.what()));
  } catch (const std::bad_optional_access&) {
    throw Error(ErrorKind::kBadInput,
                fmt::format("problem is {}; its pass, dtypes and precision must be known names",
                            in.dump()));
  }
  return problem;
}

json to_json(const Plan& plan) { return json::parse(plan_to_json(plan)); }

Plan plan_from(const json& in) {
  if (const auto plan = plan_from_json(in.dump())) return *plan;
  throw Error(ErrorKind::kBadInput,
              fmt::format("plan is {}; it must list templates of this build", in.dump()));
}

}  // namespace wyvern
