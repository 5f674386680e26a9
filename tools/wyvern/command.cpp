#include "tools/wyvern/command.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <new>
#include <sstream>
#include <string_view>
#include <utility>

#include <unistd.h>

#include "runtime/base/nearest_names.hpp"
#include "tools/wyvern/output.hpp"

namespace wyvern::cli {
namespace {

struct Failure {
  std::string kind;
  std::string message;
  int exit_code;
};

Failure failure_of(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kBadInput: return {"input", error.what(), kBadUsage};
    case ErrorKind::kIo: return {"file", error.what(), kBadUsage};
    case ErrorKind::kUnavailable: return {"unavailable", error.what(), kFailed};
    case ErrorKind::kCompile: return {"compile", error.what(), kFailed};
  }
  return {"internal", error.what(), kFailed};
}

#define WYVERN_NO_MEMORY "there is not enough memory for this problem"

constexpr std::size_t kLongestMessage = 2000;  ///< bytes; a compiler's log may be longer

/// For people: names that came from a file or a command line do nothing to their terminal.
std::string readable(const Failure& failure) {
  return failure.kind == "compile" ? printable_lines(failure.message)
                                   : shortened(printable(failure.message), kLongestMessage);
}

/// A stderr or stdout that cannot be written does not change the exit code of the failure.
int report(const Failure& failure, bool json) {
  try {
    const std::string message = readable(failure);
    note(fmt::format("wyvern: {}\n", message));
    if (!json || std::ferror(stdout) != 0) return failure.exit_code;
    print_document(
        {{"error",
          {{"kind", failure.kind}, {"message", message}, {"exit_code", failure.exit_code}}}});
    flush_output();
  } catch (const std::exception&) {  // stderr cannot be written, so nothing can be reported
  }
  return failure.exit_code;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// A command line that does not parse must still answer in JSON when it asks for it.
bool asks_for_json(int argc, char** argv) {
  return argc > 1 && std::any_of(argv + 1, argv + argc,
                                 [](std::string_view argument) { return argument == "--json"; });
}

bool parse_switch(const std::string& name, std::string_view text) {
  constexpr std::array<std::string_view, 4> kTrue{"true", "1", "yes", "on"};
  constexpr std::array<std::string_view, 4> kFalse{"false", "0", "no", "off"};
  if (std::find(kTrue.begin(), kTrue.end(), text) != kTrue.end()) return true;
  if (std::find(kFalse.begin(), kFalse.end(), text) != kFalse.end()) return false;
  throw Error(ErrorKind::kBadInput,
              fmt::format("{} is '{}'; it must be true or false", name, text));
}

/// "cache gc": a verb, with its action.
std::string full_name(const CLI::App& app) {
  const CLI::App* parent = app.get_parent();
  const bool is_action = parent != nullptr && parent->get_parent() != nullptr;
  return is_action ? parent->get_name() + ' ' + app.get_name() : app.get_name();
}

/// "--input, --output": the verb's options that are nearest to the unknown argument.
std::string option_names(const CLI::App& app, std::string_view argument) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    names.push_back(option->get_positional() ? option->get_name(true) : option->get_name());
  return nearest_names(argument.substr(0, argument.find('=')), names);
}

/// Refuses the first remaining argument, or reports that it is missing.
[[noreturn]] void reject_name(std::string_view what, const std::vector<std::string>& rest,
                              const std::vector<std::string>& names) {
  throw Error(ErrorKind::kBadInput,
              fmt::format("{} is {}; it must be one of {}", what,
                          rest.empty() ? "missing" : fmt::format("'{}'", rest.front()),
                          nearest_names(rest.empty() ? "" : rest.front(), names)));
}

}  // namespace

Command::Command()
    : app_("Kernels for the chunked delta rule, compiled and tuned on this machine") {
  app_.name("wyvern");
  app_.set_version_flag("--version", "wyvern " WYVERN_VERSION);
  add_switch(app_, "--json", json_, "print one JSON document");
  app_.allow_extras();
}

void add_switch(CLI::App& verb, const std::string& name, std::function<void(bool)> set,
                const std::string& help) {
  // CLI11 has its own ideas of a flag's values (any number, "-", "enable") and answers others with
  // std::stoll's exception, so that the text is read here, before it converts anything.
  verb.add_flag(name, help)->each([name, set = std::move(set)](const std::string& text) {
    set(parse_switch(name, text));
  });
}

void add_switch(CLI::App& verb, const std::string& name, bool& value, const std::string& help) {
  add_switch(verb, name, [&value](bool given) { value = given; }, help);
}

CLI::App& Command::verb(const std::string& name, const std::string& description, Action action) {
  CLI::App* verb = app_.add_subcommand(name, description);
  verb->allow_extras();
  add_switch(*verb, "--json", json_, "print one JSON document");
  verbs_.emplace_back(verb, std::move(action));
  return *verb;
}

CLI::App& Command::action(CLI::App& verb, const std::string& name, const std::string& description,
                          Action action) {
  CLI::App* app = verb.add_subcommand(name, description);
  app->allow_extras();
  add_switch(*app, "--json", json_, "print one JSON document");
  actions_.emplace_back(app, std::move(action));
  return *app;
}

const CLI::App* Command::parsed_verb() const {
  for (const auto& [app, action] : verbs_)
    if (app->parsed()) return app;
  return nullptr;
}

void Command::reject_leftovers(const CLI::App& app) const {
  for (const CLI::Option* option : app.get_options())
    for (const std::string& value : option->results())
      if (value.starts_with("--"))
        throw Error(
            ErrorKind::kBadInput,
            fmt::format("{} has no value, the option '{}' follows it; see `wyvern {} --help`",
                        option->get_name(), value, full_name(app)));
  const std::vector<std::string> rest = app.remaining();
  if (rest.empty()) return;
  throw Error(
      ErrorKind::kBadInput,
      fmt::format("argument '{}' is not known; `wyvern {}` takes {}; see `wyvern {} --help`",
                  rest.front(), full_name(app), option_names(app, rest.front()), full_name(app)));
}

/// The action that was named behind the verb.
std::function<int()> Command::chosen_action(const CLI::App& verb) const {
  std::vector<std::string> names;
  const std::pair<CLI::App*, Action>* chosen = nullptr;
  for (const auto& one : actions_) {
    if (one.first->get_parent() != &verb) continue;
    names.push_back(one.first->get_name());
    if (one.first->parsed()) chosen = &one;
  }
  const std::vector<std::string> rest = verb.remaining();
  if (chosen == nullptr || !rest.empty()) reject_name("ACTION", rest, names);
  reject_leftovers(*chosen->first);
  return [this, action = chosen->second] { return action(json_); };
}

std::function<int()> Command::parse(int argc, char** argv) {
  const auto show = [](std::string text) {
    return [text = std::move(text)] {
      put(text);
      return static_cast<int>(kDone);
    };
  };
  // Now that the verbs are there: those that are added later would print it too.
  app_.footer(
      "A first example, on the first GPU or else the CPU:\n"
      "    wyvern example gated_delta_rule --shape T=1024,H=2,K=64 -o in.safetensors\n"
      "    wyvern run gated_delta_rule --input in.safetensors --output out.safetensors --verify\n"
      "    wyvern tune gated_delta_rule --shape T=1024,H=2,K=64 --budget 20s");
  if (argc <= 1) return show(app_.help());
  try {
    app_.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // help or the version
    std::ostringstream text;
    app_.exit(asked, text, text);
    return show(text.str());
  }
  std::vector<std::string> names;
  for (const auto& [app, action] : verbs_) names.push_back(app->get_name());
  if (parsed_verb() == nullptr || !app_.remaining().empty()) {
    reject_name("the verb", app_.remaining(), names);
  }
  const auto verb = std::ranges::find_if(verbs_, [](const auto& v) { return v.first->parsed(); });
  if (!verb->second) return chosen_action(*verb->first);
  reject_leftovers(*verb->first);
  return [this, action = verb->second] { return action(json_); };
}

int report_no_memory(int argc, char** argv) noexcept {
  // Straight to the descriptors: the streams may have no buffers yet.
  const auto print = [](int file, std::string_view text) {
    static_cast<void>(::write(file, text.data(), text.size()) < 0);
  };
  print(STDERR_FILENO, "wyvern: " WYVERN_NO_MEMORY "\n");
  if (asks_for_json(argc, argv))
    print(STDOUT_FILENO, "{\"error\": {\"kind\": \"memory\", \"message\": \"" WYVERN_NO_MEMORY
                         "\", \"exit_code\": 3}}\n");
  return kFailed;
}

int Command::run(int argc, char** argv) {
  const bool json = asks_for_json(argc, argv);
  try {
    const int code = parse(argc, argv)();
    flush_output();
    return code;
  } catch (const CLI::ParseError& error) {
    const CLI::App* verb = parsed_verb();
    return report({"usage",
                   one_line(fmt::format("{}; see `wyvern{} --help`", error.what(),
                                        verb != nullptr ? " " + verb->get_name() : "")),
                   kBadUsage},
                  json);
  } catch (const Error& error) {
    return report(failure_of(error), json);
  } catch (const std::bad_alloc&) {
    return report({"memory", WYVERN_NO_MEMORY, kFailed}, json);
  } catch (const std::exception& error) {
    return report({"internal", one_line(error.what()), kFailed}, json);
  }
}

}  // namespace wyvern::cli
