// The report of a cache's tunings, as a page for people and a document for tools.
#pragma once

#include <wyvern/device.hpp>

#include <string>

#include "cache/cache.hpp"
#include "tools/wyvern/output.hpp"

namespace wyvern::cli {

/// All that the page shows, as one document: provenance, problems with their stages, samples and
/// tunables, errors, compile times, failures. Floors are given for winners whose device this
/// machine has; on a CPU its rates are measured for half a second.
Json report_data(const Cache& cache);

/// The page: HTML with everything in it.
std::string report_page(const Json& data);
/// Google Benchmark's JSON: an iteration for each sample, and the medians.
Json benchmark_json(const Json& data);
/// Chrome's trace format: the stages of each winner one after another, a problem a process.
Json chrome_trace(const Json& data);

}  // namespace wyvern::cli
