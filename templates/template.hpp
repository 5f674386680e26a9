// Templates: the stages that each covers, its configs and its launch, as data and functions; and
// the registry of all templates.
//
// A template is a folder of a family of templates/: contract.cpp, which defines the Template
// objects below, and one source file for each kind of device. Adding a folder is all it takes: the
// build embeds its sources and registers its contract, and plans, tuner, command, tests and
// benchmarks find it through all_templates().
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

#include "templates/signature.hpp"
#include "templates/tiled_view.hpp"

namespace wyvern {

enum class DeviceKind : std::uint8_t { cpu, cuda };
std::string_view to_string(DeviceKind kind) noexcept;

/// The facts of a target that decide which configs are legal on it and how they are launched.
struct Limits {
  std::int64_t shared_bytes = 0;  ///< shared memory one block may take (CUDA); scratch (CPU)
  int compute_capability = 0;     ///< 90 for sm_90 and sm_90a; 0 on a CPU
  int vector_bits = 0;            ///< widest vector register (CPU); 0 on CUDA
  int multiprocessors = 0;        ///< of a GPU that is present; 0 for an architecture, and on a CPU
  double bytes_per_us = 0;        ///< of a GPU's memory at its peak; 0: unknown
  bool wgmma = false;             ///< warpgroup products: sm_90a alone
  bool tensor_copies = false;     ///< TMA loads and stores by tensor maps: sm_90 and later
  int max_cluster = 1;            ///< most blocks of a cluster; 1: no clusters
};

/// Hardware that a template needs.
struct Needs {
  bool wgmma = false;
  bool tensor_copies = false;
  bool clusters = false;

  /// Empty if the target has all of it, else one sentence that names what is missing.
  std::string missing(const Limits& limits) const;
};

/// Chunk slots: exact for equal lengths, an upper bound computed without reading cu_seqlens for a
/// packed batch (each sequence ends at most one partial chunk).
std::int64_t chunk_slots(std::int64_t B, std::int64_t T, std::int64_t N, bool packed,
                         std::int64_t BT);

/// A stage that a template carries out.
struct Cover {
  const StageDefinition* stage = nullptr;
  /// Names that the template gives the stage's tensors, where it covers several stages: an output
  /// under the name of a later stage's input is that input.
  std::map<std::string, std::string, std::less<>> rename{};
  /// Operators have the stage exactly when these flags hold; else the stage's tensors are absent.
  std::optional<Presence> only_when{};
  /// An earlier kernel of the plan has done its work, by a stage of its own: this one neither reads
  /// nor writes its tensors, unless other covered stages do.
  bool done = false;

  Cover(const StageDefinition& of) : stage(&of) {}
  Cover(const StageDefinition& of, std::map<std::string, std::string, std::less<>> names)
      : stage(&of), rename(std::move(names)) {}

  /// The template's name of one of the stage's tensors.
  std::string_view local(std::string_view argument) const;
};

/// An output that a later covered stage reads and that is also written to memory.
struct Keep {
  std::string_view name;
  Presence when{};
  /// When this does not hold, only the last row of each chunk is written: later stages read no
  /// other.
  Presence whole{};
};

/// One argument of a template's kernel, under the template's name for it, and where it comes from.
struct Parameter : Argument {
  std::size_t cover = 0;  ///< the covered stage that has it; covers.size(): none, additional
  /// Its rows, or a pool's slots, have a stride that each launch gives. Set by registration.
  bool strided = false;
};

/// The stride of a contiguous tensor in elements: from a row of [B, T, ...] to the next token's, or
/// from a slot of a pool to the next.
std::int64_t dense_stride(const Argument& argument, const Spec& spec, const Extents& extents);
/// How many outer dimensions share the stride: 2 for rows of tokens [B, T], 1 for a pool's slots
/// [S].
int outer_dims(const Argument& argument);

/// A tensor map among a kernel's parameters: by it TMA loads and stores tiles of an argument. Where
/// the argument is strided, dimension 1 of the view counts tokens.
struct TensorMapUse {
  std::string_view name;      ///< of the parameter, a `wyvern::TensorMap`: "k_map"
  std::string_view argument;  ///< the tensor
  /// The view; dimensions may be 0 where the kernel loads and stores nothing.
  std::function<TiledView(const Spec&, const Extents&)> view;
  /// With these flags the tensor is present; the template has no legal config without them.
  Presence when{};
  std::size_t parameter = 0;  ///< which of the template's parameters it is; set by registration
};
inline constexpr std::size_t kMaxTensorMaps = 10;  ///< of one template
inline constexpr std::size_t kMaxStrided = 12;     ///< tensors of one template

/// The launch of one kernel: CUDA's grid and block, or the CPU's grid of block-function calls.
struct Geometry {
  std::array<std::int64_t, 3> grid{1, 1, 1};
  std::int64_t threads = 1;       ///< per block (CUDA); 1 on the CPU
  std::int64_t shared_bytes = 0;  ///< dynamic shared memory (CUDA); scratch per block (CPU)
  /// Blocks that run together and see each other's shared memory; each dimension divides the
  /// grid's.
  std::array<std::int64_t, 3> cluster{1, 1, 1};
  /// The kernel may start before the stream's previous kernel has ended; it waits for that one
  /// itself (griddepcontrol.wait) before it reads anything. A device that cannot overlap kernels
  /// runs it afterwards.
  bool programmatic = false;
};

/// Whether there is nothing to launch.
constexpr bool is_empty(const Geometry& g) {
  return g.grid[0] == 0 || g.grid[1] == 0 || g.grid[2] == 0;
}

/// The values a tunable may take, in the order the tuner tries them.
struct Tunable {
  std::string name;
  std::vector<Value> values;
  /// Kernels take it at launch, from Extents: none is compiled for a value of it.
  bool at_launch = false;

  Tunable(const TunableName& tunable, std::vector<Value> of)
      : name(tunable.name), values(std::move(of)) {}
  /// For tests of the search, with spaces of no kernel.
  Tunable(std::string tunable, std::vector<Value> of)
      : name(std::move(tunable)), values(std::move(of)) {}
};

/// Tunables that all templates of a plan agree on; 0: any.
struct PlanShape {
  std::int64_t BT = 0;   ///< tokens a chunk
  std::int64_t SEG = 0;  ///< chunks a segment, where long sequences are split

  // NOLINTNEXTLINE(google-explicit-constructor): a chunk size alone is a shape.
  PlanShape(std::int64_t chunk = 0, std::int64_t segment = 0) : BT(chunk), SEG(segment) {}
};

/// A plan's work as far as it is known before a launch. Without tokens if the device is unknown:
/// then only the number of launches counts.
struct Workload {
  Extents extents{};         ///< of a plan of the shape
  PlanShape shape{};         ///< SEG 0: sequences are not split
  std::int64_t longest = 0;  ///< rows of the longest sequence; extents.T counts the same rows
};

struct Template {
  std::string name;     ///< the folder: a stage, or a fused group's name
  std::string variant;  ///< "portable" (CUDA, sm_80 and up), "hopper", "cpu"
  DeviceKind device = DeviceKind::cuda;
  std::vector<Cover> covers;         ///< the stages it carries out, in order
  std::vector<Keep> keeps;           ///< outputs that later stages read and that are written too
  std::vector<Argument> additional;  ///< arguments beside its stages' tensors
  std::string summary;               ///< one line for `wyvern stages`
  /// What its source is specialized on. Registration adds the types and flags of its parameters.
  std::vector<AnyConstant> constants;
  std::vector<Tunable> tunables;
  std::vector<TensorMapUse> tensor_maps;  ///< they need needs.tensor_copies
  /// Tensors [B, T, ...] that may have strided rows: for each, in the order of the parameters, the
  /// kernel has an `int64 <name>_stride` after its tensor maps, elements from a row to the next
  /// one. Rows start at multiples of 16 bytes if they do in a contiguous tensor; sequences of a
  /// batch are T rows apart. For a pool of states [S, ...] it is the stride of slots.
  std::vector<std::string_view> strided{};
  Needs needs;
  std::string source;  ///< file under templates/; a contract gives its name in its own folder

  /// Empty when the config is legal for these constants on a target with these limits, else the
  /// reason. Needs are checked before; every tunable has a value when this is called.
  std::function<std::string(const Spec&, const Limits&)> illegal;
  /// True when the config is legal but compiles to what another config of the space also compiles
  /// to (precision of a product that runs on 16-bit tensor cores): the tuner skips it.
  std::function<bool(const Spec&)> redundant;
  /// Microseconds of a launch (cost.hpp); empty: derived from the stages. With it the default
  /// config is the cheapest, among equals the first in the order of tunables' values.
  std::function<double(const Spec&, const Workload&, const Limits&)> cost;
  /// Without a cost: sets every tunable but BT and SEG, which are already set, to the default. If
  /// that is illegal on a small target, the first legal config with that BT is the default.
  std::function<void(Spec&, const Limits&)> fallback;
  /// The launch, from the sizes and the device's facts (`limits.multiprocessors` is 0 where no
  /// device is present).
  std::function<Geometry(const Spec&, const Extents&, const Limits&)> geometry;

  /// The kernel's arguments in order: the covered stages' tensors but for those that pass only
  /// between them; index tables after the other inputs, outputs last. Set by registration.
  std::vector<Parameter> parameters;

  /// "fwd_h.portable": unique; names the template in stored measurements and plans.
  std::string id() const { return name + "." + variant; }
  bool carries_out(std::string_view stage) const;
  /// The problem's constants that the source is specialized on.
  Values values_of(const Constants& problem) const;
  const Tunable* tunable(std::string_view name) const;
  /// The part of a config that its source is specialized on.
  Config compiled(const Config& config) const;
  /// Empty when the target has what the template needs and the config is legal, else the reason.
  std::string problem(const Spec& spec, const Limits& limits) const;
};

/// Derives the template's parameters and checks it. Throws Error(kBadInput) that names the template
/// and what is wrong with it: a name that no covered stage has, an argument without a producer, a
/// type or flag that its source is not specialized on, ...
void register_template(Template& t);

/// Every template of the build, by name then variant. Built and checked on first use; thread-safe.
/// Throws Error(kBadInput) as register_template() does.
const std::vector<Template>& all_templates();

/// The template with this id, or null.
const Template* find_template(std::string_view id);

/// Every stage that a template of the build carries out, by name.
const std::vector<const StageDefinition*>& all_stages();

/// All legal, non-redundant configs of `t` for these constants and limits, in tunable order, with
/// the shape's values and a `precision` at least as accurate as `floor`. Empty on a target that
/// lacks what the template needs.
std::vector<Config> space(const Template& t, const Constants& constants, const Limits& limits,
                          Precision floor = Precision::tf32, PlanShape shape = {});

/// A complete, legal config of the shape of `work`, within `floor`: the cheapest where the template
/// states its cost, else fallback() if it is legal, else the first of the space; nothing when no
/// config of this shape is legal on the target.
std::optional<Config> default_config(const Template& t, const Constants& constants,
                                     const Limits& limits, Precision floor, const Workload& work);

}  // namespace wyvern
