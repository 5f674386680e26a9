// Claims: one lock file for all artifacts, a byte for each.
//
// Locks are of the open file description (fcntl's OFD locks), so that they hold among the threads
// of a process as among processes and end when the last descriptor closes, even by SIGKILL. The
// file stays behind empty: removing a lock file lets two processes lock two files of one name.
#include <wyvern/sha256.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "cache/cache.hpp"
#include "cache/trust.hpp"

namespace wyvern {
namespace {

constexpr std::chrono::milliseconds kShortestNap{1}, kLongestNap{20};

/// Where in the file the key's byte is: 60 bits of its digest.
off_t place_of(std::string_view key) {
  return static_cast<off_t>(std::stoull(sha256_hex(key).substr(0, 15), nullptr, 16));
}

bool lock(int descriptor, off_t place) {
  struct flock range{};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = place;
  range.l_len = 1;
  return ::fcntl(descriptor, F_OFD_SETLK, &range) == 0;
}

}  // namespace

ArtifactClaim::ArtifactClaim(ArtifactClaim&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      waited_(other.waited_),
      in_vain_(other.in_vain_),
      slept_(other.slept_) {}

ArtifactClaim& ArtifactClaim::operator=(ArtifactClaim&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(waited_, other.waited_);
  std::swap(in_vain_, other.in_vain_);
  std::swap(slept_, other.slept_);
  return *this;
}

ArtifactClaim::~ArtifactClaim() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

ArtifactClaim Cache::claim_artifact(std::string_view key,
                                    std::chrono::steady_clock::time_point give_up) const {
  ArtifactClaim claim;
  if (file().empty()) return claim;
  if (const Trust trust = trust_in(file()); !trust.refusal.empty() || trust.read_only) return claim;
  const std::string path = file().string() + ".claims";
  claim.descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (claim.descriptor_ < 0) return claim;
  const off_t place = place_of(key);
  for (auto nap = kShortestNap; !lock(claim.descriptor_, place);
       nap = std::min(2 * nap, kLongestNap)) {
    // Anything but another's lock is a file system that has none.
    if (errno != EAGAIN && errno != EACCES) break;
    claim.waited_ = true;
    claim.in_vain_ = std::chrono::steady_clock::now() >= give_up;
    if (claim.in_vain_) break;
    std::this_thread::sleep_for(nap);
    claim.slept_ += nap;
  }
  return claim;
}

}  // namespace wyvern
