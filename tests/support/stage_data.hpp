// Consistent tensors for every stage of a problem: a stage's inputs are the results of the float64
// references of the stages before it, rounded to the contract's dtypes.
#pragma once

#include <wyvern/config.hpp>
#include <wyvern/problem.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "templates/template.hpp"
#include "tests/support/operator_data.hpp"
#include "tests/support/runner.hpp"
#include "tests/support/stage_reference.hpp"

namespace wyvern::testing {

struct StageData {
  Problem problem;       ///< sizes filled in for a packed batch
  StageContext context;  ///< gate_floor -infinity, as for stages on their own
  HostTensors tensors;   ///< every tensor of every contract by name
};

/// The tensors of the problem's operator and pass; a backward problem has those of the forward
/// stages too. `lengths` are the sequences of a packed problem. q and k are used as they are; x and
/// dy_heads are tensors of their own, and so are tensors computed from them. state_slots of 0 with
/// state_index become N + 3. With `user` only the stages that lead to that template's tensors are
/// computed, with the same results.
StageData make_stage_data(const Problem& problem, std::int64_t BT, Gate gate, std::uint64_t seed,
                          const std::vector<std::int64_t>& lengths = {},
                          const Template* user = nullptr);

/// The float64 outputs of the template's stages on the stored inputs of `data`.
TensorMap reference_outputs(const Template& t, const StageData& data);

/// Whether every stage of the template is one that the problem's operator, pass and options use,
/// and the tensors that it has maps of are there.
bool exercises(const Template& t, const Problem& problem);
/// The same, and all that it takes and at least one tensor that it gives is there, with as many
/// dimensions.
bool exercises(const Template& t, const StageData& data);

/// Whether the template writes the states of chunks though a later stage of it reads them.
bool keeps_states(const Template& t);

/// Whether the template is for this problem on such a target. True of all but a few templates,
/// listed by name, that are for some problems alone or need features that not every GPU has.
bool takes(const Template& t, const Limits& limits, const Problem& problem);
/// The problem, changed where the template would not be for it but for one much like it.
Problem within_reach(const Template& t, const Limits& limits, const Problem& problem);

/// False for elements that contracts leave unwritten: h and dh in unused chunk slots; with a
/// template, rows of tensors whose last row of each chunk it writes alone.
Written written_elements(const StageData& data, const Template* t = nullptr);

/// The bound that holds for an output: exact (0) for tables and copies; else SPECIFICATION.md's
/// row of o, dq or dg by the dtype of the problem; fp32 outputs of scalar stages and A without a
/// vector gate by fp32's, outputs stored in 16 bits or of tiles in 16 bits by 16 bits'.
double stage_bound(const Template& t, const StageData& data, const Config& config,
                   std::string_view output);

/// Launches the step's template on `data` under run_stage's suspicion and holds every output to
/// its reference; records test failures.
void expect_stage_matches(const Device& device, const PlanStep& step, const StageData& data,
                          DeviceTensor::Guards guards = DeviceTensor::Guards::bands);

}  // namespace wyvern::testing
