// The C API's folds, tensors by the names of FoldArguments; and what summaries share with passes.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "runtime/c_api.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"

struct wyvern_fold {
  wyvern::Fold fold;
};

namespace wyvern {
namespace {

struct FoldTensor {
  std::string_view name;
  TensorView FoldArguments::* member;
};
constexpr std::array<FoldTensor, 3> kFoldTensors{{{"summaries", &FoldArguments::summaries},
                                                  {"order", &FoldArguments::order},
                                                  {"states", &FoldArguments::states}}};

FoldArguments fold_arguments(const wyvern_launch& launch) {
  FoldArguments arguments;
  std::array<bool, kFoldTensors.size()> seen{};
  each_tensor(launch, [&](const wyvern_tensor& tensor) {
    const std::string_view name = &given(tensor.name, "the name of a tensor");
    const auto* const found = std::find_if(kFoldTensors.begin(), kFoldTensors.end(),
                                           [&](const FoldTensor& one) { return one.name == name; });
    if (found == kFoldTensors.end())
      bad_input(
          fmt::format("'{}' is not the name of a tensor of a fold; its tensors are "
                      "summaries, order, states",
                      name));
    if (std::exchange(seen.at(static_cast<std::size_t>(found - kFoldTensors.begin())), true))
      bad_input(fmt::format("{} is given twice; it must be given once", name));
    read_tensor(tensor, arguments.*found->member);
  });
  return arguments;
}

}  // namespace
}  // namespace wyvern

using namespace wyvern;

wyvern_status wyvern_prepare_fold(wyvern_runtime* runtime, const wyvern_device* device,
                                  const wyvern_fold_options* options, wyvern_fold** fold) {
  return guarded([&] {
    given(fold, "fold") = nullptr;
    const Device& on = given(device, "device").device;
    Runtime& own = given(runtime, "runtime").runtime;
    const auto wanted = read_options(&given(options, "options"), "options");
    if (wanted.transition != 0 && wanted.transition != 1)
      bad_input(fmt::format("options.transition is {}; it must be 0 or 1", wanted.transition));
    *fold = new wyvern_fold{own.prepare_fold(on, {.ranges = wanted.ranges,
                                                  .HV = wanted.HV,
                                                  .K = wanted.K,
                                                  .V = wanted.V,
                                                  .transition = wanted.transition != 0})};
  });
}

wyvern_status wyvern_shared_segments(const wyvern_device* device, const wyvern_problem* problem,
                                     int32_t transition, int64_t* chunk_size,
                                     int64_t* segment_chunks) {
  return guarded([&] {
    given(chunk_size, "chunk_size") = 0;
    given(segment_chunks, "segment_chunks") = 0;
    if (transition != 0 && transition != 1)
      bad_input(fmt::format("transition is {}; it must be 0 or 1", transition));
    const Device& on = given(device, "device").device;
    Problem own = given(problem, "problem").problem;
    validate(own);
    Problem shared = own;
    if (!shared.chunk_size) shared.chunk_size = kept_chunk_size(own);
    shared.segment_chunks = 8;
    validate(shared);
    const PlanShape shape = shared_segments(own, transition != 0, on.impl().target());
    *chunk_size = shape.BT;
    *segment_chunks = shape.SEG;
  });
}

void wyvern_fold_destroy(wyvern_fold* fold) { delete fold; }

wyvern_status wyvern_fold_launch(const wyvern_fold* fold, const wyvern_launch* launch,
                                 int32_t backwards) {
  return guarded([&] {
    const Fold& prepared = given(fold, "fold").fold;
    const wyvern_launch own = read_options(&given(launch, "launch"), "launch");
    if (backwards != 0 && backwards != 1)
      bad_input(fmt::format("backwards is {}; it must be 0 or 1", backwards));
    FoldArguments arguments = fold_arguments(own);
    arguments.backwards = backwards != 0;
    prepared.launch(arguments, own.stream);
  });
}
