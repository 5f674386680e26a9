// A template's id, a line feed and any text as its config: refused as bad input, or values that are
// written and read back the same, and either illegal for the template or launched somehow. The
// first line is read as a target too.
#include <algorithm>
#include <map>
#include <string>
#include <string_view>

#include "templates/legality.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "tools/wyvern/stage_problem.hpp"

namespace wyvern::fuzz {
namespace {

const Problem& problem_of(const Template& t) {
  static std::map<const Template*, Problem> known;
  const auto [at, added] = known.try_emplace(&t);
  if (added) at->second = cli::stage_problem(t);
  return at->second;
}

Extents extents_of(const Problem& p, const Config& config) {
  Extents e;
  e.B = p.B;
  e.T = p.T;
  e.N = p.N;
  e.NT = chunk_slots(p.B, p.T, p.N, p.packed, config.contains("BT") ? config.integer("BT") : 64);
  e.scale = scale_of(p);
  return e;
}

void check_legality(const Template& t, const Config& config) {
  const Problem& problem = problem_of(t);
  const Constants constants = problem_constants(problem);
  const Limits limits = usual_target(t.device).limits;
  if (!config_problem(t, config, constants, limits).empty()) return;
  const Geometry geometry =
      t.geometry(Spec(constants, config), extents_of(problem, config), limits);
  require(geometry.threads > 0 && geometry.shared_bytes >= 0, "a legal config can be launched");
  for (const std::int64_t blocks : geometry.grid) require(blocks >= 0, "a grid has a size");
}

}  // namespace
}  // namespace wyvern::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace wyvern;
  const std::string_view text = fuzz::text_of(data, size);
  const std::string_view first = text.substr(0, text.find('\n'));
  const std::string_view rest = text.substr(std::min(first.size() + 1, text.size()));
  fuzz::accepts([&] { (void)parse_target(first); });
  Config config;
  if (!fuzz::accepts([&] { config = Config::parse(rest); })) return 0;
  const std::string written = config.to_string();
  fuzz::require(Config::parse(written) == config, "a config is read as it was written");
  fuzz::require(Config::parse(written).to_string() == written, "a config has one text");
  if (const Template* t = find_template(first)) fuzz::check_legality(*t, config);
  return 0;
}
