// The parts of the report's page, embedded from tools/wyvern/report/ and from Chart.js.
#pragma once

#include <string_view>

namespace wyvern::cli {

extern const std::string_view kReportPage, kReportStyle, kReportScript;
/// Chart.js; empty where it was missing at the build.
extern const std::string_view kReportCharts;

}  // namespace wyvern::cli
