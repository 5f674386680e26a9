#include "tests/support/coverage.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/problem_fields.hpp"

namespace wyvern::testing {
namespace {

const char* list_path() { return std::getenv("WYVERN_TESTS_COVERAGE"); }

/// "NAME=VALUE" of each option that applies.
std::vector<std::string> options_of(const Problem& problem) {
  const OperatorFacts& facts = definition_of(problem).facts();
  std::vector<std::string> options;
  for (const ProblemField& field : problem_fields()) {
    if (!applies(field, facts, problem.pass)) continue;
    // Shapes are no options.
    if (std::holds_alternative<std::int64_t Problem::*>(field.member) ||
        std::holds_alternative<std::string Problem::*>(field.member))
      continue;
    options.push_back(fmt::format("{}={}", field.name, field_text(field, problem)));
  }
  return options;
}

}  // namespace

bool is_listing() { return list_path() != nullptr; }

bool is_only_listed(const Problem& problem, std::string_view template_id) {
  if (!is_listing()) return false;
  const std::string line = fmt::format("{}\t{}\t{}\t{}\n", problem.op, to_string(problem.pass),
                                       template_id, fmt::join(options_of(problem), "\t"));
  std::FILE* const file = std::fopen(list_path(), "a");
  if (file == nullptr) throw std::runtime_error("cannot write $WYVERN_TESTS_COVERAGE");
  std::fwrite(line.data(), 1, line.size(), file);  // in one go, by its end
  std::fclose(file);
  return true;
}

std::vector<std::string> template_pairs(const Problem& problem, std::string_view template_id) {
  std::vector<std::string> pairs{
      fmt::format("{} {} by {}", problem.op, to_string(problem.pass), template_id)};
  for (const std::string& option : options_of(problem))
    pairs.push_back(fmt::format("{} with {}", template_id, option));
  return pairs;
}

}  // namespace wyvern::testing
