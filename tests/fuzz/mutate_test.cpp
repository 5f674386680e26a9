#include "tests/fuzz/mutate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace wyvern::fuzz {
namespace {

using Strings = std::vector<std::string>;

TEST(Mutator, MakesManyInputsAndTheSameOnesOfASeed) {
  Mutator one({"{\"T\":128}", ""}, {"word"}, 1), same({"{\"T\":128}", ""}, {"word"}, 1);
  std::set<std::string> seen;
  bool word = false, number = false, cut = false, joined = false;
  for (int i = 0; i < 5000; ++i) {
    const std::string input = one.next();
    EXPECT_EQ(input, same.next());
    word |= input.find("word") != std::string::npos;
    number |= input.find("\"T\":9223372036854775808}") != std::string::npos;
    cut |= input.size() < 4;
    joined |= input.size() > 14;
    seen.insert(input);
  }
  EXPECT_GT(seen.size(), 2000U);
  EXPECT_TRUE(word && number && cut && joined);
}

TEST(Mutator, MakesNoInputOfMoreThan64KiB) {
  Mutator mutator({std::string(60000, 'x')}, {}, 2);
  std::size_t longest = 0;
  for (int i = 0; i < 3000; ++i) longest = std::max(longest, mutator.next().size());
  EXPECT_GT(longest, 60000U);
  EXPECT_LE(longest, 65536U);
}

TEST(Dictionary, IsReadAsLibFuzzerWritesIt) {
  EXPECT_EQ(
      dictionary_words("# words\n\"plain\"\n\n\"a\\x00b\"\n\"\\\"q\\\\\"\n\"\\x0a\"\nnot one\n"),
      (Strings{"plain", std::string("a\0b", 3), "\"q\\", "\n"}));
  EXPECT_EQ(dictionary_words(""), Strings{});
}

}  // namespace
}  // namespace wyvern::fuzz
