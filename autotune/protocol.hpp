// The pieces of the tuner's protocol (worker.hpp) as JSON.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "autotune/results.hpp"

namespace wyvern {

/// Parses a line from the other side. Nothing unless it is a JSON object and not nested deeper than
/// messages are, since printing a document recurses as deep as its levels.
std::optional<nlohmann::json> message_from(std::string_view line);

nlohmann::json to_json(const Problem& problem);
/// Options (true or false) that the document lacks have their defaults. Throws Error(kBadInput) for
/// a document that is not a problem.
Problem problem_from(const nlohmann::json& json);

nlohmann::json to_json(const Plan& plan);
/// Throws Error(kBadInput) for a document that is not a plan of this build's templates.
Plan plan_from(const nlohmann::json& json);

/// A worker's answer about a plan: status, detail, samples, clocks and error.
nlohmann::json to_json(const Outcome& outcome);
/// Nothing for a document that is not an answer, or that calls a plan ok without times above 0.
std::optional<Outcome> outcome_from(const nlohmann::json& json);

}  // namespace wyvern
