// The conditions under which a row of the cache was measured.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include "cache/cache.hpp"

namespace wyvern {

/// The problem's exact extents, this host, and the device's present state. The caller sets the
/// lengths of a packed batch and the regime. On a GPU the first call takes tens of milliseconds.
Setting setting_of(const Device& device, const Problem& problem);

}  // namespace wyvern
