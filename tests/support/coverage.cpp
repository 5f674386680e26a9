#include "tests/support/coverage.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "runtime/problem_fields.hpp"

namespace wyvern::testing {

void note_tried(const Problem& problem, std::string_view template_id) {
  const char* const path = std::getenv("WYVERN_TESTS_COVERAGE");
  if (path == nullptr) return;
  const OperatorFacts& facts = definition_of(problem).facts();
  std::string line = fmt::format("{}\t{}\t{}", problem.op, to_string(problem.pass), template_id);
  for (const ProblemField& field : problem_fields()) {
    if (!applies(field, facts, problem.pass)) continue;
    // Shapes are no options.
    if (std::holds_alternative<std::int64_t Problem::*>(field.member) ||
        std::holds_alternative<std::string Problem::*>(field.member))
      continue;
    line += fmt::format("\t{}={}", field.name, field_text(field, problem));
  }
  line += '\n';
  std::FILE* const file = std::fopen(path, "a");
  if (file == nullptr) return;
  std::fwrite(line.data(), 1, line.size(), file);  // in one go, by its end
  std::fclose(file);
}

}  // namespace wyvern::testing
