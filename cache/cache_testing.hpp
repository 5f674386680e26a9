// Rows and directories that the cache's tests share.
#pragma once

#include <wyvern/sha256.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include <unistd.h>

#include "cache/cache.hpp"

namespace wyvern::testing {

/// A deadline that no test reaches on any machine.
inline const auto kFar = std::chrono::steady_clock::now() + std::chrono::hours(1);

/// A directory of its own, removed at the end; in memory where that can be had, since a thousand
/// commits on a busy disk take minutes and test nothing more.
class TempDirectory {
 public:
  TempDirectory() {
    const std::filesystem::path memory = "/dev/shm";
    const bool usable = ::access(memory.c_str(), W_OK | X_OK) == 0;
    const auto parent = usable ? memory : std::filesystem::temp_directory_path();
    std::string pattern = (parent / "wyvern-cache-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path file() const { return path_ / "wyvern.db"; }

 private:
  std::filesystem::path path_;
};

/// Bytes that no other seed gives, zeros included.
inline std::string random_bytes(std::uint64_t seed, std::size_t size) {
  std::mt19937_64 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

/// An artifact whose every field follows from `seed`, its key being its code's digest.
inline ArtifactRow artifact(std::uint64_t seed, std::size_t size = 3000) {
  ArtifactRow row;
  row.code = random_bytes(seed, size);
  row.key = sha256_hex(row.code);
  row.template_id = "fwd_h.portable";
  row.target = "sm_90a";
  row.config = "BT=64,seed=" + std::to_string(seed);
  row.metadata = R"({"entry":"wyvern_kernel"})";
  row.compile_ms = 0.25 + static_cast<double>(seed);
  return row;
}

inline MeasurementRow measurement(std::uint64_t seed) {
  MeasurementRow row;
  row.device = "NVIDIA H200, 132 SMs";
  row.problem = "gated_delta_rule:forward:T=8192";
  row.template_id = "fwd_o.portable";
  row.config = "BK=64,seed=" + std::to_string(seed);
  row.artifact_key = sha256_hex(row.config);
  row.driver = "580.65";
  row.status = "ok";
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> time(10.0, 1000.0);
  for (int i = 0; i < 7; ++i) row.samples_us.push_back(time(random));
  row.median_us = row.samples_us[3];
  row.error = 1.0 / static_cast<double>(seed + 3);
  return row;
}

inline WinnerRow winner(std::int64_t tokens, std::int64_t sequences, std::string family = "gdn") {
  WinnerRow row;
  row.device = "NVIDIA H200, 132 SMs";
  row.family = std::move(family);
  row.tokens = tokens;
  row.sequences = sequences;
  row.plan = R"([{"template":"fwd_h.portable","config":"BT=64"}])";
  row.median_us = static_cast<double>(tokens) / 3.0;
  row.default_us = static_cast<double>(tokens) / 2.0;
  row.driver = "580.65";
  return row;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  // Whatever the umask, no file that the cache would refuse.
  std::filesystem::permissions(
      path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

/// A cache that counts and keeps its messages instead of writing them to stderr.
struct QuietCache {
  explicit QuietCache(const std::filesystem::path& directory) : cache(directory) {
    cache.on_degraded([this](const std::string& sentence) {
      ++told;
      said = sentence;
    });
  }
  Cache* operator->() { return &cache; }

  int told = 0;
  std::string said;
  Cache cache;
};

}  // namespace wyvern::testing
