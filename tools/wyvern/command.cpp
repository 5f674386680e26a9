#include "tools/wyvern/command.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string_view>
#include <utility>

#include "tools/wyvern/output.hpp"

namespace wyvern::cli {
namespace {

struct Failure {
  std::string kind;
  std::string message;
  int exit_code;
};

Failure describe(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kBadInput: return {"input", error.what(), kBadUsage};
    case ErrorKind::kIo: return {"file", error.what(), kBadUsage};
    case ErrorKind::kUnavailable: return {"unavailable", error.what(), kFailed};
    case ErrorKind::kCompile: return {"compile", error.what(), kFailed};
  }
  return {"internal", error.what(), kFailed};
}

int report(const Failure& failure, bool json) {
  fmt::print(stderr, "wyvern: {}\n", failure.message);
  if (json)
    print_document({{"error",
                     {{"kind", failure.kind},
                      {"message", failure.message},
                      {"exit_code", failure.exit_code}}}});
  return failure.exit_code;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// "--input, --output": the options a verb takes.
std::string option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    names.push_back(option->get_positional() ? option->get_name(true) : option->get_name());
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

Command::Command()
    : app_("Kernels for the chunked delta rule, compiled and tuned on this machine") {
  app_.name("wyvern");
  app_.set_version_flag("--version", "wyvern " WYVERN_VERSION);
  app_.add_flag("--json", json_, "print one JSON document");
  app_.allow_extras();
}

CLI::App& Command::verb(const std::string& name, const std::string& description, Action action) {
  CLI::App* verb = app_.add_subcommand(name, description);
  verb->allow_extras();
  verb->add_flag("--json", json_, "print one JSON document");
  verbs_.emplace_back(verb, std::move(action));
  return *verb;
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
                        option->get_name(), value, app.get_name()));
  const std::vector<std::string> rest = app.remaining();
  if (rest.empty()) return;
  throw Error(ErrorKind::kBadInput, fmt::format("argument '{}' is not known; `wyvern {}` takes {}",
                                                rest.front(), app.get_name(), option_names(app)));
}

int Command::dispatch(int argc, char** argv) {
  app_.parse(argc, argv);
  std::vector<std::string> names;
  for (const auto& [app, action] : verbs_) names.push_back(app->get_name());
  if (parsed_verb() == nullptr || !app_.remaining().empty()) {
    const std::vector<std::string> rest = app_.remaining();
    const std::string given = rest.empty() ? "missing" : fmt::format("'{}'", rest.front());
    throw Error(ErrorKind::kBadInput,
                fmt::format("the verb is {}; it must be one of {}", given, fmt::join(names, ", ")));
  }
  for (const auto& [app, action] : verbs_) {
    if (!app->parsed()) continue;
    reject_leftovers(*app);
    return action(json_);
  }
  return kBadUsage;
}

int Command::run(int argc, char** argv) {
  // A command line that does not parse must still answer in JSON when it asks for it.
  const bool json = std::any_of(argv + 1, argv + argc,
                                [](std::string_view argument) { return argument == "--json"; });
  try {
    const int code = dispatch(argc, argv);
    if (std::fflush(stdout) != 0) throw Error(ErrorKind::kIo, "cannot write to standard output");
    return code;
  } catch (const CLI::Success& help) {
    return app_.exit(help);
  } catch (const CLI::ParseError& error) {
    const CLI::App* verb = parsed_verb();
    return report({"usage",
                   one_line(fmt::format("{}; see `wyvern{} --help`", error.what(),
                                        verb != nullptr ? " " + verb->get_name() : "")),
                   kBadUsage},
                  json);
  } catch (const Error& error) {
    return report(describe(error), json);
  } catch (const std::bad_alloc&) {
    return report({"memory", "there is not enough memory for this problem", kFailed}, json);
  } catch (const std::exception& error) {
    return report({"internal", one_line(error.what()), kFailed}, json);
  }
}

}  // namespace wyvern::cli
