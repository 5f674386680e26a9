#include "tests/fuzz/mutate.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace wyvern::fuzz {
namespace {

constexpr std::size_t kMost = std::size_t{64} << 10;

/// Numbers at which something often ends.
constexpr std::string_view kNumbers[] = {"0",
                                         "-1",
                                         "1",
                                         "65535",
                                         "65536",
                                         "2147483647",
                                         "2147483648",
                                         "-2147483648",
                                         "4294967296",
                                         "9223372036854775807",
                                         "9223372036854775808",
                                         "18446744073709551615",
                                         "1e308",
                                         "-0.0",
                                         "1e999"};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : 0;
}

}  // namespace

Mutator::Mutator(std::vector<std::string> seeds, std::vector<std::string> words, std::uint64_t seed)
    : seeds_(std::move(seeds)), words_(std::move(words)), longest_(kMost), engine_(seed) {
  for (const std::string& one : seeds_) longest_ = std::max(longest_, one.size());
}

std::string Mutator::next() {
  std::string input = any(seeds_);
  const std::size_t changes = std::size_t{1} << below(4);
  for (std::size_t i = 0; i < changes; ++i) change(input);
  input.resize(std::min(input.size(), longest_));
  return input;
}

void Mutator::change(std::string& input) {
  const std::size_t at = below(input.size() + 1);
  const std::size_t length = std::min(below(std::size_t{1} << below(12)), input.size() - at);
  switch (below(9)) {
    case 0:  // a bit
      if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
      break;
    case 1:  // a byte
      if (at < input.size()) input[at] = static_cast<char>(below(256));
      break;
    case 2: input.erase(at, length); break;
    case 3: input.resize(at); break;
    case 4: input.insert(at, input.substr(below(input.size() + 1), length)); break;
    case 5: input.insert(at, std::string(below(64), static_cast<char>(below(256)))); break;
    case 6:
      if (!words_.empty()) put(input, any(words_));
      break;
    case 7: {  // the first number from here on
      auto first =
          std::find_if(input.begin() + static_cast<std::ptrdiff_t>(at), input.end(), is_digit);
      input.replace(first, std::find_if_not(first, input.end(), is_digit),
                    kNumbers[below(std::size(kNumbers))]);
      break;
    }
    default: {  // the end of another one
      const std::string& other = any(seeds_);
      input.replace(at, std::string::npos, other, below(other.size() + 1));
    }
  }
}

/// In between, or over what is there.
void Mutator::put(std::string& input, std::string_view bytes) {
  const std::size_t at = below(input.size() + 1);
  input.replace(at, below(2) == 0 ? 0 : std::min(bytes.size(), input.size() - at), bytes);
}

std::size_t Mutator::below(std::size_t count) {
  return std::uniform_int_distribution<std::size_t>(0, count - 1)(engine_);
}

const std::string& Mutator::any(const std::vector<std::string>& all) {
  return all[below(all.size())];
}

std::vector<std::string> dictionary_words(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.size() < 2 || line.front() != '"' || line.back() != '"') continue;
    const std::string_view quoted = line.substr(1, line.size() - 2);
    std::string& word = words.emplace_back();
    for (std::size_t i = 0; i < quoted.size(); ++i) {
      if (quoted[i] != '\\' || i + 1 == quoted.size()) {
        word += quoted[i];
      } else if (quoted[++i] == 'x' && i + 2 < quoted.size()) {
        word += static_cast<char>(hex_digit(quoted[i + 1]) * 16 + hex_digit(quoted[i + 2]));
        i += 2;
      } else {
        word += quoted[i];
      }
    }
  }
  return words;
}

}  // namespace wyvern::fuzz
