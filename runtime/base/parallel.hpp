// Loops on several threads, for every room.
#pragma once

#include <cstddef>
#include <functional>

namespace wyvern {

/// Calls work(i) once for each i in [0, count) on up to `threads` threads (0: one per core), the
/// caller's among them. Where the system starts no more, those there are do all of it. Returns when
/// all are done; throws the first of what calls threw, after which no further ones begin.
void in_parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace wyvern
