#include "autotune/protocol.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

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
  visit("op", p.op);
  visit("B", p.B), visit("T", p.T), visit("N", p.N);
  visit("H", p.H), visit("HV", p.HV), visit("K", p.K), visit("V", p.V);
  visit("packed", p.packed);
  visit("dtype", p.dtype), visit("beta_dtype", p.beta_dtype), visit("g_dtype", p.g_dtype);
  visit("state_dtype", p.state_dtype), visit("seqlens_dtype", p.seqlens_dtype);
  visit("scale", p.scale), visit("precision", p.precision), visit("lower_bound", p.lower_bound);
  visit("use_qk_l2norm", p.use_qk_l2norm);
  visit("use_gate_in_kernel", p.use_gate_in_kernel), visit("has_dt_bias", p.has_dt_bias);
  visit("use_beta_sigmoid", p.use_beta_sigmoid), visit("allow_neg_eigval", p.allow_neg_eigval);
  visit("initial_state", p.initial_state), visit("output_final_state", p.output_final_state);
  visit("state_v_first", p.state_v_first);
}

struct Writer {
  json& out;
  void operator()(const char* name, DType value) const { out[name] = text_of(value); }
  void operator()(const char* name, const std::optional<Precision>& value) const {
    if (value) out[name] = text_of(*value);
  }
  void operator()(const char* name, const std::optional<float>& value) const {
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
  void operator()(const char* name, std::optional<float>& value) const {
    if (in.contains(name)) value = in.at(name).get<float>();
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
  out["pass"] = text_of(problem.pass);
  return out;
}

Problem problem_from(const json& in) {
  Problem problem;
  try {
    for_each_field(problem, Reader{in});
    if (in.at("pass").get<std::string>() != to_string(problem.pass))
      throw Error(ErrorKind::kBadInput,
                  fmt::format("pass is {}; it must be {}", in.at("pass").dump(),
                              to_string(problem.pass)));
  } catch (const json::exception& error) {
    throw Error(ErrorKind::kBadInput, fmt::format("problem is {}: {}", in.dump(), error.what()));
  } catch (const std::bad_optional_access&) {
    throw Error(ErrorKind::kBadInput,
                fmt::format("problem is {}; its dtypes and precision must be known names",
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
