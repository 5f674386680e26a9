#include "cache/packs.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <tuple>
#include <utility>

#include "cache/rows.hpp"
#include "cache/transfer.hpp"
#include "runtime/base/fork_guard.hpp"
#include "runtime/base/own_folder.hpp"
#include "runtime/base/printable.hpp"

namespace wyvern {
namespace {

namespace fs = std::filesystem;

/// The packs of a path, a file or a folder, in the order of their names.
std::vector<fs::path> packs_at(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.path().extension() == ".jsonl") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string_view first_line(std::string_view text) { return text.substr(0, text.find('\n')); }

/// Members of a winner's line that are most of its text and that no choice depends on.
constexpr std::array<std::string_view, 4> kPassedOver{
    R"("problem":)", R"("samples_us":)", R"("default_samples_us":)", R"("clocks_mhz":)"};

/// An object's text without the members kPassedOver, where only brackets are counted; a
/// text that ends before its object does as it is.
std::string abridged(std::string_view line) {
  std::string kept;
  std::size_t member = 0;  // where the one at hand begins
  int depth = 0;
  bool in_string = false, is_first = true;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '}' || c == ']') --depth;
    if (!kept.empty() && (depth == 0 || (depth == 1 && c == ','))) {
      const std::string_view text = line.substr(member, i - member);
      if (std::ranges::none_of(kPassedOver, [&](auto name) { return text.starts_with(name); })) {
        if (!is_first) kept += ',';
        kept += text;
        is_first = false;
      }
      member = i + 1;
      if (depth == 0) return kept.append(line.substr(i));
    }
    if ((c == '{' || c == '[') && ++depth == 1) {
      member = i + 1;
      kept = line.substr(0, member);
    }
  }
  return std::string(line);
}

bool precedes(const PackWinner& a, const PackWinner& b) {
  const auto key = [](const PackWinner& w) {
    return std::tie(w.layer, w.row.device, w.row.family, w.row.tokens, w.row.sequences);
  };
  if (key(a) != key(b)) return key(a) < key(b);
  if (const double x = rank_of(a.row), y = rank_of(b.row); x != y) return x < y;
  return std::tie(b.row.created, a.row.plan) < std::tie(a.row.created, b.row.plan);
}

}  // namespace

std::vector<PackLayer> Packs::default_layers() {
  std::vector<PackLayer> layers;
  layers.push_back({"WYVERN_PACKS", paths_of_variable("WYVERN_PACKS")});
  layers.push_back({"shipped", {}});
  if (fs::path folder = shared_folder("packs"); !folder.empty())
    layers.back().paths.push_back(std::move(folder));
  return layers;
}

std::shared_ptr<Packs> Packs::shared() {
  // Never destroyed: a runtime in a static object may ask at the end of the process.
  static const auto* const packs =
      new std::shared_ptr<Packs>(std::make_shared<Packs>(default_layers()));
  return *packs;
}

Packs::Packs(std::vector<PackLayer> layers, std::function<void(const std::string&)> report)
    : layers_(std::move(layers)), report_(report ? std::move(report) : warn) {}

Packs::Winners Packs::winners_of(std::string_view device, std::string_view family_prefix) {
  const std::string_view model = device_parts(device).model;
  const NoFork no_fork;
  const Lock lock(mutex_);
  auto own = devices_.find(model);
  if (own == devices_.end()) own = devices_.emplace(model, packs_of(model)).first;
  DevicePacks& packs = own->second;
  auto known = packs.families.find(family_prefix);
  if (known == packs.families.end())
    known = packs.families
                .emplace(family_prefix, std::make_shared<const std::vector<PackWinner>>(
                                            parse(packs, packs.model != model, family_prefix)))
                .first;
  return known->second;
}

Packs::DevicePacks Packs::packs_of(std::string_view model) {
  struct Named {
    File file;
    std::vector<std::string> devices;
  };
  std::vector<Named> all;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer)
    for (const fs::path& path : layers_[layer].paths)
      for (const fs::path& pack : packs_at(path)) {
        try {
          std::string text = read_text(pack);
          auto devices = pack_devices(first_line(text), pack.string());
          all.push_back({{layer, pack, std::move(text)}, std::move(devices)});
        } catch (const Error& error) {
          report_(fmt::format("{}, so this pack is passed over", error.what()));
        }
      }
  DevicePacks packs{std::string(model), {}, {}};
  double nearest = std::numeric_limits<double>::infinity();
  for (const Named& one : all)
    for (const std::string& device : one.devices) {
      const std::string_view named = device_parts(device).model;
      const auto apart = named == model ? std::optional(-1.0) : devices_apart(model, named);
      if (!apart || *apart >= nearest) continue;
      nearest = *apart;
      packs.model = named;
    }
  for (Named& one : all)
    if (std::ranges::any_of(one.devices, [&](const std::string& device) {
          return device_parts(device).model == packs.model;
        }))
      packs.files.push_back(std::move(one.file));
  return packs;
}

std::vector<PackWinner> Packs::parse(const DevicePacks& packs, bool stand_in,
                                     std::string_view family_prefix) {
  // Only lines with a text that begins so are worth parsing.
  std::string mark =
      nlohmann::json(family_prefix).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  mark.pop_back();
  std::vector<PackWinner> found;
  for (const File& file : packs.files) {
    std::size_t spoilt = 0;
    for (std::size_t at = file.text.find(mark); at != file.text.npos;) {
      const std::size_t before = file.text.rfind('\n', at);
      const std::size_t start = before == file.text.npos ? 0 : before + 1;
      const std::size_t end = std::min(file.text.find('\n', at), file.text.size());
      std::string problem;
      auto row =
          from_line(abridged(std::string_view(file.text).substr(start, end - start)), problem);
      auto* winner = row ? std::get_if<WinnerRow>(&*row) : nullptr;
      spoilt += !row;
      if (winner != nullptr && device_parts(winner->device).model == packs.model &&
          winner->family.starts_with(family_prefix))
        found.push_back({std::move(*winner), stand_in, file.layer, file.path});
      at = file.text.find(mark, end);
    }
    if (spoilt != 0)
      report_(fmt::format("{} has {} lines that are no rows, so they are passed over",
                          file.path.string(), spoilt));
  }
  std::ranges::sort(found, precedes);
  return found;
}

}  // namespace wyvern
