// The command line: verbs, how one is added, and exit codes of errors.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace wyvern::cli {

/// Does a verb's work and returns the exit code; `json` asks for one JSON document on stdout.
using Action = std::function<int(bool json)>;

class Command {
 public:
  Command();

  /// Adds a verb. Its options are added to the returned App and bound to variables that `action`
  /// captures.
  CLI::App& verb(const std::string& name, const std::string& description, Action action);

  /// Returns a function that runs the verb and returns the exit code; call it while this lives.
  /// Throws CLI::ParseError or Error(kBadInput).
  std::function<int()> parse(int argc, char** argv);

  /// Adds an action to a verb, `wyvern VERB NAME`, with options of its own; the verb itself then
  /// does nothing.
  CLI::App& action(CLI::App& verb, const std::string& name, const std::string& description,
                   Action action);

  /// Parses and runs. Every failure ends here: one sentence on stderr, {"error": ...} on stdout
  /// with --json, and the exit code.
  int run(int argc, char** argv);

 private:
  const CLI::App* parsed_verb() const;
  void reject_leftovers(const CLI::App& app) const;
  std::function<int()> chosen_action(const CLI::App& verb) const;

  CLI::App app_;
  bool json_ = false;
  std::vector<std::pair<CLI::App*, Action>> verbs_, actions_;
};

/// Prints the error for exhausted memory without allocating; returns the exit code.
int report_no_memory(int argc, char** argv) noexcept;

/// A flag, which may also be given a value: --name=true or --name=false, nothing else.
void add_switch(CLI::App& verb, const std::string& name, std::function<void(bool)> set,
                const std::string& help);
void add_switch(CLI::App& verb, const std::string& name, bool& value, const std::string& help);

// The verbs, one file each.
void add_devices(Command& command);
void add_stages(Command& command);
void add_example(Command& command);
void add_run(Command& command);
void add_verify(Command& command);
void add_tune(Command& command);
void add_bench(Command& command);
void add_compile(Command& command);
void add_precompile(Command& command);
void add_cache(Command& command);
void add_report(Command& command);
void add_manual(Command& command);

// Actions of `wyvern cache` that have files of their own.
void add_cache_care(Command& command, CLI::App& cache);      // verify, gc, doctor
void add_cache_explain(Command& command, CLI::App& cache);   // explain
void add_cache_transfer(Command& command, CLI::App& cache);  // export, import, merge, diff

}  // namespace wyvern::cli
