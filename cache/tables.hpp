// Rows of the cache in and out of the current tables. Of this room only; every call
// throws DatabaseError and works in the caller's transaction.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "cache/cache.hpp"
#include "cache/database.hpp"

namespace wyvern::tables {

/// Adds the row as it is, `created` included. False when it was there already.
bool add(Database& database, const MeasurementRow& row);
bool add(Database& database, const WinnerRow& row);

/// Adds the row with a round above all of its problem, so that it answers.
void crown(Database& database, WinnerRow row);

enum class Winners { that_answer, all };
/// Newest first.
std::vector<MeasurementRow> measurements(Database& database);
std::vector<WinnerRow> winners(Database& database, Winners which);
/// Problems that have a winner.
std::int64_t problems_won(Database& database);

std::vector<MeasurementRow> measurements_of(Database& database, std::string_view device,
                                            std::string_view problem);
/// Newest first; the newest alone where `most` is 1, all where it is -1.
std::vector<MeasurementRow> measurements_of(Database& database, std::string_view device,
                                            std::string_view problem, std::string_view template_id,
                                            std::string_view config, std::int64_t most);
/// The one that answers first; it alone where `most` is 1, all where it is -1.
std::vector<WinnerRow> winners_of(Database& database, std::string_view device,
                                  std::string_view family, std::int64_t tokens,
                                  std::int64_t sequences, std::int64_t most);
/// As Cache::winners_of() has them.
std::vector<WinnerRow> winners_of(Database& database, std::string_view family_prefix);

/// The columns that a query for read_artifact() begins with: all but the code.
#define WYVERN_ARTIFACT_COLUMNS "key, template_id, target, config, metadata, compile_ms, created"
ArtifactRow read_artifact(const Query& query);

}  // namespace wyvern::tables
