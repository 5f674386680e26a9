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
  nearest,   ///< the winner of the nearest tuned problem, or one tuned with another driver
  fallback,  ///< no winner: the default plan
  given,     ///< the caller named the plan
};
/// "exact", "nearest", "default", "given".
std::string_view to_string(Origin origin) noexcept;

struct PlanChoice {
  Plan plan;                         ///< empty with Origin::fallback
  Origin origin = Origin::fallback;  ///< fallback: no known plan is legal for the problem
  std::string passed_over = {};      ///< a clause: which plan came first and why it is not legal;
                                     ///< empty: none came first
};

/// Says in a clause why a plan is not legal for the problem; empty: it is legal.
using PlanCheck = std::function<std::string(const Plan&)>;

/// Finds the plan of a problem on a device. The cache is one implementation, a tuner that tunes on
/// a miss another. Implementations are thread-safe, do not throw, and return nothing where they
/// know no plan.
///
/// They return the best known plan that `check` accepts: first one tuned for this problem; then for
/// this problem with other counts of tokens or sequences; then for the nearest problem with other
/// heads, options, or threads of a processor, or on another GPU of the architecture where packs
/// name only that GPU. Differences in options count in this order, the least first: states that are
/// given or output; norms, gate and beta in the kernel, dtypes of beta and g; chunk_size and
/// written intermediates; packed sequences. Operator, pass, dtype, K, V, steps per token and
/// precision must be the same, and both problems or neither must have a gate, and a bounded one.
class PlanSource {
 public:
  virtual ~PlanSource() = default;
  /// A null `check` accepts every plan.
  virtual std::optional<PlanChoice> find(const DeviceInfo& device, const ProblemKey& key,
                                         const PlanCheck& check) = 0;
  /// A number that changes when this process knows that find() may return another plan. While it
  /// is the same, prepare() may skip find() for some milliseconds; without a number it never skips.
  /// Allocates nothing and takes no lock.
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
  bool present = false;  ///< true: the problem requires it; false: it must be absent
  /// Whether the operator's plan accepts the tensor with strided rows (<wyvern/tensor.hpp>), or a
  /// pool with strided slots. Always false in tensor_specs().
  bool strided = false;
  /// Leading dimensions whose elements may be strided: 2 for rows of tokens [B, T], 1 for the slots
  /// of a pool.
  int outer_dims = 2;
};

/// Every tensor of Arguments for a valid problem, in the order of Arguments.
[[nodiscard]] std::vector<TensorSpec> tensor_specs(const Problem& problem);

/// What messages call the tensor of this name, where a caller's own interface has other names.
/// Gives its argument or a literal.
using ShownName = const char* (*)(const char* name);

/// The tensors of a launch, named as in runtime/SPECIFICATION.md. A default-constructed view is an
/// absent tensor; tensor_specs() says which must be present. All pointers are on the operator's
/// device and stay valid until the work is done. A tensor that a launch writes (an output, `state`,
/// an intermediate of disable_recompute, o_raw) must not share memory with another tensor or the
/// workspace; inputs may share memory. Only `state`, with inplace_state, and `conv_state` are
/// updated in place.
///
/// A state is [N,HV,K,V], or [N,HV,V,K] with state_v_first. C is the problem's chunk_size, 64 when
/// unset. NT counts chunk slots: B ceil(T / C), or floor(T / C) + N for a packed batch, an upper
/// bound for any cu_seqlens; slots that no chunk uses hold zeros. With num_householder = n steps a
/// token, k, v, beta, v_new and the gradients of k, v and beta have n T rows instead of T, and
/// chunks count these rows.
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
  /// With short_conv = W, of C = H K + n (H K + HV V) channels (conv_channels()): those of q, then
  /// of each step of k, then of each step of v. [C,W], the weight of the newest row last, and [C],
  /// both of conv_dtype.
  TensorView conv_weight, conv_bias;
  /// [N,C,W-1], of the dtype of q, with initial_conv_state: the rows before each sequence's first,
  /// the newest last; with state_index [state_slots,C,W-1].
  TensorView initial_conv_state;
  TensorView do_;  ///< backward: "do", the gradient of o
  TensorView dht;  ///< backward: the gradient of the final state, fp32
  /// Backward, with output_conv_state: the gradient of final_conv_state, as it.
  TensorView dfinal_conv_state;
  /// [N], the slot of each sequence's state. An index outside [0, state_slots), such as -1, and 0
  /// with null_slot_zero, makes a null sequence: its rows of o and its final_state are 0, and it
  /// reads and writes no slot. With inplace_state no other sequence may read or write a slot that a
  /// sequence writes; launches do not check this.
  TensorView state_index;
  /// [N], with output_state_index: the slot of each sequence's final state, of state_index's dtype.
  /// An index that names no slot, here or in state_index, makes a null sequence.
  TensorView output_state_index;
  TensorView has_initial_state;  ///< [N] boolean: false starts from zeros, not from the slot
  /// [state_slots,HV] fp32 (without state_index [N,HV]), for a float8 `state`: each element is
  /// multiplied by the scale of its slot and head, which must be positive. A launch reads scales
  /// and never writes them: it divides a final state by the scale of its slot, and clamps it to the
  /// dtype's largest number.
  TensorView state_scale;
  // Of the dtype of index tensors, in the recurrent pass.
  /// [N], with index_columns, where state_index is [N,index_columns]: a sequence starts from the
  /// slot in column num_accepted[n] - 1. A number outside 1 to index_columns, or an index there
  /// that names no slot, makes a null sequence. The state after token t goes to the slot in column
  /// t; without such a column, or where its index names no slot, it is not written.
  TensorView num_accepted;
  /// [N], with intermediate_rows: the row of intermediate_states for sequence n's states; no two
  /// sequences may have the same row. For a row outside [0, intermediate_rows) they are not
  /// written, and with `parent` the sequence is a null sequence.
  TensorView intermediate_index;
  /// [N,draft_tokens], with Problem::parent: token t of sequence n continues from the state after
  /// token parent[n,t] < t in intermediate_states; -1: from the sequence's start. Any other number
  /// makes a null token: its row of o is 0 and its state is not written. Tokens that continue from
  /// a null token are null, as are tokens past draft_tokens.
  TensorView parent;
  /// [N], of the dtype of index tensors, with checkpoint_offsets: sequence n's state after this
  /// many tokens, a multiple of 16, goes to `checkpoints`. For 0 or any other number none does.
  TensorView checkpoint_offsets;

  /// Intermediates that disable_recompute keeps: outputs of the forward pass, inputs of the
  /// backward pass on the same device with the same chunk_size. h and v_new alone, but with a gate
  /// per key channel. All but Aqk have the inputs' dtype.
  TensorView Tinv;       ///< [B,T,HV,C], with a gate per key channel
  TensorView Aqk;        ///< [B,T,HV,C] fp32, with a gate per key channel
  TensorView w, qg, kg;  ///< [B,T,HV,K], with a gate per key channel
  TensorView h;          ///< [NT,HV,K,V], the state entering every chunk
  TensorView v_new;      ///< [B,T,HV,V]
  /// [B,T,HV,V], of the dtype of v: o before the norm of output_norm, rounded. Out in the forward
  /// pass with keep_output, an input of the backward pass.
  TensorView o_raw;

  /// In and out: the pool of states [state_slots,HV,...] ([N,HV,...] without state_index), with
  /// inplace_state. Slots may be strided (<wyvern/tensor.hpp>).
  TensorView state;
  /// In and out, states of checkpoint_dtype(). With checkpoint_every [checkpoint_rows,HV,...]:
  /// sequence n's begin at the row sum over i < n of floor(len_i / checkpoint_every). With
  /// checkpoint_offsets [N,HV,...]. Other rows keep their bytes.
  TensorView checkpoints;
  TensorView o;            ///< out, [B,T,HV,V], of the dtype of v or of output_dtype
  TensorView final_state;  ///< out, a state, fp32
  /// Forward: out, [NT,HV,K,V] or [NT,HV,V,K], of the inputs' dtype. Recurrent: in and out,
  /// [intermediate_rows,draft_tokens,HV,...] states of state_dtype; entries without a token keep
  /// their bytes.
  TensorView intermediate_states;
  /// Out, [N,C,W-1], of the dtype of q: the last W - 1 rows of initial_conv_state and the sequence,
  /// as they were given; 0 of a null sequence.
  TensorView final_conv_state;
  /// Out, fp32, with output_dtype: the scale of each 128 columns of o, which count times it.
  /// [B T, HV V / 128], or with output_scale_tokens_last [HV V / 128, B T rounded up to a multiple
  /// of 4], in which columns of no token are 0.
  TensorView o_scale;
  /// In and out, with inplace_conv_state: [state_slots,C,L], or with conv_tokens_first
  /// [state_slots,L,C] ([N,...] without state_index), of the dtype of q, L = conv_columns. A
  /// sequence has the slots that it has of `state`; with index_columns that of column 0 of
  /// state_index alone, whose columns num_accepted[n] - 1 on are its window, and of whose columns
  /// the first become the last short_conv - 2 of these and then the rows of its tokens. Slots may
  /// be strided (<wyvern/tensor.hpp>).
  TensorView conv_state;
  /// In and out, of the dtype of q, with short_conv and intermediate_rows:
  /// [intermediate_rows,draft_tokens,C,W-1], or with conv_tokens_first [..,W-1,C]: the window
  /// behind each token, where intermediate_states has its state. Entries without a token keep their
  /// bytes.
  TensorView intermediate_conv_states;
  /// Out, each as its input; of dq, dk and dv behind short_conv rows of tokens may be strided.
  TensorView dq, dk, dv, dbeta;
  TensorView derase, dwrite, dg;  ///< out, each as its input
  TensorView dA_log, ddt_bias;    ///< out, each as its input
  TensorView dnorm_weight;        ///< out, as its input
  TensorView dnorm_gate;          ///< out, as its input; rows of tokens may be strided
  TensorView dinitial_state;      ///< out, a state, fp32
  /// Out, [C,W] and [C], fp32 whatever conv_dtype is.
  TensorView dconv_weight, dconv_bias;
  TensorView dinitial_conv_state;  ///< out, as its input
  /// Out, of a problem with `summary`: [N,HV,K,V], or with transition [N,HV,K,V+K], fp32, K first
  /// whatever state_v_first is. Row k has V elements of R, then K of M.
  TensorView summary;
  TensorView dsummary;  ///< out, of a backward problem with `summary`: [N,HV,K,V], fp32
  /// [NS,HV,K,K] and [NS,HV,K,V], fp32, with segment_chunks: of each segment of so many chunks M
  /// and R of S -> M S + R. Out of a problem with `summary`, an input of another, whose tokens and
  /// chunk_size are the same. NS is B ceil(n T / L), B or more, with L the rows of a segment and n
  /// num_householder.
  TensorView segment_M, segment_R;

  /// The tensor of that name ("do" for do_). Throws Error(kBadInput) for an unknown one.
  TensorView& tensor(std::string_view name);
  const TensorView& tensor(std::string_view name) const;

  /// Optional host copy of cu_seqlens (N + 1 entries), not owned, which a launch checks in full.
  /// Without it a GPU's kernels clamp cu_seqlens to [0, T], so that a bad one cannot make them read
  /// or write out of bounds. On the CPU a launch always checks cu_seqlens itself.
  std::span<const std::int64_t> cu_seqlens_host;
  ShownName shown_name = nullptr;  ///< null: messages call tensors by the names above
};

class OperatorImpl;

/// A prepared operator: compiled, loaded, ready to launch. Immutable and thread-safe; copies share
/// one object. It may outlive the Runtime that made it.
class Operator {
 public:
  [[nodiscard]] const Problem& problem() const;
  [[nodiscard]] const Plan& plan() const;
  [[nodiscard]] Origin origin() const;
  /// Bytes of workspace that a launch needs. Its content need not be initialized before or
  /// preserved after.
  [[nodiscard]] std::size_t workspace_bytes() const;
  /// tensor_specs() of the problem, `strided` set where this plan takes strided rows.
  [[nodiscard]] const std::vector<TensorSpec>& tensors() const;

  /// Enqueues the pass on `stream`; on the CPU runs it. `workspace` has `workspace_bytes`, at least
  /// workspace_bytes(), is aligned to 256 bytes, is not used by another launch in flight, and may
  /// be null when workspace_bytes() is 0. A launch allocates nothing (on the CPU a thread keeps the
  /// scratch memory of its first launches), waits for no lock, synchronizes nothing, and is legal
  /// inside CUDA graph capture. The same inputs, plan and device give bitwise the same outputs.
  /// Throws, before it launches anything, Error(kBadInput) that names a wrong tensor, a workspace
  /// that is too small or not aligned, or a written tensor that shares memory with another one;
  /// Error(kUnavailable) when the driver refuses a launch. It cannot check that pointers lead to
  /// device memory as large as the shapes say: the caller must make sure.
  void launch(const Arguments& arguments, void* workspace, std::size_t workspace_bytes,
              Stream stream = nullptr) const;
  /// The same without a check of the workspace's size, which must be at least workspace_bytes().
  void launch(const Arguments& arguments, void* workspace, Stream stream = nullptr) const;

  const OperatorImpl& impl() const { return *impl_; }
  explicit Operator(std::shared_ptr<const OperatorImpl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const OperatorImpl> impl_;
};

/// One stage of the chunked form by one template. templates/README.md lists its tensors. Immutable
/// and thread-safe; copies share one object.
class Stage {
 public:
  const PlanStep& step() const;
  /// `tensors[i]` is the i-th argument of the template's contract; an absent optional tensor is a
  /// default-constructed view. A stage has no workspace; else as Operator::launch.
  void launch(std::span<const TensorView> tensors, Stream stream = nullptr) const;

  explicit Stage(std::shared_ptr<const OperatorImpl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const OperatorImpl> impl_;
};

/// Computes the state that enters each range of tokens from the ranges' maps of states (context
/// parallelism, section 11 of runtime/SPECIFICATION.md).
struct FoldOptions {
  std::int64_t ranges = 0;  ///< of all ranks, 1 to 65535
  std::int64_t HV = 0;      ///< value heads, of a dense batch times B
  std::int64_t K = 0, V = 0;
  bool transition = false;  ///< summaries hold M: some range has a sequence that goes through it

  bool operator==(const FoldOptions&) const = default;
};

/// The tensors of a fold, on its device, contiguous. States are [K,V], whatever state_v_first is.
struct FoldArguments {
  /// [ranges,HV,K,V] fp32: R of each range, or with `transition` [ranges,HV,K,V+K]: V columns of R,
  /// then K of M. R is 0 of a range that no sequence leaves (with `backwards`, dR of one that none
  /// enters), M of one that none goes through.
  TensorView summaries;
  /// [ranges] int32: the ranges in the order of their tokens, by their places in `summaries`, each
  /// once.
  TensorView order;
  /// Out, [ranges,HV,K,V] fp32: the state that enters each range, at its place in `summaries`; with
  /// `backwards` the gradient of the state that leaves it.
  TensorView states;
  /// From the last range to the first, by M transposed; `order` and M are those of the forward
  /// pass.
  bool backwards = false;
};

/// A prepared fold. Immutable and thread-safe; copies share one object. It may outlive the Runtime
/// that made it.
///
///   S = 0;  for each range i in order:  states[i] = S,  S = R_i + M_i S
///
/// Sums are in fp32, have one order, and follow from the ranges, K and V alone: whoever folds a
/// part of the heads gets the bits of one who folds all of them. Where M is 0 S is R, also after a
/// state that is not finite.
class Fold {
 public:
  [[nodiscard]] const FoldOptions& options() const { return options_; }

  /// As Operator::launch, without a workspace. Throws Error(kBadInput), before it launches
  /// anything, for a wrong tensor, for `states` in memory of another one, and on the CPU for a
  /// wrong order; on a GPU a wrong order gives wrong states, or leaves some unwritten.
  void launch(const FoldArguments& arguments, Stream stream = nullptr) const;

  Fold(const FoldOptions& options, std::shared_ptr<const OperatorImpl> impl)
      : options_(options), impl_(std::move(impl)) {}

 private:
  FoldOptions options_;
  std::shared_ptr<const OperatorImpl> impl_;
};

struct RuntimeOptions {
  /// Null: a cache in the default directory.
  std::shared_ptr<Cache> cache;
  /// Null: winners of the cache and of packs.
  std::shared_ptr<PlanSource> plans;
  /// Threads that compile one plan's kernels; 0: one per core.
  unsigned compile_jobs = 0;
  /// Called with one sentence from the thread that prepares, in two cases. A winner of the problem,
  /// or without another legal plan one of a near problem, is not legal: once for each family. A
  /// plan does not load: once for each problem key and plan, which this Runtime does not try again.
  /// Null: a line on stderr.
  std::function<void(const std::string&)> on_degraded = nullptr;
};

/// Finds plans, compiles and loads kernels, and keeps them loaded while it lives. Thread-safe. A
/// fork() waits until no other thread is in prepare(), so that the child may prepare and launch on
/// the CPU. It cannot use a GPU: the driver does not work in a child.
class Runtime {
 public:
  explicit Runtime(RuntimeOptions options = {});
  ~Runtime();

  /// Prepares the problem by the best known plan, or by the default plan where that plan is not
  /// legal or does not load; a batch_invariant problem always has its default plan. Compiles the
  /// kernels that the cache lacks: milliseconds to seconds the first time, microseconds when all
  /// are loaded, even while other threads compile. For a problem that the calling thread prepared
  /// recently it takes no lock, allocates nothing and needs a tenth of a microsecond; it then uses
  /// a new winner of another process up to 20 milliseconds late, one of this process at once.
  /// Throws Error(kBadInput) for an illegal problem and for one that needs more blocks than the
  /// device can launch, Error(kUnavailable) when a compiler is missing or no template fits the
  /// device.
  Operator prepare(const Device& device, const Problem& problem);
  /// Prepares the problem by a given plan. Throws Error(kBadInput) when the plan does not compute
  /// the problem, and one that names the step and the tunable when a config is not in its
  /// template's space for the problem and device: it must have a legal value for every tunable and
  /// nothing else, and fit the problem's precision and chunk size. A batch_invariant problem
  /// accepts its default plan only.
  Operator prepare(const Device& device, const Problem& problem, const Plan& plan);
  /// As the first, with `plans` in place of the runtime's own PlanSource.
  Operator prepare(const Device& device, const Problem& problem, PlanSource& plans);

  /// Compiles into the cache the kernels that prepare() of the problem would compile now, and loads
  /// none: it does not call the driver, so it may run on any thread, also while a graph is
  /// captured. A prepare() meanwhile waits for the kernels that it needs and compiles none of them
  /// again. Waits for them itself. Throws as prepare(), but a kernel that does not compile is no
  /// error.
  void compile_ahead(const Device& device, const Problem& problem);
  /// The same with `plans` in place of the runtime's own PlanSource.
  void compile_ahead(const Device& device, const Problem& problem, PlanSource& plans);

  /// Prepares one template for the problem's dimensions, dtypes, options, sizes and scale. A stage
  /// sums gates as they are, while an operator bounds them at -24.
  Stage prepare_stage(const Device& device, const PlanStep& step, const Problem& problem);

  /// Prepares a fold for both directions. Throws as prepare(): Error(kBadInput) names the option
  /// that is out of range.
  Fold prepare_fold(const Device& device, const FoldOptions& options);

  /// How many kernels this runtime compiled, because it found them neither loaded nor in the cache.
  [[nodiscard]] std::int64_t compiled() const;
  Cache& cache();  ///< lives as long as the runtime

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Every plan that computes the problem on the device with chunk size BT, each step with its
/// default config: all ways to cover the operator's stages by templates of the build. Empty when
/// some stage has no legal config of this BT. A batch_invariant problem has its default plan only,
/// if that has this BT. Throws Error(kBadInput) for an illegal problem and for a BT below 1.
[[nodiscard]] std::vector<Plan> plans(const Device& device, const Problem& problem,
                                      std::int64_t BT);

}  // namespace wyvern WYVERN_API
