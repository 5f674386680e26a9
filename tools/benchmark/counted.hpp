// Counts what a thread asks of the C library: memory, and locks. In the program that links
// counted.c these functions stand before the C library's (glibc's), for all its libraries.
#pragma once

#include <cstdint>

/// Of the calling thread since it began: malloc, calloc, realloc and aligned memory, which is what
/// `new` asks too; mutexes, spin locks and read-write locks that were locked or tried.
extern "C" std::int64_t wyvern_counted_allocations() noexcept;
extern "C" std::int64_t wyvern_counted_locks() noexcept;
