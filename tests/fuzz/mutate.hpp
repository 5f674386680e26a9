// Changes to the inputs of a fuzz target, for builds without libFuzzer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern::fuzz {

/// Makes inputs out of others: a few random changes each, as libFuzzer's are, but without knowing
/// what they reach. The same seed makes the same inputs. Not thread-safe.
class Mutator {
 public:
  /// `seeds`: at least one input. `words`: what is put in now and then; may be empty.
  Mutator(std::vector<std::string> seeds, std::vector<std::string> words, std::uint64_t seed);

  /// The next input, of at most 64 KiB, or as long as the longest of the seeds.
  std::string next();

 private:
  void change(std::string& input);
  void put(std::string& input, std::string_view bytes);
  std::size_t below(std::size_t count);
  const std::string& any(const std::vector<std::string>& all);

  std::vector<std::string> seeds_, words_;
  std::size_t longest_;
  std::mt19937_64 engine_;
};

/// The words of a dictionary of libFuzzer: a line each, quoted, with \xHH, \\ and \" in it.
std::vector<std::string> dictionary_words(std::string_view text);

}  // namespace wyvern::fuzz
