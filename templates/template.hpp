// What a template is: its contract as data and functions, and the registry of all of them.
//
// A template is a folder of templates/: contract.cpp, which defines the Template objects below, and
// one source file per kind of device. Adding a folder is all it takes: the build embeds its sources
// and registers its contract, and plans, tuner, command, tests and benchmarks find it through
// all_templates().
#pragma once

#include <wyvern/config.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern {

enum class DeviceKind : std::uint8_t { cpu, cuda };
std::string_view to_string(DeviceKind kind) noexcept;

/// The figures of a target that decide which configs are legal on it.
struct Limits {
  std::int64_t shared_bytes = 0;  ///< shared memory one block may take (CUDA); scratch (CPU)
  int compute_capability = 0;     ///< 90 for sm_90a; 0 on a CPU
  int vector_bits = 0;            ///< widest vector register (CPU); 0 on CUDA
};

/// What a launch knows and a compilation does not. Passed by value as the last argument of every
/// CUDA kernel and by pointer to every CPU block function; templates/common declares the same
/// layout for device code.
struct Extents {
  std::int64_t B = 0;        ///< batch size; 1 for a packed batch
  std::int64_t T = 0;        ///< tokens per sequence; total tokens of a packed batch
  std::int64_t N = 0;        ///< sequences
  std::int64_t NT = 0;       ///< chunk slots over all sequences; an upper bound for a packed batch
  std::int64_t NS = 0;       ///< segment slots over all sequences, as NT
  std::int64_t S = 0;        ///< slots of the pool of states that `recurrent` reads and writes
  float scale = 0.0F;        ///< factor on o
  float gate_floor = 0.0F;   ///< chunk_local_cumsum raises each g to at least this; -inf: leaves it
  float lower_bound = 0.0F;  ///< of the bounded gate, spec section 4
};

/// Chunk slots: exact for equal lengths, an upper bound computed without reading cu_seqlens for a
/// packed batch (each sequence ends at most one partial chunk).
std::int64_t chunk_slots(std::int64_t B, std::int64_t T, std::int64_t N, bool packed,
                         std::int64_t BT);

enum class Access : std::uint8_t { in, out, inout };

/// One tensor of a template's contract, in the order of the kernel's parameters. Kernels receive
/// a null pointer for an absent optional argument.
struct Argument {
  std::string name;  ///< canonical tensor name; plans connect stages by it
  Access access = Access::in;
  std::string dtype;  ///< "fp32", ..., or the name of a dtype constant such as "DTYPE"
  /// "B", "T", "N", "NT", "NS", "S", "N+1", a constant, a tunable or a number.
  std::vector<std::string> shape;
  /// Flags that must all hold for it to be there: "INITIAL_STATE", "QK_L2NORM,!VECTOR_GATE" (not a
  /// vector gate); empty: always.
  std::string present;
};

/// Whether the flags of `argument.present` hold.
bool is_present(const Argument& argument, const Values& constants);

/// The launch of one kernel: CUDA's grid and block, or the CPU's grid of block-function calls.
struct Geometry {
  std::array<std::int64_t, 3> grid{1, 1, 1};
  std::int64_t threads = 1;       ///< per block (CUDA); 1 on the CPU
  std::int64_t shared_bytes = 0;  ///< dynamic shared memory (CUDA); scratch per block (CPU)
};

/// The values a tunable may take, in the order the tuner tries them.
struct Tunable {
  std::string name;
  std::vector<Value> values;
};

struct Template {
  std::string name;     ///< the folder: a stage, or a fused group's name
  std::string variant;  ///< "portable" (CUDA, sm_80 and up), "cpu", ...
  DeviceKind device = DeviceKind::cuda;
  std::vector<std::string> stages;  ///< the stages it carries out, in order
  std::string summary;              ///< one line for `wyvern stages`
  std::vector<Argument> arguments;
  std::vector<std::string> constants;  ///< problem constants its source is specialized on
  std::vector<Tunable> tunables;
  std::string source;  ///< file under templates/, e.g. "fwd_h/portable.cu"

  /// Empty when the config is legal for these constants on a target with these limits, else the
  /// reason. Every tunable is present in the config when this is called.
  std::function<std::string(const Values& constants, const Config&, const Limits&)> illegal;
  /// True when the config is legal but compiles to what another config of the space also compiles
  /// to (precision of a product that runs on 16-bit tensor cores): the tuner skips it.
  std::function<bool(const Values& constants, const Config&)> redundant;
  /// The config to use when nothing is tuned, for the given BT; may be illegal on a small target,
  /// then the first legal config with that BT is used.
  std::function<Config(const Values& constants, const Limits&, std::int64_t BT)> fallback;
  std::function<Geometry(const Values& constants, const Config&, const Extents&)> geometry;

  /// "fwd_h.portable": unique, and what measurements and plans are stored under.
  std::string id() const { return name + "." + variant; }
  bool covers(std::string_view stage) const;
  const Tunable* tunable(std::string_view name) const;
};

/// Every template of the build, by name then variant. Built on first use; thread-safe.
const std::vector<Template>& all_templates();

/// The template with this id, or null.
const Template* find_template(std::string_view id);

/// Tunables that all templates of a plan agree on; 0: any.
struct PlanShape {
  std::int64_t BT = 0;   ///< tokens a chunk
  std::int64_t SEG = 0;  ///< chunks a segment, where long sequences are split

  // NOLINTNEXTLINE(google-explicit-constructor): a chunk size alone is a shape.
  PlanShape(std::int64_t chunk = 0, std::int64_t segment = 0) : BT(chunk), SEG(segment) {}
};

/// All legal, non-redundant configs of `t` for these constants and limits, in tunable order; with
/// `floor`, those whose `precision` is at least as accurate; those that have the shape's values.
std::vector<Config> space(const Template& t, const Values& constants, const Limits& limits,
                          Precision floor = Precision::tf32, PlanShape shape = {});

/// A complete, legal config: fallback() if it is legal, within `floor` and of the shape, else the
/// first of the space; nothing when no config of this shape is legal on the target.
std::optional<Config> default_config(const Template& t, const Values& constants,
                                     const Limits& limits, Precision floor, PlanShape shape);

/// The embedded text of a file under templates/; throws Error(kBadInput) for an unknown name.
std::string_view source_text(std::string_view path);

/// The source to compile: the template's file with its includes expanded once each (with #line, so
/// that errors name the file), after a preamble that defines every constant and tunable.
/// A file named in `overrides` has the text given there instead of its own: this is how the
/// emulator of tests/emulator puts itself in the place of the hardware.
using SourceOverrides = std::map<std::string, std::string, std::less<>>;
std::string specialize(const Template& t, const Values& constants, const Config& config,
                       const SourceOverrides& overrides = {});

/// Every kernel's entry point.
inline constexpr std::string_view kEntryPoint = "wyvern_kernel";

}  // namespace wyvern
