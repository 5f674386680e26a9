// Any bytes as the cache's database file, and after the first bytes that begin a rollback journal,
// as the journal that a process left behind. The cache throws nothing, hands out no artifact other
// than as it was stored, and stores and finds again, or says why not.
#include <wyvern/sha256.hpp>

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>

#include <sys/stat.h>

#include "cache/cache.hpp"
#include "runtime/plan.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace wyvern::fuzz {
namespace {

/// In the corpus an artifact's key is a digest of the row, so that no other row can have it.
std::string key_of(const ArtifactRow& row) {
  return sha256_hex(row.template_id + '\n' + row.target + '\n' + row.config + '\n' + row.metadata +
                    '\n' + row.code);
}

ArtifactRow new_artifact() {
  ArtifactRow row;
  row.template_id = "fwd_h.cpu";
  row.target = "cpu";
  row.config = "BT=64";
  row.metadata = R"({"entry":"wyvern_kernel"})";
  row.code = std::string(3000, 'c');
  row.key = key_of(row);
  return row;
}

void write_file(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  chmod(path.c_str(), 0600);
}

/// Everything that can be read is read, by its own key too.
void read_all(const Cache& cache) {
  for (const ArtifactRow& listed : cache.list_artifacts())
    if (const auto row = cache.find_artifact(listed.key))
      require(row->key == listed.key && key_of(*row) == row->key,
              "an artifact is found as it was stored or not at all");
  for (const MeasurementRow& row : cache.list_measurements()) {
    (void)cache.find_measurement(row.device, row.problem, row.template_id, row.config);
    (void)cache.measurements(row.device, row.problem);
  }
  for (const WinnerRow& row : cache.list_winners()) {
    (void)cache.find_winner(row.device, row.family, row.tokens, row.sequences);
    (void)cache.winners_of(row.family);
    (void)plan_from_json(row.plan);
  }
  (void)cache.stats();
}

void store_and_find(Cache& cache) {
  const ArtifactRow artifact = new_artifact();
  if (!cache.store_artifact(artifact)) {
    require(!cache.status().empty(), "a cache that does not store says why");
    return;
  }
  const auto found = cache.find_artifact(artifact.key);
  require(found && found->code == artifact.code && found->metadata == artifact.metadata,
          "what was stored is found");
}

}  // namespace
}  // namespace wyvern::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace wyvern;
  constexpr std::string_view kJournal = "\xd9\xd5\x05\xf9\x20\xa1\x63\xd7";
  const std::string_view bytes = fuzz::text_of(data, size);
  const std::size_t split = std::min(bytes.find(kJournal), bytes.size());
  const fuzz::Folder folder;
  const std::string file = folder.path() + "/wyvern.db";
  fuzz::write_file(file, bytes.substr(0, split));
  if (split < bytes.size()) fuzz::write_file(file + "-journal", bytes.substr(split));

  Cache cache(folder.path());
  cache.on_degraded([](const std::string& sentence) {
    fuzz::require(!sentence.empty(), "a degraded cache says why");
  });
  fuzz::read_all(cache);
  fuzz::store_and_find(cache);
  fuzz::read_all(cache);
  return 0;
}
