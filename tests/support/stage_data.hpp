// Consistent tensors for every stage of a problem: what one stage reads is what the float64
// references of the stages before it made, rounded as the contract stores it.
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

/// `lengths` are the sequences of a packed problem. q and k are taken as they are; x of l2norm is a
/// tensor of its own.
StageData make_stage_data(const Problem& problem, std::int64_t BT, Gate gate, std::uint64_t seed,
                          const std::vector<std::int64_t>& lengths = {});

/// The float64 outputs of the template's stages on the stored inputs of `data`.
TensorMap reference_outputs(const Template& t, const StageData& data);

/// False for what contracts leave alone: elements of h in unused chunk slots.
Written written_elements(const StageData& data);

/// The bound that holds for an output: exact (0) for tables; the specification's row of o by the
/// dtype of the problem, fp32 outputs of scalar stages and A from 16-bit inputs by fp32's.
double stage_bound(const StageData& data, const Config& config, std::string_view output);

/// Launches the step's template on `data` under run_stage's suspicion and holds every output to
/// its reference; records test failures.
void expect_stage_matches(const Device& device, const PlanStep& step, const StageData& data,
                          DeviceTensor::Guards guards = DeviceTensor::Guards::bands);

}  // namespace wyvern::testing
