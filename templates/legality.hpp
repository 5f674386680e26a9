// Which configs are legal, asked of one config; space() in template.hpp lists them all.
#pragma once

#include <string>

#include "templates/template.hpp"

namespace wyvern {

/// Empty when the config is legal for the template with these constants on a target with these
/// limits: it has a value for every tunable and nothing else, each value is one of the tunable's,
/// its `precision` is at least as accurate as `floor`, the target has what the template needs and
/// the contract has no objection. Else the reason, which names the tunable. The legal configs are
/// those of space() and what it leaves out as redundant.
///
/// Any config may be asked about: `illegal`, and `geometry` after it, divide by tunables and count
/// up to them, and see only values that their template has. Takes about as long as `illegal`,
/// whatever the size of the space.
std::string config_problem(const Template& t, const Config& config, const Constants& constants,
                           const Limits& limits, Precision floor = Precision::tf32);

}  // namespace wyvern
