// Runs a fuzz target without libFuzzer, so that it is a test wherever the suite runs:
//   fuzz_NAME CORPUS [SECONDS DICTIONARY KEPT]
// runs the files of CORPUS (a folder, or one file) once each, then random changes of them for so
// many seconds. The input of such a run lies in the file KEPT, which is removed when all went well.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.hpp"
#include "tests/fuzz/mutate.hpp"

namespace wyvern::fuzz {
namespace {

namespace fs = std::filesystem;

std::string content_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  require(in.good(), "a file can be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<fs::path> files_of(const fs::path& corpus) {
  if (!fs::is_directory(corpus)) return {corpus};
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(corpus))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

void run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

/// A file that always holds the input of the run that goes on, whatever ends the process.
class Kept {
 public:
  explicit Kept(const std::string& path)
      : path_(path), number_(open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    require(number_ >= 0, "the input of a run can be kept");
  }
  void hold(const std::string& input) const {
    require(pwrite(number_, input.data(), input.size(), 0) == static_cast<ssize_t>(input.size()) &&
                ftruncate(number_, static_cast<off_t>(input.size())) == 0,
            "the input of a run can be kept");
  }
  void discard() const {
    close(number_);
    unlink(path_.c_str());
  }

 private:
  std::string path_;
  int number_;
};

void run_changed(std::vector<std::string> seeds, double seconds, const std::string& dictionary,
                 const std::string& path) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::string> words;
  if (fs::exists(dictionary)) words = dictionary_words(content_of(dictionary));
  Mutator mutator(std::move(seeds), std::move(words), std::random_device{}());
  std::fprintf(stderr, "changed inputs for %g s; one that fails stays in %s\n", seconds,
               path.c_str());
  const Kept kept(path);
  long runs = 0;
  for (; Clock::now() < end; ++runs) {
    const std::string input = mutator.next();
    kept.hold(input);
    run(input);
  }
  kept.discard();
  std::fprintf(stderr, "%ld changed inputs\n", runs);
}

}  // namespace
}  // namespace wyvern::fuzz

int main(int argc, char** argv) {
  using namespace wyvern::fuzz;
  if (argc != 2 && argc != 5) {
    std::fprintf(stderr, "usage: %s CORPUS [SECONDS DICTIONARY KEPT]\n", argv[0]);
    return 2;
  }
  std::vector<std::string> seeds;
  for (const std::filesystem::path& file : files_of(argv[1])) {
    std::fprintf(stderr, "%s\n", file.c_str());  // what ends the process is the last one named
    run(seeds.emplace_back(content_of(file)));
  }
  require(!seeds.empty(), "there are inputs to run");
  std::fprintf(stderr, "%zu files\n", seeds.size());
  if (argc == 5) run_changed(std::move(seeds), std::stod(argv[2]), argv[3], argv[4]);
  return 0;
}
