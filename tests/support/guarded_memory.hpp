// Host memory between inaccessible pages.
#pragma once

#include <cstddef>
#include <string>

namespace wyvern::testing {

/// `size` bytes with the given alignment; the first or the last one borders on an inaccessible
/// page; on the other side are at least `slack` bytes, and then such a page too. An access to
/// either page ends the process with a line on stderr that has the name: "q was touched 8 bytes
/// past its end". Not thread-safe; two objects may be used in two threads.
class GuardedMemory {
 public:
  enum class Against { start, end };

  /// `alignment`: a power of two, at most 4096. Where `size` is no multiple of it, up to
  /// `alignment` - 1 bytes are left between the last byte and the page.
  GuardedMemory(std::string name, std::size_t size, std::size_t alignment, std::size_t slack,
                Against against);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  std::byte* data() const { return data_; }
  /// All that may be touched: the bytes and what is left on either side.
  std::byte* first() const { return first_; }
  std::size_t accessible() const { return accessible_; }

  /// From now on a write ends the process too: "q was written".
  void make_read_only();

 private:
  std::byte* first_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t accessible_ = 0;
  std::size_t slot_;
};

}  // namespace wyvern::testing
