// The runtime: problem in, prepared operator out, launches that allocate and lock nothing.
//
//   wyvern::Runtime runtime;
//   wyvern::Device device = wyvern::Device::open("cuda:0");
//   wyvern::Operator op = runtime.prepare(device, problem);
//   auto workspace = device.allocate(op.workspace_bytes());
//   op.launch(arguments, workspace.get(), op.workspace_bytes(), stream);
#pragma once

#include <wyvern/config.hpp>
#include <wyvern/device.hpp>
#include <wyvern/error.hpp>
#include <wyvern/export.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/tensor.hpp>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace wyvern WYVERN_API {

class Cache;

/// One kernel of a plan: a template and values for all its tunables.
struct PlanStep {
  std::string template_id;
  Config config;
  bool operator==(const PlanStep&) const = default;
};

/// The templates that carry out one operator pass, in order.
using Plan = std::vector<PlanStep>;

/// Where a prepared operator's plan came from.
enum class Origin : std::uint8_t {
  exact,     ///< the winner tuned for this problem key
  nearest,   ///< that of the nearest problem whose plan can serve, or of another driver
  fallback,  ///< nothing tuned: the templates' default configs
  given,     ///< the caller named the plan
};
/// "exact", "nearest", "default", "given".
std::string_view to_string(Origin origin) noexcept;

struct PlanChoice {
  Plan plan;                         ///< empty with Origin::fallback
  Origin origin = Origin::fallback;  ///< fallback: no plan that is known can serve
  std::string passed_over = {};      ///< which plan would come before and why it cannot serve, a
                                     ///< clause; empty: none
};

/// Why a plan cannot serve the problem that is asked for, a clause; empty: it can.
using PlanCheck = std::function<std::string(const Plan&)>;

/// Answers "which plan for this problem on this device?". The cache is the usual one; a tuner that
/// tunes on a miss is another. Implementations are thread-safe and return nothing when they have
/// no answer; they do not throw.
///
/// Of the plans that are known to them the best one answers to which `check` has no objection: one
/// that was tuned for the very problem; else for it with other counts of tokens or sequences; else
/// with other heads, options, threads of a processor, or on another GPU of the architecture where
/// packs name that one alone, whichever are the least apart. Options count in this order, from the
/// least: states that are given or wanted; norms, gate and beta in the kernel, dtypes of beta and
/// g; chunk_size and intermediates that are kept; packed sequences.
/// No plan crosses operators, passes, dtypes, K, V, steps of a token, precision floors, or gates
/// that are there, or bounded, in one of the problems alone.
class PlanSource {
 public:
  virtual ~PlanSource() = default;
  /// `check` null: it has no objection to any plan.
  virtual std::optional<PlanChoice> find(const DeviceInfo& device, const ProblemKey& key,
                                         const PlanCheck& check) = 0;
  /// A number that changes when find() may answer otherwise than before, as far as this process
  /// knows: while it is the same, prepare() may spare itself the question for some milliseconds.
  /// Nothing: it always asks. Allocates nothing and takes no lock.
  [[nodiscard]] virtual std::optional<std::uint64_t> version() const noexcept { return {}; }
};

enum class TensorAccess : std::uint8_t { in, out, inout };

/// One tensor of a launch: its name, direction, shape and dtype.
struct TensorSpec {
  std::string_view name;
  TensorAccess access = TensorAccess::in;
  DType dtype = DType::fp32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  bool present = false;  ///< the problem asks for it; else it must be absent
  /// Whether the prepared operator takes the tensor with strided rows (<wyvern/tensor.hpp>), or a
  /// pool with strided slots; its plan decides. Always false in tensor_specs().
  bool strided = false;
  /// Leading dimensions that count what may be strided: [B, T] of rows of tokens, [slots] of a
  /// pool.
  int outer_dims = 2;
};

/// Every tensor of Arguments for a valid problem, in the order of Arguments.
[[nodiscard]] std::vector<TensorSpec> tensor_specs(const Problem& problem);

/// The tensors of a launch, named as in runtime/SPECIFICATION.md. A default-constructed view is an
/// absent tensor; which must be present tensor_specs() says. All pointers are on the operator's
/// device and stay valid until the work is done. No tensor that a launch writes (an output,
/// `state`, a kept intermediate) shares memory with another of its tensors or the workspace; inputs
/// may share theirs. The one update in place is `state`, with inplace_state.
///
/// A state is [N,HV,K,V], or [N,HV,V,K] with state_v_first. C is the problem's chunk_size, 64 when
/// unset. NT counts chunk slots: B ceil(T / C), or floor(T / C) + N for a packed batch, an upper
/// bound that needs no look at cu_seqlens; slots that no chunk uses hold zeros. Where a token has
/// num_householder = n steps, k, v, beta, the intermediates kept of them (Tinv, w, v_new) and their
/// gradients have n T rows for T, and chunks count these.
struct Arguments {
  TensorView q, k;           ///< [B,T,H,K]
  TensorView v;              ///< [B,T,HV,V]
  TensorView beta;           ///< [B,T,HV]
  TensorView erase;          ///< [B,T,HV,K], of an operator with an erase gate
  TensorView write;          ///< [B,T,HV,V], of an operator with a write gate
  TensorView g;              ///< [B,T,HV], or [B,T,HV,K] per key channel; absent without a gate
  TensorView initial_state;  ///< a state; with state_index [state_slots,HV,...]
  TensorView cu_seqlens;     ///< [N+1], packed batches
  TensorView A_log;          ///< [HV] fp32, with use_gate_in_kernel and has_A_log
  TensorView dt_bias;        ///< [HV], or [HV,K] per key channel; fp32; with has_dt_bias
  TensorView norm_weight;    ///< [V] fp32, with output_norm
  TensorView norm_gate;      ///< [B,T,HV,V], of the dtype of v, with output_norm
  TensorView do_;            ///< backward: "do", the gradient of o
  TensorView dht;            ///< backward: the gradient of the final state, fp32
  /// [N], the slot of each sequence's state; one outside [0, state_slots), such as -1, and 0 with
  /// null_slot_zero, makes a null sequence: it computes nothing, its rows of o and its final_state
  /// are 0, no slot is touched. With inplace_state a slot that a sequence writes is no other
  /// sequence's, read or written; that is not checked.
  TensorView state_index;
  /// [N], where each sequence's final state goes, with output_state_index: as state_index, of the
  /// same dtype. An index that is none of a slot in either makes a null sequence.
  TensorView output_state_index;
  TensorView has_initial_state;  ///< [N] boolean: false starts from zeros, whatever the slot holds
  /// [state_slots,HV] fp32 (without state_index [N,HV]), of `state` in float8: an element counts
  /// times the scale of its slot and head, which must be positive. Read, never written: a final
  /// state is divided by the scale of the slot that it goes to, and what is beyond the dtype's
  /// largest number becomes that number.
  TensorView state_scale;
  // Of the dtype of index tensors, in the recurrent pass.
  /// [N], with index_columns, where state_index is [N,index_columns]: a sequence starts from the
  /// slot in column num_accepted[n] - 1; a number outside 1 to index_columns, or an index there
  /// that is none of a slot, makes a null sequence. The state after token t goes to column t's
  /// slot; an index that is none of a slot, or no column: it is not written.
  TensorView num_accepted;
  /// [N], with intermediate_rows: the row of intermediate_states that sequence n's states go to, no
  /// other sequence's; one outside [0, intermediate_rows): they are not written, and with `parent`
  /// the sequence is a null one.
  TensorView intermediate_index;
  /// [N,draft_tokens], with Problem::parent: token t of sequence n goes on from the state after
  /// token parent[n,t] < t as intermediate_states has it, -1: from the sequence's start. Any other
  /// number makes a null token: its row of o is 0, its state is not written, and tokens that go on
  /// from it are null too, as are tokens past draft_tokens.
  TensorView parent;
  /// [N], of the dtype of index tensors, with checkpoint_offsets: after how many tokens of each
  /// sequence its state goes to `checkpoints`, a multiple of 16; 0 or any other number: none does.
  TensorView checkpoint_offsets;

  /// Intermediates that disable_recompute keeps: outputs of the forward pass, inputs of the
  /// backward pass with the same chunk_size. Of the inputs' dtype but for Aqk.
  TensorView Tinv;       ///< [B,T,HV,C]
  TensorView Aqk;        ///< [B,T,HV,C] fp32, with a gate per key channel
  TensorView w, qg, kg;  ///< [B,T,HV,K]; qg and kg with a gate per key channel
  TensorView h;          ///< [NT,HV,K,V], the state entering every chunk
  TensorView v_new;      ///< [B,T,HV,V]

  /// In and out: the pool of states [state_slots,HV,...] ([N,HV,...] without state_index), with
  /// inplace_state. Slots may be strided (<wyvern/tensor.hpp>).
  TensorView state;
  /// In and out: [checkpoint_rows,HV,...] states of checkpoint_dtype() with checkpoint_every, those
  /// of sequence n from row floor(len_0 / checkpoint_every) + ... of all before it on; [N,HV,...]
  /// with checkpoint_offsets. Other rows keep their bytes.
  TensorView checkpoints;
  TensorView o;            ///< out, [B,T,HV,V]
  TensorView final_state;  ///< out, a state, fp32
  /// Forward: out, [NT,HV,K,V] or [NT,HV,V,K], of the inputs' dtype. Recurrent: in and out,
  /// [intermediate_rows,draft_tokens,HV,...] states of state_dtype; those of no token keep their
  /// bytes.
  TensorView intermediate_states;
  TensorView dq, dk, dv, dbeta;   ///< out, each as its input
  TensorView derase, dwrite, dg;  ///< out, each as its input
  TensorView dA_log, ddt_bias;    ///< out, each as its input
  TensorView dinitial_state;      ///< out, a state, fp32

  /// The tensor of that name ("do" for do_). Throws Error(kBadInput) for an unknown one.
  TensorView& tensor(std::string_view name);
  const TensorView& tensor(std::string_view name) const;

  /// Optional host copy of cu_seqlens (N + 1 entries), not owned: checked in full before the
  /// launch. Without it a device-resident cu_seqlens is clamped into [0, T] on the device, so that
  /// a bad one cannot make a kernel read or write out of bounds; on the CPU cu_seqlens itself is
  /// always checked.
  std::span<const std::int64_t> cu_seqlens_host;
};

class OperatorImpl;

/// A prepared operator: compiled, loaded, ready. Immutable; copies share; thread-safe. It may
/// outlive the Runtime that made it.
class Operator {
 public:
  [[nodiscard]] const Problem& problem() const;
  [[nodiscard]] const Plan& plan() const;
  [[nodiscard]] Origin origin() const;
  /// Bytes a launch needs; the memory's content does not matter and need not outlive the launch.
  [[nodiscard]] std::size_t workspace_bytes() const;
  /// tensor_specs() of the problem, `strided` set where this plan takes strided rows.
  [[nodiscard]] const std::vector<TensorSpec>& tensors() const;

  /// Enqueues the pass on `stream` (runs it, on the CPU). `workspace` has `workspace_bytes`, at
  /// least workspace_bytes(), is aligned to 256 bytes, not shared with a launch in flight, and may
  /// be null when workspace_bytes() is 0. Allocates nothing (on the CPU a thread keeps the scratch
  /// memory that its first launches ask for), waits for no lock, synchronizes nothing; legal inside
  /// CUDA graph capture. Same inputs and plan, same device: bitwise the same outputs. Before
  /// anything is launched throws Error(kBadInput) that names a wrong tensor, a workspace that is
  /// too small or not aligned, or two tensors of which one is written and that share memory;
  /// Error(kUnavailable) when the driver refuses a launch. That pointers lead to memory of the
  /// device, as large as shape and size say, is the caller's promise: it cannot be checked.
  void launch(const Arguments& arguments, void* workspace, std::size_t workspace_bytes,
              Stream stream = nullptr) const;
  /// The same without the check of the workspace's size: the caller promises that it has
  /// workspace_bytes().
  void launch(const Arguments& arguments, void* workspace, Stream stream = nullptr) const;

  const OperatorImpl& impl() const { return *impl_; }
  explicit Operator(std::shared_ptr<const OperatorImpl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const OperatorImpl> impl_;
};

/// A stage of the chunked form on its own: one template, its tensors by their contract's names
/// (templates/README.md lists them). Immutable; copies share; thread-safe.
class Stage {
 public:
  const PlanStep& step() const;
  /// `tensors[i]` is the i-th argument of the template's contract (absent optional ones default).
  /// It has no workspace. Same promises as Operator::launch.
  void launch(std::span<const TensorView> tensors, Stream stream = nullptr) const;

  explicit Stage(std::shared_ptr<const OperatorImpl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const OperatorImpl> impl_;
};

struct RuntimeOptions {
  /// Null: the cache in its default directory. Give a Cache over another directory to use that.
  std::shared_ptr<Cache> cache;
  /// Null: winners from the cache.
  std::shared_ptr<PlanSource> plans;
  /// Threads that compile one plan's kernels; 0: one per core.
  unsigned compile_jobs = 0;
  /// Called with one sentence, from the thread that met it, when a plan cannot be used that was
  /// tuned for the problem, or where no other can for one alike, once for each problem but for its
  /// counts of tokens and sequences; and when a plan does not load, once for each problem key and
  /// plan, which this Runtime does not try again. Null: a line on stderr.
  std::function<void(const std::string&)> on_degraded = nullptr;
};

/// Finds plans, compiles, loads. Thread-safe; keeps each loaded kernel for its own lifetime. A
/// fork() waits until no other thread is in prepare(), so that the child may prepare and launch
/// too, but on a CPU only: a GPU's driver does not work in a child.
class Runtime {
 public:
  explicit Runtime(RuntimeOptions options = {});
  ~Runtime();

  /// The operator for this problem by the best plan known; by the default plan where that one is
  /// not legal or cannot be loaded, and always for a batch_invariant problem. Compiles kernels that
  /// the cache does not hold: milliseconds to seconds the first time, microseconds when all is
  /// loaded, whatever other threads compile meanwhile. A problem that the calling thread prepared
  /// recently takes no lock, allocates nothing and needs a tenth of a microsecond; it then sees a
  /// winner that another process stored 20 milliseconds late, and one that this process stored at
  /// once. Throws Error: kBadInput for an illegal problem or one of more blocks than a launch of
  /// the device may have, kUnavailable when a compiler is missing or no template fits the device.
  Operator prepare(const Device& device, const Problem& problem);
  /// The same by a given plan. Throws Error(kBadInput) when the plan does not carry out the
  /// problem, or names the step and the tunable where a config is not in its template's space for
  /// the problem and the device: a value for every tunable and nothing else, each one of the
  /// tunable's, legal together, and of the problem's precision and chunk size. A batch_invariant
  /// problem takes its default plan only.
  Operator prepare(const Device& device, const Problem& problem, const Plan& plan);
  /// As the first, by the best plan that `plans` knows and not the runtime's own source.
  Operator prepare(const Device& device, const Problem& problem, PlanSource& plans);

  /// One template on its own, specialized on the problem's dims, dtypes and options, at its sizes
  /// and scale. Gates are summed as they are (an operator bounds them at -24).
  Stage prepare_stage(const Device& device, const PlanStep& step, const Problem& problem);

  /// How many kernels were compiled by this runtime (not found loaded or in the cache).
  [[nodiscard]] std::int64_t compiled() const;
  Cache& cache();  ///< lives as long as the runtime

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Every plan that carries out the problem on the device with chunk size BT, each step with its
/// default config: all ways to cover the operator's stages by templates of the build. Empty when
/// some stage has no legal config of this BT. Of a batch_invariant problem the default plan, if it
/// has this BT. Throws Error(kBadInput) for an illegal problem and
/// for a BT below 1.
[[nodiscard]] std::vector<Plan> plans(const Device& device, const Problem& problem,
                                      std::int64_t BT);

}  // namespace wyvern WYVERN_API
