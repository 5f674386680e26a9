#include "tests/support/stage_reference.hpp"

#include <algorithm>
#include <stdexcept>

#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

void append_chunks(ChunkLayout& layout) {
  layout.chunk_offsets = {0};
  for (std::int64_t n = 0; n < layout.sequences(); ++n) {
    const std::int64_t end = layout.offsets[size(n) + 1];
    std::int64_t chunk = 0;
    for (std::int64_t begin = layout.offsets[size(n)]; begin < end; begin += layout.BT)
      layout.slots.push_back({n, chunk++, begin, std::min(layout.BT, end - begin)});
    layout.chunk_offsets.push_back(static_cast<std::int64_t>(layout.slots.size()));
  }
}

}  // namespace

ChunkLayout equal_layout(std::int64_t B, std::int64_t T, std::int64_t BT) {
  ChunkLayout layout;
  layout.BT = BT;
  for (std::int64_t n = 0; n <= B; ++n) layout.offsets.push_back(n * T);
  append_chunks(layout);
  return layout;
}

ChunkLayout packed_layout(std::span<const std::int64_t> cu_seqlens, std::int64_t BT,
                          std::int64_t NT) {
  ChunkLayout layout;
  layout.BT = BT;
  layout.packed = true;
  layout.offsets.assign(cu_seqlens.begin(), cu_seqlens.end());
  append_chunks(layout);
  if (static_cast<std::int64_t>(layout.slots.size()) > NT)
    throw std::invalid_argument("NT is too small for the chunks of cu_seqlens");
  layout.slots.resize(size(NT));
  return layout;
}

std::vector<ChunkLayout::Segment> ChunkLayout::segments(std::int64_t SEG) const {
  const std::int64_t length = SEG * BT;
  std::vector<Segment> result;
  for (std::int64_t n = 0; n < sequences(); ++n) {
    // In a packed batch a sequence's segments start where they would without a table of them.
    if (packed) result.resize(size(offsets[size(n)] / length + n));
    const std::int64_t begin = chunk_offsets[size(n)], end = chunk_offsets[size(n) + 1];
    std::int64_t slot = begin;
    do {
      result.push_back({n, slot, std::min(SEG, end - slot), slot == begin, slot + SEG >= end});
      slot += SEG;
    } while (slot < end);
  }
  if (packed) result.resize(size(tokens() / length + sequences()));
  return result;
}

void run_reference(std::string_view stage, const StageContext& context, TensorMap& tensors) {
  for (const StageReferences* group :
       {&row_references(), &forward_references(), &backward_references(), &pass_references(),
        &kda_references(), &recurrent_references(), &segment_references(), &step_references()})
    if (const auto found = group->find(stage); found != group->end())
      return found->second(context, tensors);
  throw std::invalid_argument("no reference for the stage " + std::string(stage));
}

}  // namespace wyvern::testing
