// The tables of a file, on which every file that there is depends.
#include <gtest/gtest.h>

#include <string>

#include "cache/cache_testing.hpp"
#include "cache/database.hpp"
#include "cache/schema.hpp"

namespace wyvern::testing {
namespace {

// A file whose tables are others, to the letter, counts as damaged. So a change of one needs
// another version, and this digest with it.
TEST(Schema, StatementsOfAVersionStayToTheLetter) {
  Database database("made", Database::Mode::memory);
  EXPECT_EQ(make_tables(database), Identity::current);
  EXPECT_TRUE(has_current_tables(database));
  EXPECT_EQ(database.integer("PRAGMA user_version"), 3);
  std::string text;
  Query query(database,
              "SELECT type || ' ' || name || ' ' || tbl_name || coalesce(sql, '')"
              " FROM sqlite_schema ORDER BY name");
  while (query.step()) text += query.text(0) + '\n';
  EXPECT_EQ(sha256_hex(text), "d94e33501cbb341a10197c3aa34d1457bc345926a3574c7693d5d25780e14779");
}

TEST(Schema, TablesAreMadeOnce) {
  const TempDirectory temp;
  Database database(temp.file(), Database::Mode::create);
  EXPECT_EQ(make_tables(database), Identity::current);
  database.execute("INSERT INTO uses VALUES ('key', '2026')");
  EXPECT_EQ(make_tables(database), Identity::current);
  EXPECT_EQ(database.integer("SELECT count(*) FROM uses"), 1);
}

TEST(Schema, FitsIntoTheFirstPage) {
  const TempDirectory temp;
  QuietCache(temp.path())->store_winner(winner(1, 1));
  // Behind the file's header of 100 bytes stands the kind of the page: 13, a leaf with the rows of
  // sqlite_schema themselves. Were it an inner page, damage to another one could cost all tables.
  EXPECT_EQ(read_file(temp.file())[100], 13);
}

}  // namespace
}  // namespace wyvern::testing
