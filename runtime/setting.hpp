// Where and how a row of the cache was measured.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include "cache/cache.hpp"

namespace wyvern {

/// The problem's exact extents, this host, and the device's state now. Lengths of a packed batch's
/// sequences and the regime are left to the caller. On a GPU the first call takes tens of
/// milliseconds.
Setting setting_of(const Device& device, const Problem& problem);

}  // namespace wyvern
