// The mbarriers of one block.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace wyvern::emulator {

/// Mbarriers by their offset in shared memory. What returns text returns what is wrong, or nothing.
class Barriers {
 public:
  void clear() { barriers_.clear(); }

  std::string init(long offset, unsigned arrivals, int thread);
  /// TMA copies see what `thread` has initialized.
  void fence(int thread);
  /// One arrival; the phase also waits for `bytes`.
  std::string arrive(long offset, unsigned bytes);
  /// Whether a TMA copy may use the barrier.
  std::string check_copy(long offset) const;
  /// A TMA load has written `bytes`.
  std::string complete(long offset, std::int64_t bytes);
  /// Whether there is such a barrier.
  std::string check(long offset) const;
  /// Whether the latest phase of this parity is complete.
  bool passed(long offset, unsigned parity) const;
  /// Whether no thread has arrived in its phase, as when the one before has just ended.
  bool begins(long offset) const;
  /// What the barrier's phase still waits for.
  std::string describe(long offset) const;

 private:
  struct Barrier {
    unsigned arrivals = 0;  ///< a phase takes
    unsigned missing = 0;   ///< of this phase
    std::int64_t bytes = 0;
    std::uint64_t phase = 0;
    int thread = 0;  ///< that initialized it
    bool fenced = false;
  };
  static std::string finish_phase(Barrier& barrier);

  std::map<long, Barrier> barriers_;
};

}  // namespace wyvern::emulator
