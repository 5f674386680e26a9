// Any lines as what the tuner and its worker say to each other. The worker answers each with JSON
// objects or ends with one of its exit codes; problems, plans and answers are refused as bad input
// or written and read back the same. No device is opened: what would follow is no parsing.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "autotune/protocol.hpp"
#include "autotune/worker.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace wyvern::fuzz {
namespace {

using nlohmann::json;

void check_problem(const json& document) {
  Problem problem;
  if (!accepts([&] { problem = problem_from(document); })) return;
  const json written = to_json(problem);
  require(to_json(problem_from(json::parse(written.dump()))) == written,
          "a problem is read as it was written");
  if (accepts([&] { validate(problem); })) (void)problem_key(problem).to_string();
}

void check_plan(const json& document) {
  Plan plan;
  if (!accepts([&] { plan = plan_from(document); })) return;
  require(plan_from(json::parse(to_json(plan).dump())) == plan, "a plan is read as it was written");
}

void check_outcome(const json& document) {
  const std::optional<Outcome> outcome = outcome_from(document);
  if (!outcome) return;
  const std::optional<Outcome> again = outcome_from(json::parse(to_json(*outcome).dump()));
  require(again && again->status == outcome->status && again->detail == outcome->detail &&
              again->samples == outcome->samples && again->clocks_mhz == outcome->clocks_mhz &&
              again->error == outcome->error,
          "an answer is read as it was written");
}

/// A document and whatever it holds two levels down: requests hold problems and lists of plans.
void check_each(const json& document, int depth = 0) {
  check_problem(document);
  check_plan(document);
  check_outcome(document);
  if (depth < 2 && document.is_structured())
    for (const json& inner : document) check_each(inner, depth + 1);
}

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size())
    text.replace(at, what.size(), with);
}

/// The device's name may be spelt with escapes, which no document needs for it.
void check_worker(std::string requests) {
  for (const std::string_view name : {"cpu", "cuda", "\\u"}) replace_all(requests, name, "none");
  const MemoryFile in(requests), out;
  const int code = worker_main(in.number(), out.number());
  require(code == 0 || code == 2 || code == 3, "a worker's exit code is 0, 2 or 3");
  const std::string answers = out.content();
  for (std::size_t at = 0; at < answers.size();) {
    const std::size_t end = answers.find('\n', at);
    require(end != std::string::npos, "an answer is a whole line");
    require(json::parse(answers.substr(at, end - at)).is_object(), "an answer is a JSON object");
    at = end + 1;
  }
}

}  // namespace
}  // namespace wyvern::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace wyvern::fuzz;
  const std::string_view text = text_of(data, size);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    if (const auto message = wyvern::message_from(text.substr(at, end - at))) check_each(*message);
    at = end + 1;
  }
  check_worker(std::string(text));
  return 0;
}
