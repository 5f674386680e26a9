// Files of problems to tune, and the parts of them that machines of a fleet take.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

struct ManifestEntry {
  std::size_t line = 0;  ///< from 1
  std::string call;      ///< of a preset's model; empty without one
  Selection selection;
};

/// The calls of a line's preset that its options do not go with.
struct LeftOutEntry {
  std::size_t line = 0;
  std::vector<LeftOutCall> calls;
};

struct Manifest {
  std::vector<ManifestEntry> entries;
  std::vector<LeftOutEntry> left_out;
};

/// The problems of a manifest: one JSON object a line, {"operator": OP} and options of `wyvern
/// tune` that select a problem by their names without dashes: {"operator": "kda", "preset":
/// "kimi-linear", "tokens": 8192, "pass": "backward", "use_qk_l2norm": true}. A shape may be an
/// object, seqlens a list. Or {"operator": OP, "problem": {"T": 64, ...}}, fields of Problem as
/// --problem has them. Empty lines are passed over; a problem that is there twice counts once.
/// Throws Error(kBadInput) that names the line.
Manifest parse_manifest(std::string_view text);

struct Shard {
  std::size_t index = 0, count = 1;
};

/// The shard of --shard "I/N", or of "N" with the variables of a Slurm array or an indexed
/// Kubernetes job, or of these alone. `variable` is getenv() as a rule; null: not set. Throws
/// Error(kBadInput).
Shard find_shard(const std::optional<std::string>& text,
                 const std::function<const char*(const char*)>& variable);

/// Which shard of `count` a problem belongs to: by a hash of the problem, so that every machine
/// agrees, even with other problems in its manifest.
std::size_t shard_of(const Problem& problem, std::size_t count);

}  // namespace wyvern::cli
