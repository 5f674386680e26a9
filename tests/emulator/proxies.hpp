// The order between ordinary accesses to shared memory and those of TMA copies and wgmma, which
// only fence.proxy.async by the thread that made the former gives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace wyvern::emulator {

/// Which threads have accessed which pieces of 16 bytes since their last fence. Offsets are into a
/// block's shared memory; what lies outside is passed over.
class ProxyOrder {
 public:
  ProxyOrder() = default;
  ProxyOrder(std::size_t threads, std::size_t shared_bytes);

  /// The thread reads or writes the piece that has this offset.
  void touch(int thread, long offset) { accesses_.add(thread, offset / kPiece); }
  /// It writes it.
  void write(int thread, long offset) { writes_.add(thread, offset / kPiece); }
  void fence(int thread);

  /// What is wrong with a TMA copy to (`into`) or from these bytes that starts now, or nothing.
  std::string check_copy(long offset, std::int64_t bytes, bool into) const;
  /// Whether some thread has written the piece and not fenced since.
  bool written(long offset) const { return writes_.holds(offset / kPiece); }

 private:
  static constexpr long kPiece = 16;

  /// The pieces of each thread.
  class Pieces {
   public:
    Pieces() = default;
    Pieces(std::size_t threads, std::size_t pieces);
    void add(int thread, long piece);
    void clear(int thread);
    bool holds(long piece) const;
    int owner(long piece) const;

   private:
    std::vector<int> threads_;              ///< how many have it, for each piece
    std::vector<std::vector<bool>> owned_;  ///< [thread][piece]
    std::vector<std::vector<long>> list_;   ///< what is set above
  };

  Pieces accesses_, writes_;
};

}  // namespace wyvern::emulator
