// Problem's fields as one table, from which the key, JSON documents, the worker's protocol and the
// command's options are made.
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
    nothing,    ///< no option of its own: shapes, tensors or another option decide
    every,      ///< every verb that takes a problem
    synthetic,  ///< verbs that make a problem up; a file's tensors say it otherwise
  };
  std::string_view name = {};  ///< "--chunk-size"; "--no-..." says that something is not there
  For verbs = For::nothing;
  std::int64_t least = 0, most = std::numeric_limits<std::int64_t>::max();  ///< of an integer
};

/// The passes and operators for which a field means something.
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
  Member member;          ///< default: as in a new Problem
  std::string_view help;  ///< one line, of the option where there is one
  FieldScope scope = {};
  FieldOption option = {};
  /// Its place among the pieces of ProblemKey::family, from 1; 0: no piece of its own.
  int key_place = 0;
  /// Appends the piece, nothing where no plan depends on the value.
  void (*add_key)(const Problem&, std::string& key) = nullptr;
  std::string_view shown_name = {};               ///< in documents; empty: name
  FieldValue (*shown)(const Problem&) = nullptr;  ///< in documents; null: the value itself
};

/// Every field, in the order of Problem.
std::span<const ProblemField> problem_fields();
/// The field of that name. Throws std::out_of_range.
const ProblemField& problem_field(std::string_view name);

/// Whether the field means something for the operator and pass.
bool applies(const ProblemField& field, const OperatorFacts& op, Pass pass);
/// The scope that an option's help shows: "kda only", "recurrent only"; empty for one that means
/// something everywhere.
std::string scope_text(const FieldScope& scope);

/// The field's value as the command's --problem and the C API have it: "8192", "true", "bf16";
/// empty where it is unset.
std::string field_text(const ProblemField& field, const Problem& problem);

/// Calls visit(value) with a reference to the field's member; `problem` may be const.
template <class Object, class Visitor>
decltype(auto) visit_field(const ProblemField& field, Object& problem, const Visitor& visit) {
  return std::visit([&](auto member) -> decltype(auto) { return visit(problem.*member); },
                    field.member);
}

}  // namespace wyvern
