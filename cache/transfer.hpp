// Rows from one cache to another: merging databases, and measurements and winners as text.
//
// A pack is a text file: a line {"devices":[...],"row":"pack","version":1}, then a line for each
// row (rows.hpp), sorted, so that two of them can be compared line by line. It holds no code.
//
// Nothing here is for a hot path. Every function throws Error with one sentence: kBadInput for a
// file that is no cache or pack, kIo for one that cannot be read or stored; then nothing was
// stored.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache.hpp"

namespace wyvern {

/// Counts of rows added to a cache.
struct Added {
  std::int64_t artifacts = 0, measurements = 0, winners = 0;
  std::int64_t known = 0;    ///< rows that were there already
  std::int64_t damaged = 0;  ///< artifacts that are not as they were stored, left out
};

/// Adds every row of other databases, files or the directories of them, which are only read: all of
/// them or, where one cannot be read, none; counts for each, in their order. Merging is a union:
/// rows and answers do not depend on the order and number of merges. Of two artifacts of one key,
/// which are interchangeable, the one with the smaller digest stays, then the older. Since code of
/// artifacts is run, a database that others may have written is refused, and so is one of another
/// version.
std::vector<Added> merge(Cache& into, const std::vector<std::filesystem::path>& others);
Added merge(Cache& into, const std::filesystem::path& other);

/// A pack of the winners that answer; with all, of every winner and measurement. `device`: of that
/// device key alone, empty for all.
std::string export_pack(const Cache& cache, bool all, std::string_view device);

/// Adds the rows of a pack. `name` is for messages, which name the line.
Added import_pack(Cache& into, std::string_view text, std::string_view name);

/// Winners and measurements of a pack; throws as import_pack() does.
struct PackRows {
  std::vector<std::string> devices;
  std::vector<WinnerRow> winners;
  std::vector<MeasurementRow> measurements;
};
PackRows parse_pack(std::string_view text, std::string_view name);
/// The devices that a pack's first line names.
std::vector<std::string> pack_devices(std::string_view first_line, std::string_view name);

/// All rows of a cache, artifacts without code.
struct Contents {
  std::vector<WinnerRow> winners;  ///< all; of each problem the one that answers first
  std::vector<MeasurementRow> measurements;
  std::vector<ArtifactRow> artifacts;
};
/// Of a cache's directory, a database or a pack, which is only read.
Contents read_contents(const std::filesystem::path& path);

/// The whole file. Throws Error(kBadInput) where it is missing or no regular file.
std::string read_text(const std::filesystem::path& path);

}  // namespace wyvern
