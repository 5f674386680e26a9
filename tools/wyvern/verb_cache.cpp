#include <wyvern/error.hpp>

#include <charconv>
#include <memory>
#include <optional>
#include <string>

#include "cache/cache.hpp"
#include "cache/rows.hpp"
#include "tools/wyvern/cache_rows.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/reject.hpp"

namespace wyvern::cli {
namespace {

constexpr std::size_t kShortKey = 12;  // hexadecimal digits that lists show of an artifact's key

int print_path(const Cache& cache, bool json) {
  const std::string path = cache.file().string();
  if (json)
    print_document({{"path", path}});
  else
    put(path + '\n');  // as it is: for a script
  return kDone;
}

std::string ms_text(double us) { return us > 0 ? fmt::format("{:.4f}", us / 1e3) : "-"; }

int print_list(const Cache& cache, bool json) {
  const auto winners = cache.list_winners();
  const auto measurements = cache.list_measurements();
  const auto artifacts = cache.list_artifacts();
  if (json) {
    Json document{
        {"winners", Json::array()}, {"measurements", Json::array()}, {"artifacts", Json::array()}};
    for (const auto& row : winners) document["winners"].push_back(to_json(row));
    for (const auto& row : measurements) document["measurements"].push_back(to_json(row));
    for (const auto& row : artifacts) document["artifacts"].push_back(to_json(row));
    print_document(document);
    return kDone;
  }
  if (winners.empty() && measurements.empty() && artifacts.empty()) {
    say("the cache is empty");
    return kDone;
  }
  Table table({"id", "what", "ms", "of", "status"});
  for (const auto& row : winners)
    table.row({fmt::format("w{}", row.id), "winner", ms_text(row.median_us), problem_of(row),
               device_text(row.device)});
  for (const auto& row : measurements)
    table.row({fmt::format("m{}", row.id), "measurement", ms_text(row.median_us),
               fmt::format("{} {}", row.template_id, row.config), row.status});
  for (const auto& row : artifacts)
    table.row({row.key.substr(0, kShortKey), "artifact", fmt::format("{:.0f}", row.compile_ms),
               fmt::format("{} {}", row.template_id, row.config), row.target});
  put(table.text());
  return kDone;
}

/// The row's number of an id such as w12.
std::optional<std::int64_t> row_number(const std::string& id, char kind) {
  std::int64_t number = 0;
  if (id.size() < 2 || id[0] != kind) return {};
  const auto [end, error] = std::from_chars(id.data() + 1, id.data() + id.size(), number);
  if (error != std::errc{} || end != id.data() + id.size()) return {};
  return number;
}

Json show_artifact(const Cache& cache, const std::string& id) {
  std::vector<std::string> keys;
  for (const auto& row : cache.list_artifacts())
    if (!id.empty() && row.key.starts_with(id)) keys.push_back(row.key);
  if (keys.size() > 1)
    reject("ID is '{}', the beginning of {} artifacts; give more of its digits", id, keys.size());
  const auto row = keys.empty() ? std::nullopt : cache.find_artifact(keys.front());
  if (!row) reject("ID is '{}'; `wyvern cache list` shows the existing ones", id);
  Json document = to_json(*row);
  document["code_bytes"] = row->code.size();
  document["metadata"] = parsed(row->metadata);
  return document;
}

Json show(const Cache& cache, const std::string& id) {
  if (id.empty()) reject("ID is missing; `wyvern cache list` shows them");
  if (const auto number = row_number(id, 'w'))
    for (const auto& row : cache.list_winners())
      if (row.id == *number) {
        Json document = to_json(row);
        document["driver"] = row.driver;
        document["ratio"] = rank_of(row);
        document["floor_us"] = row.floor_us;
        document["round"] = row.round;
        document["samples_us"] = row.samples_us;
        document["default_samples_us"] = row.default_samples_us;
        document["clocks_mhz"] = row.clocks_mhz;
        document["setting"] = to_json(row.setting);
        return document;
      }
  if (const auto number = row_number(id, 'm'))
    for (const auto& row : cache.list_measurements())
      if (row.id == *number) {
        Json document = to_json(row);
        document["detail"] = row.detail;
        document["samples_us"] = row.samples_us;
        document["error"] = row.error;
        document["artifact"] = row.artifact_key;
        document["driver"] = row.driver;
        document["clocks_mhz"] = row.clocks_mhz;
        document["setting"] = to_json(row.setting);
        return document;
      }
  return show_artifact(cache, id);
}

/// The fields of a document, one a line.
int print_fields(const Json& document, bool json) {
  if (json) {
    print_document(document);
    return kDone;
  }
  Table table({"field", "value"});
  for (const auto& [name, value] : document.items())
    table.row({name, value.is_string() ? value.get<std::string>() : value.dump()});
  put(table.text());
  return kDone;
}

Json stats(const Cache& cache) {
  const CacheStats s = cache.stats();
  return {{"path", cache.file().string()},  {"artifacts", s.artifacts},
          {"measurements", s.measurements}, {"winners", s.winners},
          {"code_bytes", s.code_bytes},     {"file_bytes", s.file_bytes},
          {"status", cache.status()}};
}

int clear(Cache& cache, bool json) {
  if (!cache.clear())
    throw Error(ErrorKind::kIo, fmt::format("the cache {} could not be cleared: {}",
                                            cache.file().string(), cache.status()));
  if (json)
    print_document({{"cleared", cache.file().string()}});
  else
    say("cleared {}", cache.file().string());
  return kDone;
}

}  // namespace

void add_cache(Command& command) {
  CLI::App& verb =
      command.verb("cache", "stored kernels, measurements and winners, here and in packs", nullptr);
  command.action(verb, "path", "where the cache lies",
                 [](bool json) { return print_path(Cache(), json); });
  command.action(verb, "list", "everything in it, newest first",
                 [](bool json) { return print_list(Cache(), json); });
  const auto id = std::make_shared<std::string>();
  CLI::App& shown = command.action(verb, "show", "one row of it", [id](bool json) {
    return print_fields(show(Cache(), *id), json);
  });
  shown.add_option("ID", *id, "the row to show, as list prints it");
  command.action(verb, "stats", "how much it holds",
                 [](bool json) { return print_fields(stats(Cache()), json); });
  command.action(verb, "clear", "delete everything", [](bool json) {
    return with_cache([json](Cache& cache) { return clear(cache, json); });
  });
  add_cache_care(command, verb);
  add_cache_explain(command, verb);
  add_cache_transfer(command, verb);
}

}  // namespace wyvern::cli
