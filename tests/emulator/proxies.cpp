#include "tests/emulator/proxies.hpp"

#include <fmt/format.h>

namespace wyvern::emulator {

ProxyOrder::Pieces::Pieces(std::size_t threads, std::size_t pieces)
    : threads_(pieces), owned_(threads, std::vector<bool>(pieces)), list_(threads) {}

void ProxyOrder::Pieces::add(int thread, long piece) {
  const auto p = static_cast<std::size_t>(piece);
  const auto t = static_cast<std::size_t>(thread);
  if (piece < 0 || p >= threads_.size() || owned_[t][p]) return;
  owned_[t][p] = true;
  list_[t].push_back(piece);
  ++threads_[p];
}

void ProxyOrder::Pieces::clear(int thread) {
  const auto t = static_cast<std::size_t>(thread);
  for (const long piece : list_[t]) {
    owned_[t][static_cast<std::size_t>(piece)] = false;
    --threads_[static_cast<std::size_t>(piece)];
  }
  list_[t].clear();
}

bool ProxyOrder::Pieces::holds(long piece) const {
  const auto p = static_cast<std::size_t>(piece);
  return piece >= 0 && p < threads_.size() && threads_[p] > 0;
}

int ProxyOrder::Pieces::owner(long piece) const {
  for (std::size_t t = 0; t < owned_.size(); ++t)
    if (owned_[t][static_cast<std::size_t>(piece)]) return static_cast<int>(t);
  return -1;
}

ProxyOrder::ProxyOrder(std::size_t threads, std::size_t shared_bytes)
    : accesses_(threads, shared_bytes / kPiece), writes_(threads, shared_bytes / kPiece) {}

void ProxyOrder::fence(int thread) {
  accesses_.clear(thread);
  writes_.clear(thread);
}

std::string ProxyOrder::check_copy(long offset, std::int64_t bytes, bool into) const {
  const Pieces& pieces = into ? accesses_ : writes_;
  for (long piece = offset / kPiece; piece * kPiece < offset + bytes; ++piece)
    if (pieces.holds(piece))
      return fmt::format(
          "a TMA copy {} shared memory that thread {} has {} without a fence.proxy.async since",
          into ? "to" : "from", pieces.owner(piece), into ? "accessed" : "written");
  return {};
}

}  // namespace wyvern::emulator
