#include <wyvern/device.hpp>
#include <wyvern/error.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cache/cache.hpp"
#include "cache/rows.hpp"
#include "cache/transfer.hpp"
#include "tools/wyvern/cache_rows.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/file.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {
namespace {

// ---- export, import, merge

struct ExportFlags {
  std::optional<std::string> output, device;
  bool all = false;
};

int export_rows(const ExportFlags& flags, bool json) {
  const std::string path = require(flags.output, "-o", "the file to write, such as h200.jsonl");
  const std::string device = flags.device ? Device::open(*flags.device).info().key : "";
  const std::string pack =
      with_cache([&](const Cache& cache) { return export_pack(cache, flags.all, device); });
  const PackRows rows = parse_pack(pack, path);
  write_file(path, std::array<std::string_view, 1>{pack});
  if (json)
    print_document({{"output", path},
                    {"devices", rows.devices},
                    {"winners", rows.winners.size()},
                    {"measurements", rows.measurements.size()},
                    {"bytes", pack.size()}});
  else
    say("{}: {}, {}, {}", path, count_text(std::ssize(rows.winners), "winner"),
        count_text(std::ssize(rows.measurements), "measurement"),
        bytes_text(static_cast<double>(pack.size())));
  return kDone;
}

Json to_json(const std::string& from, const Added& added) {
  return {{"from", from},
          {"artifacts", added.artifacts},
          {"measurements", added.measurements},
          {"winners", added.winners},
          {"known", added.known},
          {"damaged", added.damaged}};
}

void print_added(const std::vector<std::pair<std::string, Added>>& all, bool json) {
  Json document{{"added", Json::array()}};
  for (const auto& [from, added] : all) document["added"].push_back(to_json(from, added));
  if (json) {
    print_document(document);
    return;
  }
  for (const auto& [from, added] : all) {
    say("{}: added {}, {}, {}; known before: {}", from, count_text(added.artifacts, "artifact"),
        count_text(added.measurements, "measurement"), count_text(added.winners, "winner"),
        added.known);
    if (added.damaged != 0) say("left behind {}", count_text(added.damaged, "damaged artifact"));
  }
}

int import_rows(const std::string& file, bool json) {
  if (file.empty())
    throw Error(ErrorKind::kBadInput,
                "FILE is missing; it must be a pack that `cache export` wrote");
  const std::string text = read_text(file);
  print_added({{file, with_cache([&](Cache& cache) { return import_pack(cache, text, file); })}},
              json);
  return kDone;
}

int merge_caches(const std::vector<std::string>& others, bool json) {
  if (others.empty())
    throw Error(ErrorKind::kBadInput,
                "DB is missing; it must be the directory of a cache, or its wyvern.db");
  const std::vector<std::filesystem::path> paths(others.begin(), others.end());
  const std::vector<Added> added = with_cache([&](Cache& cache) { return merge(cache, paths); });
  std::vector<std::pair<std::string, Added>> all;
  for (std::size_t i = 0; i < others.size(); ++i) all.emplace_back(others[i], added[i]);
  print_added(all, json);
  return kDone;
}

// ---- diff

using WinnerKey = std::tuple<std::string, std::string>;  ///< device, problem

/// The rows that answer, by problem.
std::map<WinnerKey, WinnerRow> answers(const Contents& contents) {
  std::map<WinnerKey, WinnerRow> rows;
  for (const WinnerRow& row : contents.winners) {
    const auto [at, added] = rows.try_emplace({row.device, problem_of(row)}, row);
    // A pack may have several of a problem.
    if (!added && rank_of(row) < rank_of(at->second)) at->second = row;
  }
  return rows;
}

Json brief(const WinnerRow& row) {
  return {{"plan", parsed(row.plan)},
          {"ratio", rank_of(row)},
          {"median_us", row.median_us},
          {"driver", row.driver}};
}

template <class Row>
std::set<std::string> names_of(const std::vector<Row>& rows, std::string (*name)(const Row&)) {
  std::set<std::string> names;
  for (const Row& row : rows) names.insert(name(row));
  return names;
}

/// How many are in one alone, in the other alone, in both.
Json count(const std::set<std::string>& a, const std::set<std::string>& b) {
  const auto both = std::count_if(a.begin(), a.end(), [&](const auto& n) { return b.contains(n); });
  return {{"only_a", static_cast<std::int64_t>(a.size()) - both},
          {"only_b", static_cast<std::int64_t>(b.size()) - both},
          {"both", both}};
}

Json difference(const Contents& a, const Contents& b) {
  const auto in_a = answers(a), in_b = answers(b);
  std::set<WinnerKey> keys;
  for (const auto& [key, row] : in_a) keys.insert(key);
  for (const auto& [key, row] : in_b) keys.insert(key);
  Json winners = Json::array();
  std::int64_t same = 0;
  for (const WinnerKey& key : keys) {
    const auto x = in_a.find(key), y = in_b.find(key);
    const bool both = x != in_a.end() && y != in_b.end();
    if (both && parsed(x->second.plan) == parsed(y->second.plan)) {
      ++same;
      continue;
    }
    winners.push_back({{"device", std::get<0>(key)},
                       {"problem", std::get<1>(key)},
                       {"a", x == in_a.end() ? Json(nullptr) : brief(x->second)},
                       {"b", y == in_b.end() ? Json(nullptr) : brief(y->second)}});
  }
  const auto key_of = [](const ArtifactRow& row) { return row.key; };
  return {{"winners", std::move(winners)},
          {"same_plans", same},
          {"measurements", count(names_of<MeasurementRow>(a.measurements, digest_of),
                                 names_of<MeasurementRow>(b.measurements, digest_of))},
          {"artifacts", count(names_of<ArtifactRow>(a.artifacts, key_of),
                              names_of<ArtifactRow>(b.artifacts, key_of))}};
}

std::string plan_of(const Json& side) {
  if (side.is_null()) return "nothing";
  std::string text;
  for (const Json& step : side["plan"])
    text += fmt::format("{}{} {}", text.empty() ? "" : "; ", step.value("template", "?"),
                        step.value("config", "?"));
  return fmt::format("{:.3f} of the default: {}", side["ratio"].get<double>(), text);
}

int diff(const std::vector<std::string>& paths, bool json) {
  if (paths.size() != 2)
    throw Error(ErrorKind::kBadInput,
                "A and B must be two: caches' directories, databases or packs");
  const Json document = difference(read_contents(paths[0]), read_contents(paths[1]));
  if (json) {
    print_document(document);
    return kDone;
  }
  for (const Json& one : document["winners"]) {
    say("{}", one["problem"].get<std::string>());
    say("  on {}", device_text(one["device"].get<std::string>()));
    say("  A: {}", plan_of(one["a"]));
    say("  B: {}", plan_of(one["b"]));
  }
  say("{} with other plans, {} with the same",
      count_text(std::ssize(document["winners"]), "problem"),
      document["same_plans"].get<std::int64_t>());
  for (const char* kind : {"measurements", "artifacts"})
    say("{}: {} only in A, {} only in B, {} in both", kind,
        document[kind]["only_a"].get<std::int64_t>(), document[kind]["only_b"].get<std::int64_t>(),
        document[kind]["both"].get<std::int64_t>());
  return kDone;
}

}  // namespace

void add_cache_transfer(Command& command, CLI::App& cache) {
  const auto flags = std::make_shared<ExportFlags>();
  CLI::App& exported =
      command.action(cache, "export", "write the winners as a pack: text, a line each",
                     [flags](bool json) { return export_rows(*flags, json); });
  exported.add_option("-o,--output", flags->output, "the file to write");
  exported.add_option("--device", flags->device, "of cpu or cuda:N alone (default: of all)");
  add_switch(exported, "--all", flags->all, "measurements and superseded winners too");
  const auto file = std::make_shared<std::string>();
  CLI::App& imported = command.action(cache, "import", "add the rows of a pack",
                                      [file](bool json) { return import_rows(*file, json); });
  imported.add_option("FILE", *file, "a pack that `cache export` wrote");
  const auto others = std::make_shared<std::vector<std::string>>();
  CLI::App& merged = command.action(cache, "merge", "add everything of other caches",
                                    [others](bool json) { return merge_caches(*others, json); });
  merged.add_option("DB", *others, "directories of caches, or their wyvern.db");
  const auto paths = std::make_shared<std::vector<std::string>>();
  CLI::App& compared =
      command.action(cache, "diff", "problems that two caches or packs answer differently",
                     [paths](bool json) { return diff(*paths, json); });
  compared.add_option("PATHS", *paths, "A and B: directories of caches, databases or packs");
}

}  // namespace wyvern::cli
