// The C API's problems: fields by their names, in the table of problem_fields.hpp.

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "runtime/base/nearest_names.hpp"
#include "runtime/c_api.hpp"
#include "runtime/problem_fields.hpp"

namespace wyvern {
namespace {

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {
  using Inner = T;
};

/// The type of a field's value where it is set.
template <class T>
constexpr wyvern_field_type type_of() {
  if constexpr (IsOptional<T>::value)
    return type_of<typename IsOptional<T>::Inner>();
  else if constexpr (std::is_same_v<T, bool>)
    return WYVERN_FIELD_BOOL;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return WYVERN_FIELD_INT;
  else if constexpr (std::is_same_v<T, float>)
    return WYVERN_FIELD_REAL;
  else
    return WYVERN_FIELD_TEXT;
}

std::string_view setter_of(wyvern_field_type type) {
  switch (type) {
    case WYVERN_FIELD_TEXT: return "wyvern_problem_set_text()";
    case WYVERN_FIELD_INT:
    case WYVERN_FIELD_BOOL: return "wyvern_problem_set_int()";
    case WYVERN_FIELD_REAL: return "wyvern_problem_set_real()";
  }
  return "?";
}

const ProblemField& field_of(const char* name) {
  const std::string_view wanted = &given(name, "field");
  std::vector<std::string_view> names;
  for (const ProblemField& field : problem_fields()) {
    if (field.name == wanted) return field;
    names.push_back(field.name);
  }
  bad_input(
      fmt::format("field is '{}'; it must be one of: {}", wanted, nearest_names(wanted, names)));
}

[[noreturn]] void bad_value(const ProblemField& field, const std::string& value,
                            std::string_view legal) {
  bad_input(fmt::format("{} is {}; it must be {}", field.name, value, legal));
}

template <class T>
[[noreturn]] void bad_type(const ProblemField& field, const std::string& value) {
  bad_value(field, value, fmt::format("set by {}", setter_of(type_of<T>())));
}

// set(member, field, value): one overload for each kind of member, and that for all others.

void set(bool& member, const ProblemField& field, std::int64_t value) {
  if (value != 0 && value != 1) bad_value(field, std::to_string(value), "0 or 1");
  member = value != 0;
}
void set(std::int64_t& member, const ProblemField& /*field*/, std::int64_t value) {
  member = value;
}
void set(std::optional<std::int64_t>& member, const ProblemField& /*field*/, std::int64_t value) {
  member = value;
}
template <class T>
void set(T& /*member*/, const ProblemField& field, std::int64_t value) {
  bad_type<T>(field, fmt::format("the integer {}", value));
}

void set(std::optional<float>& member, const ProblemField& field, double value) {
  if (std::isfinite(value) && std::fabs(value) > std::numeric_limits<float>::max())
    bad_value(field, fmt::format("{}", value), "in the range of fp32");
  member = static_cast<float>(value);
}
template <class T>
void set(T& /*member*/, const ProblemField& field, double value) {
  bad_type<T>(field, fmt::format("the number {}", value));
}

/// The one of `all` that is called so.
template <class T, std::size_t count>
T named(const ProblemField& field, std::string_view name, const std::array<T, count>& all) {
  std::vector<std::string_view> names;
  for (const T one : all) {
    if (to_string(one) == name) return one;
    names.push_back(to_string(one));
  }
  bad_value(field, fmt::format("'{}'", name),
            fmt::format("one of: {}", nearest_names(name, names)));
}

void set(std::string& member, const ProblemField& /*field*/, std::string_view value) {
  member = value;
}
void set(Pass& member, const ProblemField& field, std::string_view value) {
  member = named(field, value, std::array{Pass::forward, Pass::backward, Pass::recurrent});
}
constexpr std::array kNumbers{DType::fp32,  DType::fp16,        DType::bf16,       DType::int32,
                              DType::int64, DType::float8_e4m3, DType::float8_e5m2};
void set(DType& member, const ProblemField& field, std::string_view value) {
  member = named(field, value, kNumbers);
}
void set(std::optional<DType>& member, const ProblemField& field, std::string_view value) {
  member = named(field, value, kNumbers);
}
void set(std::optional<Precision>& member, const ProblemField& field, std::string_view value) {
  member = named(field, value, std::array{Precision::tf32, Precision::tf32x3, Precision::ieee});
}
void set(std::optional<Activation>& member, const ProblemField& field, std::string_view value) {
  member = named(field, value, std::array{Activation::silu, Activation::sigmoid, Activation::none});
}
template <class T>
void set(T& /*member*/, const ProblemField& field, std::string_view value) {
  bad_type<T>(field, fmt::format("the text '{}'", value));
}

template <class Value>
wyvern_status set_field(wyvern_problem* problem, const char* name, const Value& value) {
  return guarded([&] {
    Problem& own = given(problem, "problem").problem;
    const ProblemField& field = field_of(name);
    visit_field(field, own, [&](auto& member) { set(member, field, value); });
  });
}

/// The texts of a field's wyvern_field_info, which live forever.
struct FieldTexts {
  std::string name, help, scope, value;
  std::int32_t type = 0, may_be_unset = 0;
};

const std::vector<FieldTexts>& field_texts() {
  // Never destroyed: callers keep its texts.
  static const auto& all = *new std::vector<FieldTexts>([] {
    std::vector<FieldTexts> texts;
    const Problem defaults;
    for (const ProblemField& field : problem_fields())
      visit_field(field, defaults, [&]<class T>(const T& /*value*/) {
        texts.push_back({std::string(field.name), std::string(field.help), scope_text(field.scope),
                         field_text(field, defaults), type_of<T>(), IsOptional<T>::value ? 1 : 0});
      });
    return texts;
  }());
  return all;
}

/// The names of operators() with their NULs, to live forever.
const std::vector<std::string>& operator_names() {
  static const auto& names = *new std::vector<std::string>(operators().begin(), operators().end());
  return names;
}

}  // namespace
}  // namespace wyvern

using namespace wyvern;

size_t wyvern_field_count() { return problem_fields().size(); }

wyvern_status wyvern_field_get(size_t index, wyvern_field_info* info) {
  return guarded([&] {
    const std::vector<FieldTexts>& all = field_texts();
    if (index >= all.size())
      bad_input(fmt::format("index is {}; it must be below {}", index, all.size()));
    const FieldTexts& texts = all[index];
    write_info(wyvern_field_info{0, texts.name.c_str(), texts.help.c_str(), texts.scope.c_str(),
                                 texts.value.c_str(), texts.type, texts.may_be_unset},
               info, "info");
  });
}

size_t wyvern_operator_name_count() {
  size_t count = 0;
  (void)guarded([&] { count = operator_names().size(); });
  return count;
}

const char* wyvern_operator_name(size_t index) {
  const char* name = nullptr;
  (void)guarded([&] {
    if (index < operator_names().size()) name = operator_names()[index].c_str();
  });
  return name;
}

wyvern_status wyvern_problem_create(const char* op, wyvern_problem** problem) {
  return guarded([&] {
    given(problem, "problem") = nullptr;
    auto made = std::make_unique<wyvern_problem>();
    made->problem.op = &given(op, "op");
    (void)definition_of(made->problem);
    *problem = made.release();
  });
}

wyvern_status wyvern_problem_copy(const wyvern_problem* from, wyvern_problem** problem) {
  return guarded([&] {
    given(problem, "problem") = nullptr;
    *problem = new wyvern_problem(given(from, "from"));
  });
}

void wyvern_problem_destroy(wyvern_problem* problem) { delete problem; }

wyvern_status wyvern_problem_set_int(wyvern_problem* problem, const char* field, int64_t value) {
  return set_field(problem, field, value);
}

wyvern_status wyvern_problem_set_real(wyvern_problem* problem, const char* field, double value) {
  return set_field(problem, field, value);
}

wyvern_status wyvern_problem_set_text(wyvern_problem* problem, const char* field,
                                      const char* value) {
  if (value == nullptr) return failed(WYVERN_BAD_INPUT, "value is null; it must not be");
  return set_field(problem, field, std::string_view(value));
}

wyvern_status wyvern_problem_unset(wyvern_problem* problem, const char* field) {
  return guarded([&] {
    Problem& own = given(problem, "problem").problem;
    const ProblemField& found = field_of(field);
    visit_field(found, own, [&]<class T>(T& member) {
      if constexpr (IsOptional<T>::value)
        member.reset();
      else
        bad_value(found, "to be unset", "set: it has no default that the problem chooses");
    });
  });
}

wyvern_status wyvern_problem_get_text(const wyvern_problem* problem, const char* field, char* text,
                                      size_t capacity, size_t* length) {
  return guarded([&] {
    const Problem& own = given(problem, "problem").problem;
    write_text(field_text(field_of(field), own), text, capacity, length);
  });
}

wyvern_status wyvern_problem_validate(const wyvern_problem* problem) {
  return guarded([&] { validate(given(problem, "problem").problem); });
}

wyvern_status wyvern_problem_key(const wyvern_problem* problem, char* text, size_t capacity,
                                 size_t* length) {
  return guarded([&] {
    const Problem& own = given(problem, "problem").problem;
    validate(own);
    write_text(problem_key(own).to_string(), text, capacity, length);
  });
}

wyvern_status wyvern_problem_tensors(const wyvern_problem* problem, wyvern_tensor_spec* specs,
                                     size_t spec_size, size_t capacity, size_t* count) {
  return guarded([&] {
    const Problem& own = given(problem, "problem").problem;
    validate(own);
    write_specs(tensor_specs(own), specs, spec_size, capacity, count);
  });
}
