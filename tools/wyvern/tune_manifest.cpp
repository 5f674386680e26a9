#include <wyvern/error.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <thread>

#include "cache/cache.hpp"
#include "runtime/base/mutex.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "runtime/plan_source.hpp"
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

/// Drops problems with an exact winner, tuned with the present driver.
void drop_known(std::vector<ManifestEntry>& entries, const Device& device,
                const std::shared_ptr<Cache>& cache) {
  CachePlanSource known(cache);
  std::erase_if(entries, [&](const ManifestEntry& entry) {
    const Problem& problem = entry.selection.problem;
    const auto choice = known.find(device.info(), problem_key(problem), [&](const Plan& plan) {
      return plan_problem(problem, plan, device.impl().target());
    });
    return choice && choice->origin == Origin::exact;
  });
}

/// The problems of a shard, handed out to a thread for each device.
class Fleet {
 public:
  /// `within_s`: no tuning is begun that would not end by then.
  Fleet(std::vector<ManifestEntry> entries, TuneOptions options, double within_s,
        std::shared_ptr<Cache> cache)
      : entries_(std::move(entries)),
        options_(std::move(options)),
        within_s_(within_s),
        cache_(std::move(cache)),
        documents_(entries_.size()) {}

  void run(const std::vector<Device>& devices) {
    threads_ = static_cast<double>(devices.size());
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
  const std::vector<ManifestEntry>& entries() const { return entries_; }
  bool failed() const { return failed_; }

 private:
  std::optional<std::size_t> take() WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    if (next_ == entries_.size() || StopOnInterrupt::asked()) return {};
    if (elapsed_s() + options_.budget.count() > within_s_) return {};
    return next_++;
  }

  double elapsed_s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  /// Called by a tuning that has so many seconds left.
  void show_progress(double left_s) WYVERN_EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    // As long as the problems before it took, at first its whole budget.
    const double each =
        done_ > 0 ? elapsed_s() * threads_ / static_cast<double>(done_) : options_.budget.count();
    left_s += each * static_cast<double>(entries_.size() - next_) / threads_;
    progress_.update(done_, entries_.size(), "", std::min(left_s, within_s_ - elapsed_s()));
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
        TuneOptions options = options_;
        options.cu_seqlens = entry.selection.cu_seqlens;
        options.progress = [this](const TuneProgress& now) { show_progress(now.remaining_s); };
        const TuneResult result = tune(runtime, device, problem, options);
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
      if (!entry.call.empty()) document["call"] = entry.call;
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
    progress_.clear();
    note(printable(fmt::format("tuned {} of {}: {}", done_, entries_.size(), text)) + '\n');
  }

  const std::vector<ManifestEntry> entries_;
  TuneOptions options_;
  const double within_s_;
  std::shared_ptr<Cache> cache_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double threads_ = 1;
  Mutex mutex_;
  Progress progress_ WYVERN_GUARDED_BY(mutex_){"tuning problems"};
  std::size_t next_ WYVERN_GUARDED_BY(mutex_) = 0;
  std::size_t done_ WYVERN_GUARDED_BY(mutex_) = 0;
  std::vector<Json> documents_;  ///< each written once, read when all threads have ended
  bool failed_ = false;          ///< the same
};

void print_fleet(const std::vector<Json>& documents, std::size_t known, const Cache& cache) {
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
  const auto left = std::ranges::count_if(documents, &Json::is_null);
  if (known > 0) say("known before: {}", count_text(static_cast<std::int64_t>(known), "problem"));
  if (left > 0)
    say("not begun: {}; the same command with --missing tunes them", count_text(left, "problem"));
  say("cache: {}", cache.file().string());
}

}  // namespace

int tune_manifest(const TuneFlags& flags, bool json) {
  const InputFile file(*flags.manifest);
  std::string text(file.bytes(), '\0');
  file.read(0, text.data(), text.size());
  auto [entries, left_out] = parse_manifest(text);
  const std::size_t all = entries.size();
  const Shard shard = find_shard(flags.shard, [](const char* name) { return std::getenv(name); });
  std::erase_if(entries, [&](const ManifestEntry& entry) {
    return shard_of(entry.selection.problem, shard.count) != shard.index;
  });
  const TuneOptions options = tune_options(flags);
  const double within_s = flags.within ? parse_seconds("--within", *flags.within)
                                       : std::numeric_limits<double>::infinity();
  if (within_s < options.budget.count())
    throw Error(ErrorKind::kBadInput,
                fmt::format("--within is {}, less than the --budget of one problem, {}",
                            *flags.within, flags.budget));
  const std::vector<Device> devices = devices_of(flags);
  const std::shared_ptr<Cache> cache = cache_of(shard);
  const std::size_t own = entries.size();
  if (flags.missing) drop_known(entries, devices.front(), cache);
  const std::size_t known = own - entries.size();
  const StopOnInterrupt on_interrupt;
  Fleet fleet(std::move(entries), options, within_s, cache);
  fleet.run(devices);
  Json tunings = Json::array(), rest = Json::array(), names = Json::array();
  for (std::size_t at = 0; at < fleet.entries().size(); ++at) {
    const ManifestEntry& entry = fleet.entries()[at];
    if (!fleet.documents()[at].is_null())
      tunings.push_back(fleet.documents()[at]);
    else
      rest.push_back({{"line", entry.line},
                      {"call", entry.call},
                      {"problem", to_json(entry.selection.problem)}});
  }
  Json illegal = Json::array();
  for (const LeftOutEntry& entry : left_out)
    for (Json& call : left_out_json(entry.calls)) {
      call["line"] = entry.line;
      illegal.push_back(std::move(call));
    }
  for (const Device& device : devices) names.push_back(device.info().name);
  const bool whole = tunings.size() == fleet.documents().size();
  if (json)
    print_document({{"manifest", *flags.manifest},
                    {"problems", all},
                    {"known", known},
                    {"shard", {{"index", shard.index}, {"count", shard.count}}},
                    {"devices", names},
                    {"tunings", tunings},
                    {"not_begun", rest},
                    {"left_out", illegal},
                    {"complete", whole && !fleet.failed()},
                    {"cache", cache->file().string()}});
  else {
    for (const LeftOutEntry& entry : left_out)
      say_left_out(fmt::format("line {}: ", entry.line), entry.calls);
    print_fleet(fleet.documents(), known, *cache);
  }
  return whole && !fleet.failed() ? kDone : kFailed;
}

}  // namespace wyvern::cli
