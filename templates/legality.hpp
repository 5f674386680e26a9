// Whether one config is legal; space() in template.hpp lists all legal configs.
#pragma once

#include <string>

#include "templates/template.hpp"

namespace wyvern {

/// Empty when the config is legal for the template with these constants on a target with these
/// limits: it has a value for every tunable and nothing else, each value is one of the tunable's,
/// its `precision` is at least as accurate as `floor`, the target has what the template needs and
/// the contract's illegal() has no objection. Else the reason, which names the tunable. Redundant
/// configs, which space() leaves out, are legal too.
///
/// Takes any config: values that the template does not have never reach `illegal` and `geometry`,
/// which divide by tunables. Takes about as long as `illegal`, whatever the size of the space.
std::string config_problem(const Template& t, const Config& config, const Constants& constants,
                           const Limits& limits, Precision floor = Precision::tf32);

}  // namespace wyvern
