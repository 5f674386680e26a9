#include "tools/wyvern/manifest.hpp"

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <algorithm>
#include <charconv>
#include <set>

#include "runtime/base/json_text.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/reject.hpp"

namespace wyvern::cli {
namespace {

constexpr std::int64_t kMostShards = 1'000'000;

/// A value as an option's text: a list joined by commas, an object as NAME=VALUE pieces.
std::string option_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array() && !value.is_object()) return value.dump();
  std::string text;
  for (const auto& [name, item] : value.items())
    text += fmt::format("{}{}{}", text.empty() ? "" : ",",
                        value.is_object() ? name + "=" : std::string(), option_text(item));
  return text;
}

/// The calls of the line's object, as the command line would select them.
std::vector<SelectedCall> calls_of(const Json& line, std::vector<LeftOutCall>& left_out) {
  if (!line.is_object()) reject("it is no JSON object");
  if (line.contains("problem")) {
    if (line.size() != 2 || !line.contains("operator"))
      reject("it must have \"operator\" and \"problem\" alone where it has the latter");
    return {
        {"",
         {problem_from_fields(option_text(line["operator"]), option_text(line["problem"])), {}}}};
  }
  SelectionFlags selection;
  OptionFlags options;
  CLI::App app;
  add_selection(app, selection);
  add_options(app, options);
  std::vector<std::string> arguments;  // CLI11 takes the last first
  for (const auto& [name, value] : line.items()) {
    if (name == "operator") continue;
    std::string option = "--" + name;
    if (app.get_option_no_throw(option) == nullptr)
      std::replace(option.begin(), option.end(), '_', '-');
    if (app.get_option_no_throw(option) == nullptr || name == "help")
      reject("it has the name '{}', which no option selects a problem by", name);
    arguments.push_back(fmt::format("{}={}", option, option_text(value)));
  }
  if (!line.contains("operator")) reject("it lacks \"operator\"");
  arguments.push_back(option_text(line["operator"]));
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    reject("{}", error.what());
  }
  return select_calls(selection, options, left_out);
}

/// One spelling of a problem and its exact sizes.
std::string identity(const Problem& problem) {
  return fmt::format("{} B={} T={} N={}", problem_key(problem).to_string(), problem.B, problem.T,
                     problem.N);
}

std::int64_t integer_of(const char* name, std::string_view text) {
  std::int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0)
    reject("{} is '{}'; it must be a number from 0 on", name, text);
  return value;
}

}  // namespace

Manifest parse_manifest(std::string_view text) {
  Manifest manifest;
  std::set<std::string> seen;
  for (std::size_t line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view content = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (content.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      if (is_too_deep(content))
        reject("line {} of the manifest: its lists and objects are nested more than {} deep", line,
               kDeepestJson);
      std::vector<LeftOutCall> left_out;
      for (SelectedCall& call : calls_of(Json::parse(content), left_out))
        if (seen.insert(identity(call.selection.problem)).second)
          manifest.entries.push_back({line, std::move(call.name), std::move(call.selection)});
      if (!left_out.empty()) manifest.left_out.push_back({line, std::move(left_out)});
    } catch (const Json::exception& error) {
      reject("line {} of the manifest: {}", line, error.what());
    } catch (const Error& error) {
      reject("line {} of the manifest: {}", line, error.what());
    }
  }
  if (manifest.entries.empty()) reject("the manifest has no problem");
  return manifest;
}

Shard find_shard(const std::optional<std::string>& text,
                 const std::function<const char*(const char*)>& variable) {
  const auto number = [&](const char* name) -> std::optional<std::int64_t> {
    const char* const value = variable(name);
    if (value == nullptr || *value == '\0') return {};
    return integer_of(name, value);
  };
  const auto task = number("SLURM_ARRAY_TASK_ID");
  const auto index = task ? task : number("JOB_COMPLETION_INDEX");
  const char* const from = task ? "SLURM_ARRAY_TASK_ID" : "JOB_COMPLETION_INDEX";
  std::int64_t at = 0, count = 1;
  if (text) {
    const std::size_t slash = text->find('/');
    count = parse_integer("--shard", text->substr(slash == std::string::npos ? 0 : slash + 1), 1,
                          kMostShards);
    if (slash != std::string::npos)
      at = parse_integer("--shard", text->substr(0, slash), 0, kMostShards);
    else if (index)
      at = *index;
    else
      reject(
          "--shard is '{}'; it must be I/N where neither SLURM_ARRAY_TASK_ID nor "
          "JOB_COMPLETION_INDEX says which part this is",
          *text);
  } else if (task) {
    const std::int64_t step =
        std::max<std::int64_t>(number("SLURM_ARRAY_TASK_STEP").value_or(1), 1);
    at = (*task - number("SLURM_ARRAY_TASK_MIN").value_or(0)) / step;
    const auto tasks = number("SLURM_ARRAY_TASK_COUNT");
    if (!tasks)
      reject(
          "SLURM_ARRAY_TASK_ID is {} but SLURM_ARRAY_TASK_COUNT is not set; give "
          "--shard N",
          *task);
    count = *tasks;
  } else if (index) {
    reject("JOB_COMPLETION_INDEX is {} but nothing says of how many; give --shard N", *index);
  }
  if (at < 0 || at >= count)
    reject("the shard is {} of {}{}; it must be from 0 to {}", at, count,
           text && text->find('/') != std::string::npos ? "" : fmt::format(", by {}", from),
           count - 1);
  return {static_cast<std::size_t>(at), static_cast<std::size_t>(count)};
}

std::size_t shard_of(const Problem& problem, std::size_t count) {
  const std::string digest = sha256_hex(identity(problem)).substr(0, 15);
  std::uint64_t value = 0;
  std::from_chars(digest.data(), digest.data() + digest.size(), value, 16);
  return static_cast<std::size_t>(value % count);
}

}  // namespace wyvern::cli
