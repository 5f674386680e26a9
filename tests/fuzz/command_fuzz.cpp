// Any arguments, one a line, as those of the command. Every verb's options are parsed and nothing
// is done: accepted, or refused as bad usage. A verb of this file's own makes a problem of them as
// tune and bench do; such a problem is legal, and the options that are shown for it give it again.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/Error.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "autotune/protocol.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::fuzz {
namespace {

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words{"wyvern"};
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    // The system hands over no argument with a zero byte in it.
    words.emplace_back(std::string(text.substr(at, end - at)).c_str());
    at = end + 1;
  }
  return words;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

void parse_only(std::vector<std::string> words) {
  cli::Command command;
  cli::add_devices(command);
  cli::add_stages(command);
  cli::add_example(command);
  cli::add_run(command);
  cli::add_verify(command);
  cli::add_tune(command);
  cli::add_bench(command);
  cli::add_compile(command);
  cli::add_cache(command);
  try {
    const bool parsed = accepts([&] {
      require(command.parse(static_cast<int>(words.size()), pointers(words).data()) != nullptr,
              "arguments that parse ask for something");
    });
    static_cast<void>(parsed);
  } catch (const CLI::ParseError& error) {
    require(!std::string_view(error.what()).empty(), "an error of usage says something");
  }
}

/// run_options() of a problem, laid over one without options, give the problem.
void check_options(const Problem& problem) {
  Problem again = problem;
  const Problem plain;
  for (const ProblemField& field : problem_fields())
    if (field.option.verbs == FieldOption::For::every)
      std::visit([&](auto member) { again.*member = plain.*member; }, field.member);
  CLI::App app;
  cli::OptionFlags options;
  cli::add_options(app, options);
  app.parse(fmt::format("{}", fmt::join(cli::run_options(problem), " ")));
  cli::apply(options, again);
  require(wyvern::to_json(again) == wyvern::to_json(problem), "shown options give the problem");
}

void select(std::vector<std::string> words) {
  if (words.size() < 2) return;
  words[1] = "select";
  struct Flags {
    cli::SelectionFlags selection;
    cli::OptionFlags options;
    std::string budget = "60s", seed = "0", count = "0";
  } flags;
  cli::Command command;
  CLI::App& verb = command.verb("select", "", [&](bool json) {
    const cli::Selection selection = cli::select(flags.selection, flags.options);
    validate(selection.problem);
    check_options(selection.problem);
    require(cli::parse_seconds("--budget", flags.budget) > 0, "a budget is a time");
    (void)cli::parse_seed(flags.seed);
    require(cli::parse_integer("--count", flags.count, 0, 1000) <= 1000, "a count has a limit");
    if (json) cli::print_document({{"problem", cli::describe(selection.problem)}});
    return static_cast<int>(cli::kDone);
  });
  cli::add_selection(verb, flags.selection);
  cli::add_options(verb, flags.options);
  verb.add_option("--budget", flags.budget);
  verb.add_option("--seed", flags.seed);
  verb.add_option("--count", flags.count);
  const int code = command.run(static_cast<int>(words.size()), pointers(words).data());
  require(code == cli::kDone || code == cli::kBadUsage, "arguments are accepted or bad usage");
}

}  // namespace
}  // namespace wyvern::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace wyvern::fuzz;
  const std::vector<std::string> words = words_of(text_of(data, size));
  parse_only(words);
  select(words);
  return 0;
}
