#include <wyvern/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <thread>

#include "cache/cache.hpp"
#include "cache/mutex.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/file.hpp"
#include "tools/wyvern/manifest.hpp"
#include "tools/wyvern/progress.hpp"
#include "tools/wyvern/tune.hpp"

namespace wyvern::cli {
namespace {

/// Cores of a GPU's tuning that do not compile: its worker, and the thread that asks it.
constexpr unsigned kCoresEach = 2;

std::vector<Device> devices_of(const TuneFlags& flags) {
  if (flags.device != "all") return {open_device(flags.device)};
  std::vector<Device> devices;
  for (const DeviceInfo& info : list_devices())
    if (info.cuda && info.problem.empty()) devices.push_back(Device::open(info.name));
  if (devices.empty())
    throw Error(ErrorKind::kUnavailable,
                "--device is all but no GPU can be used; `wyvern devices` says why, and --device "
                "cpu tunes for the processor");
  return devices;
}

/// A cache of its own for each of several shards, so that none waits for another's lock and a
/// network file system sees one writer a file.
std::shared_ptr<Cache> cache_of(const Shard& shard) {
  const std::filesystem::path directory = Cache::default_directory();
  if (shard.count == 1 || directory.empty()) return std::make_shared<Cache>();
  return std::make_shared<Cache>(directory /
                                 fmt::format("shard-{}-of-{}", shard.index, shard.count));
}

/// The problems of a shard, handed out to a thread for each device.
class Fleet {
 public:
  Fleet(std::vector<ManifestEntry> entries, TuneOptions options, std::shared_ptr<Cache> cache)
      : entries_(std::move(entries)),
        options_(std::move(options)),
        cache_(std::move(cache)),
        documents_(entries_.size()) {}

  void run(const std::vector<Device>& devices) {
    if (options_.jobs == 0 && devices.size() > 1) {
      const unsigned cores = std::max(std::thread::hardware_concurrency(), 1U);
      const auto count = static_cast<unsigned>(devices.size());
      options_.jobs = std::max(cores / count, kCoresEach + 1) - kCoresEach;
    }
    std::vector<std::thread> threads;
    for (const Device& device : devices) threads.emplace_back([this, &device] { work(device); });
    for (std::thread& thread : threads) thread.join();
  }

  const std::vector<Json>& documents() const { return documents_; }  ///< null: not begun
  bool failed() const { return failed_; }

 private:
  std::optional<std::size_t> take() WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    if (next_ == entries_.size() || StopOnInterrupt::asked()) return {};
    return next_++;
  }

  void work(const Device& device) {
    Runtime runtime({.cache = cache_, .plans = nullptr, .compile_jobs = options_.jobs});
    while (const auto at = take()) {
      const ManifestEntry& entry = entries_[*at];
      const Problem& problem = entry.selection.problem;
      Json document;
      bool failed = false;
      std::string note_text;
      try {
        const TuneResult result = tune(runtime, device, problem, options_);
        document = tune_document(device, problem, result, cache_->file().string());
        failed = result.interrupted;
        if (failed) document["error"] = "interrupted";
        note_text = failed ? "interrupted" : fmt::format("{:.3f} ms", result.tuned_us / 1e3);
      } catch (const Error& error) {
        failed = true;
        document = {{"operator", problem.op},
                    {"device", device.info().name},
                    {"problem", to_json(problem)},
                    {"error", error.what()}};
        note_text = error.what();
      }
      document["line"] = entry.line;
      finish(*at, std::move(document), failed,
             fmt::format("{} {} on {}: {}", problem.op, describe(problem), device.info().name,
                         note_text));
    }
  }

  void finish(std::size_t at, Json document, bool failed, const std::string& text)
      WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    documents_[at] = std::move(document);
    failed_ = failed_ || failed;
    ++done_;
    note(printable(fmt::format("tuned {} of {}: {}", done_, entries_.size(), text)) + '\n');
  }

  const std::vector<ManifestEntry> entries_;
  TuneOptions options_;
  std::shared_ptr<Cache> cache_;
  Mutex mutex_;
  std::size_t next_ WYVERN_GUARDED_BY(mutex_) = 0;
  std::size_t done_ WYVERN_GUARDED_BY(mutex_) = 0;
  std::vector<Json> documents_;  ///< each written once, read when all threads have ended
  bool failed_ = false;          ///< the same
};

void print_fleet(const std::vector<Json>& documents, const Cache& cache) {
  Table table({"line", "problem", "device", "tuned ms", "default ms"});
  const auto ms = [](const Json& document, const char* name) {
    return document.contains(name) ? fmt::format("{:.3f}", document[name].get<double>()) : "-";
  };
  for (const Json& document : documents)
    if (!document.is_null())
      table.row({document["line"].dump(), document["problem"]["key"].get<std::string>(),
                 document["device"].get<std::string>(), ms(document, "tuned_ms"),
                 ms(document, "default_ms")});
  put(table.text());
  for (const Json& document : documents)
    if (document.contains("error"))
      say("line {} failed: {}", document["line"].dump(), document["error"].get<std::string>());
  say("cache: {}", cache.file().string());
}

}  // namespace

int tune_manifest(const TuneFlags& flags, bool json) {
  const InputFile file(*flags.manifest);
  std::string text(file.bytes(), '\0');
  file.read(0, text.data(), text.size());
  std::vector<ManifestEntry> entries = parse_manifest(text);
  const std::size_t all = entries.size();
  const Shard shard = find_shard(flags.shard, [](const char* name) { return std::getenv(name); });
  std::erase_if(entries, [&](const ManifestEntry& entry) {
    return shard_of(entry.selection.problem, shard.count) != shard.index;
  });
  const std::vector<Device> devices = devices_of(flags);
  const std::shared_ptr<Cache> cache = cache_of(shard);
  const StopOnInterrupt on_interrupt;
  Fleet fleet(std::move(entries), tune_options(flags), cache);
  fleet.run(devices);
  Json tunings = Json::array(), names = Json::array();
  for (const Json& document : fleet.documents())
    if (!document.is_null()) tunings.push_back(document);
  for (const Device& device : devices) names.push_back(device.info().name);
  const bool whole = tunings.size() == fleet.documents().size();
  if (json)
    print_document({{"manifest", *flags.manifest},
                    {"problems", all},
                    {"shard", {{"index", shard.index}, {"count", shard.count}}},
                    {"devices", names},
                    {"tunings", tunings},
                    {"complete", whole && !fleet.failed()},
                    {"cache", cache->file().string()}});
  else
    print_fleet(fleet.documents(), *cache);
  return whole && !fleet.failed() ? kDone : kFailed;
}

}  // namespace wyvern::cli
