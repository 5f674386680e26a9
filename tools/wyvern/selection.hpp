// Options that several verbs share: which problem, with which options, on which device.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include <CLI/App.hpp>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/problem_fields.hpp"

namespace wyvern::cli {

/// Options that set fields of Problem, as given: values by the option's name in problem_fields().
class FieldFlags {
 public:
  /// Adds the options for these verbs to the verb.
  void add(CLI::App& verb, FieldOption::For verbs);
  /// The text given for a field; null where its option was not given. A flag is "true" or "false".
  const std::string* find(std::string_view field) const;
  void set(std::string_view field, const std::string& text);

 private:
  std::map<std::string_view, std::optional<std::string>> texts_;  ///< by the field's name
};

/// Options that describe a synthetic problem, as given: --preset, --shape, --seqlens, ...
struct SelectionFlags {
  std::string op;
  std::optional<std::string> preset, shape, seqlens, tokens, batch;
  std::string dtype = "bf16";
  FieldFlags fields;  ///< fields that a file's tensors would set
};

/// The pass and the operator's options as given.
using OptionFlags = FieldFlags;

/// A problem and the sequence boundaries of its packed batch.
struct Selection {
  Problem problem;
  std::vector<std::int64_t> cu_seqlens;  ///< empty unless problem.packed
};

/// A call that a preset's models make.
struct SelectedCall {
  std::string name;  ///< "transformers: first prefill"; empty without a preset
  Selection selection;
};

/// A call that the options do not go with.
struct LeftOutCall {
  std::string name;    ///< as SelectedCall's
  std::string reason;  ///< "lower_bound is -5; ..."
};

inline constexpr std::int64_t kDefaultTokens = 2048;  ///< of a preset without --tokens
inline constexpr std::int64_t kDecodedTokens = 1;     ///< the same for the recurrent pass

void add_operator(CLI::App& verb, std::string& op);
/// `all_calls`: the verb takes every call of a preset, by select_calls().
void add_selection(CLI::App& verb, SelectionFlags& flags, bool all_calls = false);
void add_dtype(CLI::App& verb, std::string& dtype);
void add_pass(CLI::App& verb, std::optional<std::string>& pass, const std::string& otherwise);
void add_options(CLI::App& verb, OptionFlags& flags);
void add_device(CLI::App& verb, std::optional<std::string>& device);

/// The problem that `wyvern example` writes an input for and that `wyvern run` then finds in that
/// file: beta has the dtype of q, cu_seqlens is int64, and A_log and dt_bias are there where the
/// gate is computed in the kernel. Of a shape an initial state is given (fp32) and the final state
/// wanted, or updated in place, and g is fp32 unless --g-dtype says otherwise; a preset is the call
/// of its model's first prefill, or the first one of --pass, and the options are applied to it. So
/// the same selection and options name the same problem key for tune, bench and run. Throws
/// Error(kBadInput).
Selection select(const SelectionFlags& flags, const OptionFlags& options);

/// Every call of the preset's models, each with the options applied to it; only those of --pass
/// where that is given, and none twice. Those that the options do not go with (decoding with
/// --seqlens) are appended to `left_out` instead. Without a preset the one problem of select().
/// Throws Error(kBadInput) where nothing is left.
std::vector<SelectedCall> select_calls(const SelectionFlags& flags, const OptionFlags& options,
                                       std::vector<LeftOutCall>& left_out);

/// The options that make `wyvern run` compute this problem: "--use-qk-l2norm", ...
std::vector<std::string> run_options(const Problem& problem);

/// Lays the options over the problem; throws Error(kBadInput) for one that does not parse.
void apply(const FieldFlags& options, Problem& problem);

/// Parses --shape's B=..,T=..,H=..,HV=..,K=..,V=.. over the dimensions of `base`; HV follows a
/// given H and V a given K. Throws Error(kBadInput), also when one of `needed` is missing.
Problem parse_shape(std::string_view text, Problem base,
                    std::initializer_list<std::string_view> needed);

/// The problem that "T=64,H=2,use_qk_l2norm=true" says of the operator: fields of Problem by name,
/// the others at their defaults (HV is H and V is K where they are missing, N is B of a batch that
/// is not packed). Throws Error(kBadInput).
Problem problem_from_fields(const std::string& op, std::string_view text);

/// Throws Error(kBadInput) naming the operators of this build.
void require_operator(std::string_view op);

/// The named device, else the first usable GPU, else the CPU.
Device open_device(const std::optional<std::string>& name);

/// "backward B=1,T=2048,H=16,HV=32,K=128,V=128 bf16", with the number of sequences of a packed
/// batch, and without the pass where that is forward.
std::string describe(const Problem& problem);

// Values of options; each throws Error(kBadInput) that names the option, the text and the legal
// values.
std::int64_t parse_integer(std::string_view option, std::string_view text, std::int64_t least,
                           std::int64_t most);
std::uint64_t parse_seed(std::string_view text);
float parse_float(std::string_view option, std::string_view text);
DType parse_element_type(std::string_view option, std::string_view text);
Pass parse_pass(std::string_view text);
/// "500000000", "500K", "500M", "2G" (powers of 1024).
std::int64_t parse_bytes(std::string_view option, std::string_view text);
/// "60s", "500ms", "2m", or a plain number of seconds; positive.
double parse_seconds(std::string_view option, std::string_view text);

/// Throws Error(kBadInput) when a needed option was not given: "--input is missing; ...".
const std::string& require(const std::optional<std::string>& value, std::string_view option,
                           std::string_view what);

}  // namespace wyvern::cli
