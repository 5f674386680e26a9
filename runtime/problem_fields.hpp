// The table of Problem's fields, from which the key, JSON documents, the worker's protocol and the
// command's options follow.
#pragma once

#include <wyvern/problem.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "runtime/operators/operator.hpp"

namespace wyvern {

/// A field's value in a document; monostate where it is unset.
using FieldValue = std::variant<std::monostate, bool, std::int64_t, float, std::string>;

/// An option of the command that sets a field.
struct FieldOption {
  enum class For : std::uint8_t {
    nothing,    ///< no option of its own: shapes, tensors or another option set the field
    every,      ///< every verb that takes a problem
    synthetic,  ///< verbs that generate a problem; elsewhere a file's tensors set the field
  };
  std::string_view name = {};  ///< "--chunk-size"; "--no-..." sets false
  For verbs = For::nothing;
  std::int64_t least = 0, most = std::numeric_limits<std::int64_t>::max();  ///< of an integer
};

/// The passes and operators that a field applies to.
struct FieldScope {
  std::uint8_t passes = 0b111;                  ///< bit i: Pass(i)
  bool (*has)(const OperatorFacts&) = nullptr;  ///< null: every operator
};

struct ProblemField {
  using Member =
      std::variant<std::string Problem::*, Pass Problem::*, std::int64_t Problem::*,
                   bool Problem::*, DType Problem::*, std::optional<float> Problem::*,
                   std::optional<Precision> Problem::*, std::optional<Activation> Problem::*,
                   std::optional<std::int64_t> Problem::*>;

  std::string_view name;  ///< in Problem and in the worker's protocol
  Member member;          ///< its default is that of a new Problem
  std::string_view help;  ///< one line, also the help of its option
  FieldScope scope = {};
  FieldOption option = {};
  /// Its position among the pieces of ProblemKey::family, from 1; 0: it has no piece.
  int key_place = 0;
  /// Appends the piece; appends nothing for a value that no plan depends on.
  void (*add_key)(const Problem&, std::string& key) = nullptr;
  std::string_view shown_name = {};               ///< in documents; empty: name
  FieldValue (*shown)(const Problem&) = nullptr;  ///< in documents; null: the value itself
};

/// Every field, in the order of Problem.
std::span<const ProblemField> problem_fields();
/// The field of that name. Throws std::out_of_range.
const ProblemField& problem_field(std::string_view name);

/// Whether the field applies to the operator and pass.
bool applies(const ProblemField& field, const OperatorFacts& op, Pass pass);
/// The scope in an option's help: "kda only", "recurrent only"; empty where the field applies
/// everywhere.
std::string scope_text(const FieldScope& scope);

/// The field's value as text, as in the command's --problem and the C API: "8192", "true", "bf16";
/// empty where it is unset.
std::string field_text(const ProblemField& field, const Problem& problem);

/// Calls visit(value) with a reference to the field's member; `problem` may be const.
template <class Object, class Visitor>
decltype(auto) visit_field(const ProblemField& field, Object& problem, const Visitor& visit) {
  return std::visit([&](auto member) -> decltype(auto) { return visit(problem.*member); },
                    field.member);
}

}  // namespace wyvern
