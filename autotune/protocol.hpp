// The pieces of the tuner's protocol (worker.hpp) as JSON.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <nlohmann/json.hpp>

namespace wyvern {

nlohmann::json to_json(const Problem& problem);
/// Throws Error(kBadInput) for a document that is not a problem.
Problem problem_from(const nlohmann::json& json);

nlohmann::json to_json(const Plan& plan);
/// Throws Error(kBadInput) for a document that is not a plan of this build's templates.
Plan plan_from(const nlohmann::json& json);

}  // namespace wyvern
