#include "cache/tables.hpp"

#include <algorithm>

#include "cache/rows.hpp"

namespace wyvern::tables {
namespace {

#define WYVERN_MARKS_8 "?, ?, ?, ?, ?, ?, ?, ?"

#define WYVERN_MEASUREMENT                                                          \
  "SELECT id, device, problem, template_id, config, artifact_key, driver, status, " \
  "detail, median_us, error, created, samples_us, more FROM measurements "
constexpr const char* kAddMeasurement =
    "INSERT INTO measurements (digest, device, problem, template_id, config, artifact_key, driver,"
    " status, detail, median_us, error, created, samples_us, more) VALUES (" WYVERN_MARKS_8
    ", ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING";
constexpr const char* kMeasurementsOfConfig = WYVERN_MEASUREMENT
    "WHERE device = ? AND problem = ? AND template_id = ? AND config = ?"
    " ORDER BY created DESC, id DESC LIMIT ?";
constexpr const char* kMeasurementsOf = WYVERN_MEASUREMENT
    "WHERE device = ? AND problem = ?"
    " ORDER BY template_id, config, created DESC, id DESC";
constexpr const char* kAllMeasurements = WYVERN_MEASUREMENT "ORDER BY created DESC, id DESC";

#define WYVERN_ANSWER                                                                     \
  "id, device, family, tokens, sequences, plan, median_us, default_us, ratio, floor_us, " \
  "driver, round, created"
#define WYVERN_WINNER "SELECT " WYVERN_ANSWER ", more FROM winners "
#define WYVERN_OF_PROBLEM "WHERE device = ? AND family = ? AND tokens = ? AND sequences = ? "
constexpr const char* kAddWinner =
    "INSERT INTO winners (digest, rank, device, family, tokens, sequences, plan, median_us,"
    " default_us, ratio, floor_us, driver, round, created, more) VALUES (" WYVERN_MARKS_8
    ", ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING";
// The first row of a problem answers. The order depends only on the rows' contents, not on the
// order in which they were stored. winners_by_rank has this order, so that nothing is sorted.
#define WYVERN_BY_RANK "round DESC, rank, created DESC, digest"
// Columns that a look-up does not need are not read: they cost ten times the rest.
constexpr const char* kWinnersOf = "SELECT " WYVERN_ANSWER " FROM winners " WYVERN_OF_PROBLEM
                                   "ORDER BY " WYVERN_BY_RANK " LIMIT ?";
// In the order of the index, so that nothing is sorted.
constexpr const char* kWinnersLike = "SELECT " WYVERN_ANSWER
                                     " FROM winners WHERE substr(family, 1, length(?1)) = ?1"
                                     " ORDER BY device, family, tokens, sequences, " WYVERN_BY_RANK;
constexpr const char* kAnsweringWinners = WYVERN_WINNER
    "WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY device, family,"
    " tokens, sequences ORDER BY " WYVERN_BY_RANK
    ") AS place FROM winners) WHERE place = 1) ORDER BY created DESC, id DESC";
constexpr const char* kAllWinners = WYVERN_WINNER "ORDER BY created DESC, id DESC";
constexpr const char* kLastRound = "SELECT coalesce(max(round), 0) FROM winners " WYVERN_OF_PROBLEM;

/// Reads a row's columns one after another.
class Columns {
 public:
  explicit Columns(const Query& query) : query_(query) {}
  std::string text() { return query_.text(at_++); }
  std::int64_t integer() { return query_.integer(at_++); }
  double real() { return query_.real(at_++); }

 private:
  const Query& query_;
  int at_ = 0;
};

MeasurementRow read_measurement(const Query& query) {
  Columns columns(query);
  MeasurementRow row;
  row.id = columns.integer();
  row.device = columns.text();
  row.problem = columns.text();
  row.template_id = columns.text();
  row.config = columns.text();
  row.artifact_key = columns.text();
  row.driver = columns.text();
  row.status = columns.text();
  row.detail = columns.text();
  row.median_us = columns.real();
  row.error = columns.real();
  row.created = columns.text();
  read_samples(columns.text(), row);
  read_more(columns.text(), row);
  return row;
}

WinnerRow read_answer(Columns& columns) {
  WinnerRow row;
  row.id = columns.integer();
  row.device = columns.text();
  row.family = columns.text();
  row.tokens = columns.integer();
  row.sequences = columns.integer();
  row.plan = columns.text();
  row.median_us = columns.real();
  row.default_us = columns.real();
  row.ratio = columns.real();
  row.floor_us = columns.real();
  row.driver = columns.text();
  row.round = columns.integer();
  row.created = columns.text();
  return row;
}

WinnerRow read_winner(const Query& query) {
  Columns columns(query);
  WinnerRow row = read_answer(columns);
  read_more(columns.text(), row);
  return row;
}

template <class Row>
std::vector<Row> read_all(Query& query, Row (*read)(const Query&)) {
  std::vector<Row> rows;
  while (query.step()) rows.push_back(read(query));
  return rows;
}

WinnerRow read_short_winner(const Query& query) {
  Columns columns(query);
  return read_answer(columns);
}

}  // namespace

bool add(Database& database, const MeasurementRow& row) {
  const std::string digest = digest_of(row), samples = samples_text(row), more = more_text(row);
  Query(database, kAddMeasurement)
      .bind(digest)
      .bind(row.device)
      .bind(row.problem)
      .bind(row.template_id)
      .bind(row.config)
      .bind(row.artifact_key)
      .bind(row.driver)
      .bind(row.status)
      .bind(row.detail)
      .bind(row.median_us)
      .bind(row.error)
      .bind(row.created)
      .bind(samples)
      .bind(more)
      .step();
  return database.changes() > 0;
}

bool add(Database& database, const WinnerRow& row) {
  const std::string digest = digest_of(row), more = more_text(row);
  Query(database, kAddWinner)
      .bind(digest)
      .bind(rank_of(row))
      .bind(row.device)
      .bind(row.family)
      .bind(row.tokens)
      .bind(row.sequences)
      .bind(row.plan)
      .bind(row.median_us)
      .bind(row.default_us)
      .bind(row.ratio)
      .bind(row.floor_us)
      .bind(row.driver)
      .bind(row.round)
      .bind(row.created)
      .bind(more)
      .step();
  return database.changes() > 0;
}

void crown(Database& database, WinnerRow row) {
  {
    Query last(database, kLastRound);
    last.bind(row.device).bind(row.family).bind(row.tokens).bind(row.sequences).step();
    row.round = std::clamp<std::int64_t>(last.integer(0), 0, 2 * kMostRounds) + 1;
  }
  if (row.ratio == 0) row.ratio = paired_ratio(row);
  add(database, row);
}

std::int64_t problems_won(Database& database) {
  return database.integer(
      "SELECT count(*) FROM (SELECT DISTINCT device, family, tokens, sequences FROM winners)");
}

std::vector<MeasurementRow> measurements(Database& database) {
  Query query(database, kAllMeasurements);
  return read_all(query, read_measurement);
}

std::vector<WinnerRow> winners(Database& database, Winners which) {
  Query query(database, which == Winners::all ? kAllWinners : kAnsweringWinners);
  return read_all(query, read_winner);
}

std::vector<MeasurementRow> measurements_of(Database& database, std::string_view device,
                                            std::string_view problem) {
  Query query(database, kMeasurementsOf);
  query.bind(device).bind(problem);
  return read_all(query, read_measurement);
}

std::vector<MeasurementRow> measurements_of(Database& database, std::string_view device,
                                            std::string_view problem, std::string_view template_id,
                                            std::string_view config, std::int64_t most) {
  Query query(database, kMeasurementsOfConfig);
  query.bind(device).bind(problem).bind(template_id).bind(config).bind(most);
  return read_all(query, read_measurement);
}

std::vector<WinnerRow> winners_of(Database& database, std::string_view device,
                                  std::string_view family, std::int64_t tokens,
                                  std::int64_t sequences, std::int64_t most) {
  Query query(database, kWinnersOf);
  query.bind(device).bind(family).bind(tokens).bind(sequences).bind(most);
  return read_all(query, read_short_winner);
}

std::vector<WinnerRow> winners_of(Database& database, std::string_view family_prefix) {
  Query query(database, kWinnersLike);
  query.bind(family_prefix);
  return read_all(query, read_short_winner);
}

ArtifactRow read_artifact(const Query& query) {
  ArtifactRow row;
  row.key = query.text(0);
  row.template_id = query.text(1);
  row.target = query.text(2);
  row.config = query.text(3);
  row.metadata = query.text(4);
  row.compile_ms = query.real(5);
  row.created = query.text(6);
  return row;
}

}  // namespace wyvern::tables
