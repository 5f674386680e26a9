// The tables of wyvern.db, and how to recognize the file.
#pragma once

#include "cache/database.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace wyvern {

struct ArtifactRow;

/// Marks the file as Wyvern's in SQLite's header ("WYVN").
inline constexpr std::int64_t kApplicationId = 0x5759564e;
/// Stored as SQLite's user_version.
inline constexpr std::int64_t kSchemaVersion = 3;

enum class Identity { empty, current, older, newer, foreign };

/// Reads whose file it is, inside the caller's transaction; changes nothing.
Identity identify(Database& database);

/// Makes the tables of an empty database in one transaction. Safe when many processes do it at
/// once: the first does the work. Returns whose the file is then.
Identity make_tables(Database& database);

/// Whether tables and indexes are exactly as make_tables() makes them.
bool has_current_tables(Database& database);

/// Opens `file` in `mode`, sees that it is Wyvern's and current, and sets the connection up; waits
/// up to `patience` for each lock.
/// Throws DatabaseError, or ForeignDatabase when the file is another program's or of another
/// version; the file is then untouched.
std::unique_ptr<Database> open_wyvern(const std::filesystem::path& file, Database::Mode mode,
                                      std::chrono::milliseconds patience);

/// SHA-256 over everything that decides which code an artifact runs: its key, template, target,
/// config and metadata, and its code, whose SHA-256 is `code_digest`.
std::string artifact_digest(const ArtifactRow& row, std::string_view code_digest);

/// Throws the ForeignDatabase error of an identity that must be left alone.
void require_ours(Identity identity, const std::filesystem::path& file);

}  // namespace wyvern
