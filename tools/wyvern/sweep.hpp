// Problems that try an operator's shapes and options.
#pragma once

#include <wyvern/problem.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/wyvern/safetensors.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {

/// The gates of a case; other inputs are as in make_example().
enum class Gates : std::uint8_t {
  typical,
  zero,    ///< no decay at all
  strong,  ///< one in eight erases the state
};

/// One problem of a sweep.
struct Case {
  Selection selection;
  Gates gates = Gates::typical;
  std::uint64_t seed = 0;  ///< of its inputs
  bool optional = false;   ///< no device need have a plan for it: left out where there is none
};

/// The dtypes and floors that a sweep goes through in turn.
struct Number {
  DType dtype = DType::bf16;
  std::optional<Precision> precision;
};

/// bf16, fp16, and fp32 with each floor; fewer where a dtype or a floor is named. Throws
/// Error(kBadInput) for one that does not parse.
std::vector<Number> numbers(const std::optional<std::string>& dtype,
                            const std::optional<std::string>& precision);

/// Cases that between them have every option of the operator and pass, then `extra` random ones
/// drawn from the seed: GVA, dimensions that are no power of two, packed batches with empty
/// sequences.
std::vector<Case> make_sweep(std::string_view op, Pass pass, const std::vector<Number>& numbers,
                             std::int64_t extra, std::uint64_t seed);

/// The inputs of a case.
Tensors make_inputs(const Case& c);

/// The options of runtime/SPECIFICATION.md that the case uses, in its order, with the kinds of
/// input that a table of support names ("GVA", "cu_seqlens int64", "no decay"); dtypes of q, k, v
/// and floors are not among them.
std::vector<std::string> options_of(const Case& c);

/// One line that tells the case from all others.
std::string describe(const Case& c);

}  // namespace wyvern::cli
