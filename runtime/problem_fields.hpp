// The table of Problem's fields, from which the key, distances, kernels' constants, JSON documents,
// the worker's protocol, the command's options and tests of bad input follow.
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
#include "templates/constants.hpp"

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

/// A field's piece of ProblemKey::family: "/initial_state=fp32".
struct FieldKey {
  int place = 0;                           ///< among the pieces, from 1; 0: the field has no piece
  std::string_view before = {};            ///< "/" or ","
  std::string_view name = {};              ///< "initial_state"
  bool (*when)(const Problem&) = nullptr;  ///< null: where is_set()
  /// Follows "name="; empty: the piece is the name. Null: the field's own value; nothing for a
  /// bool.
  std::string (*value)(const Problem&) = nullptr;
};

/// A value that validate() rejects.
struct FieldExample {
  /// Makes a valid problem (T = 8, all else at its default) one that is rejected for the field.
  void (*spoil)(Problem&) = nullptr;  ///< null: no value of the field is ever rejected
  std::string_view words = {};        ///< parts of the message in this order, by " .. "
};

struct ProblemField {
  using Member =
      std::variant<std::string Problem::*, Pass Problem::*, std::int64_t Problem::*,
                   bool Problem::*, DType Problem::*, std::optional<float> Problem::*,
                   std::optional<Precision> Problem::*, std::optional<Activation> Problem::*,
                   std::optional<DType> Problem::*, std::optional<std::int64_t> Problem::*>;

  std::string_view name;  ///< in Problem and in the worker's protocol
  Member member;          ///< its default is the one of a new Problem
  std::string_view help;  ///< one line, also the help of its option
  FieldScope scope = {};
  FieldOption option = {};
  FieldKey key = {};
  /// What a difference in the field's piece adds to tuning_distance(); unset: such problems share
  /// no plan.
  std::optional<double> distance = {};
  /// The field narrows the plans that a problem may have: a plan that was tuned without it may
  /// serve a problem with it. A plan that was tuned with it serves only problems of the same value.
  bool narrows = false;
  std::optional<AnyConstant> constant = {};  ///< that kernels see; its type is the field's or bool
  bool (*flag)(const Problem&) = nullptr;    ///< of a bool constant; null: is_set()
  FieldExample illegal = {};
  std::string_view shown_name = {};               ///< in documents; empty: name
  FieldValue (*shown)(const Problem&) = nullptr;  ///< in documents; null: the value itself
};

/// Every field, in the order of Problem.
std::span<const ProblemField> problem_fields();
/// The field of that name. Throws std::out_of_range.
const ProblemField& problem_field(std::string_view name);

/// Whether the field's value is not its default.
bool is_set(const ProblemField& field, const Problem& problem);

/// Sets the constants that fields name.
void set_constants(const Problem& problem, Constants& constants);

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
