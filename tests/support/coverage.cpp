#include "tests/support/coverage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
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

/// What meets in a trial, as coverage.py counts it.
std::vector<std::string> pairs_of(const Problem& problem, std::string_view template_id) {
  const std::string pass = fmt::format("{} {}", problem.op, to_string(problem.pass));
  std::vector<std::string> pairs{fmt::format("{} by {}", pass, template_id)};
  for (const std::string& option : options_of(problem)) {
    pairs.push_back(fmt::format("{} with {}", pass, option));
    pairs.push_back(fmt::format("{} with {}", template_id, option));
  }
  return pairs;
}

struct Met {
  std::mutex mutex;
  std::set<std::string> pairs;
};
Met& met() {
  static Met all;
  return all;
}

}  // namespace

bool is_listing() { return list_path() != nullptr; }

bool is_only_listed(const Problem& problem, std::string_view template_id) {
  {
    const std::lock_guard lock(met().mutex);
    for (std::string& pair : pairs_of(problem, template_id)) met().pairs.insert(std::move(pair));
  }
  if (!is_listing()) return false;
  const std::string line = fmt::format("{}\t{}\t{}\t{}\n", problem.op, to_string(problem.pass),
                                       template_id, fmt::join(options_of(problem), "\t"));
  std::FILE* const file = std::fopen(list_path(), "a");
  if (file == nullptr) throw std::runtime_error("cannot write $WYVERN_TESTS_COVERAGE");
  std::fwrite(line.data(), 1, line.size(), file);  // in one go, by its end
  std::fclose(file);
  return true;
}

bool is_new(const Problem& problem, std::string_view template_id) {
  const std::vector<std::string> pairs = pairs_of(problem, template_id);
  const std::lock_guard lock(met().mutex);
  return !std::ranges::all_of(pairs,
                              [](const std::string& pair) { return met().pairs.contains(pair); });
}

}  // namespace wyvern::testing
