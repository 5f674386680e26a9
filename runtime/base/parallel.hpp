// Loops on several threads, for every room.
#pragma once

#include <cstddef>
#include <functional>

namespace wyvern {

/// Calls work(i) once for each i in [0, count) on up to `threads` threads (0: one per core), the
/// caller's among them. Where the system starts no further thread, the running ones do all the
/// work. Returns when all are done; throws the first exception of a call, after which no further
/// calls begin.
void in_parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace wyvern
