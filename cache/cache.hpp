// The cache: one SQLite file of compiled artifacts, measurements and winners.
//
// It never fails its caller: when the file cannot be read, locked, written, or is newer than this
// program, every call degrades to "nothing found" or "not stored", status() says why in one
// sentence, and no call throws. Thread-safe; any number of processes may use one file at once. A
// connection is never carried across fork(): the child sees a degraded cache that reopens on first
// use.
#pragma once

#include <wyvern/export.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern WYVERN_API {

/// A compiled kernel as stored: opaque code and a JSON text that describes it.
struct ArtifactRow {
  std::string key;          ///< primary key: SHA-256 of everything that the code depends on
  std::string template_id;  ///< "fwd_h.portable"
  std::string target;       ///< "sm_90a"
  std::string config;       ///< "BT=64,num_warps=4"
  std::string metadata;     ///< JSON: constants, entry point, resources
  std::string code;         ///< blob
  double compile_ms = 0;
  std::string created;  ///< UTC, ISO 8601; filled in by the cache
};

/// The conditions of a measurement. Empty and 0: not known, as in rows older than these members.
struct Setting {
  std::int64_t B = 0, T = 0, N = 0;   ///< exact, where keys may hold buckets
  std::vector<std::int64_t> lengths;  ///< of a packed batch's sequences; empty: T each
  std::string host;
  std::string unit;             ///< the GPU's UUID: "GPU-1b2c..."
  double clock_mhz = 0;         ///< of its multiprocessors while measuring, median
  double memory_clock_mhz = 0;  ///< the same of its memory
  double power_limit_w = 0;
  std::string regime;  ///< how samples were taken: "cold, 4 launches a sample"
};

/// One (template, config) measured once for a problem on a device. A config may have any number of
/// them: of other extents, hosts, drivers, kernels, days.
struct MeasurementRow {
  std::int64_t id = 0;  ///< filled in by the cache
  std::string device;   ///< device key: model, multiprocessors, clocks, memory
  std::string problem;  ///< problem key
  std::string template_id;
  std::string config;
  std::string artifact_key;
  std::string driver;  ///< the driver's own version; another one makes the row stale, not absent
  std::string status;  ///< "ok", "wrong", "crashed", "timeout", "rejected", "illegal", "failed"
  std::string detail;  ///< one sentence for a status other than "ok"
  std::vector<double> samples_us;
  std::vector<double> clocks_mhz;  ///< of the multiprocessors at each sample, where watched
  double median_us = 0;
  double error = 0;  ///< largest rms(x - ref) / rms(ref) over the outputs, of its check
  Setting setting;
  std::string created;  ///< UTC, ISO 8601; filled in by the cache where it is empty
};

/// The best known plan of a problem on a device, derived from its measurements.
struct WinnerRow {
  std::int64_t id = 0;
  std::string device;
  std::string family;          ///< problem key less its extents
  std::int64_t tokens = 0;     ///< B T, as the problem key has it
  std::int64_t sequences = 0;  ///< N, as the problem key has it
  std::string plan;            ///< JSON: [{"template": id, "config": "..."}...], in order
  double median_us = 0;        ///< the whole operator, measured
  double default_us = 0;       ///< the default plan in the same run; 0: it did not run
  double ratio = 0;            ///< plan / default, median over samples taken in turn; 0: not known,
                               ///< or to be found by store_winner() from the samples
  double floor_us = 0;         ///< the least time on the device; 0: not known
  std::vector<double> samples_us, default_samples_us;  ///< in turn: equal indices are neighbours
  std::vector<double> clocks_mhz;  ///< of the multiprocessors at each of samples_us, where watched
  std::string driver;
  /// How many tunings of the problem came before this one and were known to it; filled in by
  /// store_winner().
  std::int64_t round = 0;
  std::string problem;  ///< the Problem as JSON, empty where it is not known
  Setting setting;
  std::string created;  ///< as in MeasurementRow
};

struct CacheStats {
  std::int64_t artifacts = 0, measurements = 0, winners = 0;
  std::int64_t code_bytes = 0;  ///< sum of blob sizes
  std::int64_t file_bytes = 0;
};

/// The right to compile an artifact, which one holder at a time has among all processes that use
/// the file. It ends with this object, or with its process.
class [[nodiscard]] ArtifactClaim {
 public:
  ArtifactClaim(ArtifactClaim&& other) noexcept;
  ArtifactClaim& operator=(ArtifactClaim&& other) noexcept;
  ~ArtifactClaim();
  /// Whether another holder had it at first.
  [[nodiscard]] bool waited() const noexcept { return waited_; }
  /// Whether another holder still had it when the caller gave up.
  [[nodiscard]] bool in_vain() const noexcept { return in_vain_; }
  /// How long the caller slept in all while another holder had it.
  [[nodiscard]] std::chrono::milliseconds slept() const noexcept { return slept_; }

 private:
  friend class Cache;
  ArtifactClaim() = default;
  int descriptor_ = -1;  ///< of the locked file; -1: of nothing
  bool waited_ = false;
  bool in_vain_ = false;
  std::chrono::milliseconds slept_{0};
};

class Cache {
 public:
  /// $WYVERN_CACHE_DIR, else $XDG_CACHE_HOME/wyvern, else ~/.cache/wyvern; empty if none is set,
  /// and in a program that runs with more rights than its caller.
  [[nodiscard]] static std::filesystem::path default_directory();

  /// Opens (creating directory, mode 0700, and file, mode 0600, as needed) `directory`/wyvern.db.
  /// A directory or file that others than this user and root may have written is not used.
  explicit Cache(const std::filesystem::path& directory = default_directory());
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  /// A number that grows whenever a cache of this process was written to, and with note_change():
  /// while it is the same, an earlier look-up's answer still holds as far as this process knows.
  /// Takes no lock.
  [[nodiscard]] static std::uint64_t changes() noexcept;
  /// Says that another process has written, such as one that this one had tune a problem.
  static void note_change() noexcept;

  [[nodiscard]] std::filesystem::path file() const;
  /// Empty while the cache works in full; else one sentence: what is wrong, what still works, and
  /// how to fix it.
  [[nodiscard]] std::string status() const;
  /// Called once, on the first degradation, from the thread that met it. Default: a line on stderr.
  void on_degraded(std::function<void(const std::string&)> report);

  /// A row that has changed since it was stored under this key, by its digest, counts as missing.
  [[nodiscard]] std::optional<ArtifactRow> find_artifact(std::string_view key) const;
  /// False when it was not stored. An existing row with the key is replaced.
  bool store_artifact(const ArtifactRow& row);
  /// Waits while another process holds the claim to this key, at most until `give_up`, then
  /// continues without it: the holder may be stopped, and compiling twice is better than waiting.
  /// Without locks it continues at once. Look the artifact up (again) once you hold the claim. To
  /// hold several, claim in the order of the keys, so that there is no deadlock.
  [[nodiscard]] ArtifactClaim claim_artifact(std::string_view key,
                                             std::chrono::steady_clock::time_point give_up) const;

  /// The newest by device, problem, template and config; a row of another driver, kernel or extent
  /// is returned too (compare).
  [[nodiscard]] std::optional<MeasurementRow> find_measurement(std::string_view device,
                                                               std::string_view problem,
                                                               std::string_view template_id,
                                                               std::string_view config) const;
  /// All of them, newest first.
  [[nodiscard]] std::vector<MeasurementRow> find_measurements(std::string_view device,
                                                              std::string_view problem,
                                                              std::string_view template_id,
                                                              std::string_view config) const;
  /// Adds the row to the existing ones; the same row twice is one.
  bool store_measurement(const MeasurementRow& row);
  /// All of a problem, by template and config, newest first.
  [[nodiscard]] std::vector<MeasurementRow> measurements(std::string_view device,
                                                         std::string_view problem) const;

  /// The winner with exactly these extents. Of several rows (repeated tunings, or merged ones of
  /// other machines) the one with the most rounds answers, then the one with the least ratio of
  /// plan to default: never of the least time, since two machines' times are not comparable. Then
  /// the newest. The same rows give the same answer, however they came together. Without the long
  /// members: samples, problem and setting are in list_winners().
  [[nodiscard]] std::optional<WinnerRow> find_winner(std::string_view device,
                                                     std::string_view family, std::int64_t tokens,
                                                     std::int64_t sequences) const;
  /// All rows with exactly these extents, first the one that find_winner() returns: if its plan is
  /// another build's, the next one's may still be usable.
  [[nodiscard]] std::vector<WinnerRow> find_winners(std::string_view device,
                                                    std::string_view family, std::int64_t tokens,
                                                    std::int64_t sequences) const;
  /// All rows of any device whose family begins so; by device, family, tokens and sequences, and
  /// where these are equal as find_winners() has them. Without the long members.
  [[nodiscard]] std::vector<WinnerRow> winners_of(std::string_view family_prefix) const;
  /// Adds the row and makes it the answer. The row that answered before stays stored and no longer
  /// answers.
  bool store_winner(const WinnerRow& row);

  /// Everything, newest first; artifacts without their code, winners that answer.
  [[nodiscard]] std::vector<ArtifactRow> list_artifacts() const;
  [[nodiscard]] std::vector<MeasurementRow> list_measurements() const;
  [[nodiscard]] std::vector<WinnerRow> list_winners() const;

  [[nodiscard]] CacheStats stats() const;
  /// Deletes every row and gives the space back; false when it could not.
  [[nodiscard]] bool clear();

 private:
  friend class CacheAccess;  // this room's operations on whole caches (care.hpp, transfer.hpp)
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace wyvern WYVERN_API
