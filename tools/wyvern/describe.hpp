// Problems, plans and devices as JSON and as text.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <string>

#include "tools/wyvern/output.hpp"

namespace wyvern::cli {

Json to_json(const Problem& problem);
Json to_json(const Plan& plan);
Json to_json(const DeviceInfo& device);
Json to_json(const Values& values);

/// One indented line per kernel.
std::string plan_text(const Plan& plan);

/// "exact winner", "nearest winner", "default configs", "given".
std::string_view origin_text(Origin origin);

}  // namespace wyvern::cli
