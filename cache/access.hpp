// A Cache's parts, for this room's operations on whole caches.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "cache/cache.hpp"
#include "cache/connection.hpp"

namespace wyvern {

class Cache::Impl {
 public:
  explicit Impl(const std::filesystem::path& directory) : connection(directory) {}
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Notes that the artifact was used today, unless `last` is today.
  void note_use(const std::string& key, std::string_view last);

  Connection connection;
  /// Artifacts that are used again for the first time in a day, for gc(): written at the end, so
  /// that a look-up writes nothing. Uses by a killed process are lost. Touched only by work of the
  /// connection, which is done by one thread at a time.
  std::map<std::string, std::string> uses;
};

/// Runs work on a cache's database as Connection::run() does.
class CacheAccess {
 public:
  static bool run(Cache& cache, Connection::Access access, const Connection::Work& work);
  static bool read(const Cache& cache, const Connection::Work& work);
};

}  // namespace wyvern
