// Bad input (runtime/SPECIFICATION.md, section 6): one Error(kBadInput) that names the argument,
// before anything is written.
#include <wyvern/error.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "runtime/problem_fields.hpp"
#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

/// Good arguments of one launch, which a case then spoils.
struct Launch {
  Arguments arguments;
  void* workspace = nullptr;
};

struct BadCase {
  const char* name;
  std::function<void(Launch&)> spoil;
  std::vector<std::string> words;  // the argument, and what the message says of it
};

void* shifted(void* pointer, std::ptrdiff_t bytes) { return static_cast<char*>(pointer) + bytes; }

const std::vector<BadCase>& bad_cases() {
  static const std::vector<BadCase> cases{
      {"MissingQ", [](Launch& l) { l.arguments.q = {}; }, {"q ", "missing"}},
      {"MissingV", [](Launch& l) { l.arguments.v = {}; }, {"v ", "missing"}},
      {"MissingBeta", [](Launch& l) { l.arguments.beta = {}; }, {"beta ", "missing"}},
      {"MissingG", [](Launch& l) { l.arguments.g = {}; }, {"g ", "missing"}},
      {"MissingALog", [](Launch& l) { l.arguments.A_log = {}; }, {"A_log ", "missing", "fp32"}},
      {"MissingDtBias", [](Launch& l) { l.arguments.dt_bias = {}; }, {"dt_bias ", "missing"}},
      {"MissingState",
       [](Launch& l) { l.arguments.initial_state = {}; },
       {"initial_state ", "missing"}},
      {"MissingSeqlens",
       [](Launch& l) { l.arguments.cu_seqlens = {}; },
       {"cu_seqlens ", "missing"}},
      {"MissingO", [](Launch& l) { l.arguments.o = {}; }, {"o ", "missing"}},
      {"MissingFinalState",
       [](Launch& l) { l.arguments.final_state = {}; },
       {"final_state ", "missing"}},
      {"Rank",
       [](Launch& l) {
         TensorView& q = l.arguments.q;
         q.rank = 3;
         q.shape = {50, 2, 32, 0, 0};
         q.strides = {64, 32, 1, 0, 0};
       },
       {"q ", "[50, 2, 32]", "[1, 50, 2, 32]"}},
      {"RankTooLarge", [](Launch& l) { l.arguments.q.rank = 9; }, {"q ", "rank 9", "[1, 50, 2"}},
      {"RankNegative", [](Launch& l) { l.arguments.o.rank = -1; }, {"o ", "rank -1", "[1, 50, 4"}},
      {"Shape",
       [](Launch& l) { l.arguments.k.shape[1] = 49; },
       {"k ", "[1, 49, 2, 32]", "[1, 50, 2, 32]"}},
      {"HeadsOfV",
       [](Launch& l) { l.arguments.v.shape[2] = 2; },
       {"v ", "[1, 50, 2, 24]", "[1, 50, 4, 24]"}},
      {"StateShape",
       [](Launch& l) { l.arguments.initial_state.shape[0] = 3; },
       {"initial_state ", "[3, 4, 32, 24]", "[2, 4, 32, 24]"}},
      {"SeqlensLength",
       [](Launch& l) { l.arguments.cu_seqlens.shape[0] = 2; },
       {"cu_seqlens ", "[2]", "[3]"}},
      {"DType", [](Launch& l) { l.arguments.v.dtype = DType::fp32; }, {"v ", "fp32", "bf16"}},
      {"BetaDType",
       [](Launch& l) { l.arguments.beta.dtype = DType::fp16; },
       {"beta ", "fp16", "bf16"}},
      {"FinalStateDType",
       [](Launch& l) { l.arguments.final_state.dtype = DType::bf16; },
       {"final_state ", "bf16", "fp32"}},
      {"StridesInsideARow",
       [](Launch& l) { l.arguments.q.strides[3] = 2; },
       {"q ", "strides", "contiguous"}},
      {"RowsThatOverlap",
       [](Launch& l) { l.arguments.q.strides[1] = 32; },
       {"q ", "strides", "contiguous"}},
      {"RowsAtOddDistances",
       [](Launch& l) { l.arguments.q.strides[1] = 68; },
       {"q ", "strides", "16 bytes"}},
      {"StridesOfAnOutput",
       [](Launch& l) { l.arguments.final_state.strides[1] *= 2; },
       {"final_state ", "strides", "contiguous"}},
      {"TransposedHeads",
       [](Launch& l) { std::swap(l.arguments.v.strides[1], l.arguments.v.strides[2]); },
       {"v ", "strides", "contiguous"}},
      {"Alignment",
       [](Launch& l) { l.arguments.g.data = shifted(l.arguments.g.data, 4); },
       {"g ", "aligned to 16"}},
      {"OutputAlignment",
       [](Launch& l) { l.arguments.o.data = shifted(l.arguments.o.data, 2); },
       {"o ", "aligned to 16"}},
      {"NoWorkspace", [](Launch& l) { l.workspace = nullptr; }, {"workspace", "bytes"}},
      {"WorkspaceAlignment",
       [](Launch& l) { l.workspace = shifted(l.workspace, 64); },
       {"workspace", "aligned to 256"}},
      {"OutputIsInput",
       [](Launch& l) { l.arguments.o.data = l.arguments.v.data; },
       {"o overlaps v"}},
      {"OutputReachesIntoInput",
       [](Launch& l) { l.arguments.o.data = shifted(l.arguments.v.data, -16); },
       {"o overlaps v"}},
      {"OutputStartsInsideInput",
       [](Launch& l) { l.arguments.o.data = shifted(l.arguments.q.data, 2 * 50 * 2 * 32 - 16); },
       {"o overlaps "}},
      {"OutputIsOutput",
       [](Launch& l) { l.arguments.o.data = l.arguments.final_state.data; },
       {"o overlaps final_state"}},
      {"FinalStateIsInitialState",
       [](Launch& l) { l.arguments.final_state.data = l.arguments.initial_state.data; },
       {"final_state overlaps initial_state"}},
      {"OutputInWorkspace",
       [](Launch& l) { l.arguments.o.data = l.workspace; },
       {"workspace overlaps o"}},
      {"InputInWorkspace",
       [](Launch& l) { l.arguments.k.data = shifted(l.workspace, 16); },
       {"workspace overlaps k"}},
      {"UnaskedState", [](Launch& l) { l.arguments.initial_state = {}; }, {"initial_state"}},
  };
  return cases;
}

class BadInput : public OperatorTest, public ::testing::WithParamInterface<DeviceKind> {
 protected:
  static Problem problem() {
    Problem p;
    p.H = 2, p.HV = 4, p.K = 32, p.V = 24;
    p.packed = p.initial_state = p.output_final_state = true;
    p.use_gate_in_kernel = p.has_dt_bias = true;
    return p;
  }
};

/// Device copies of everything a launch takes, outputs poisoned. What a forward pass would hand
/// over is zeros.
class Prepared {
 public:
  Prepared(const Device& device, const Problem& problem, const Lengths& lengths)
      : data_(make_data(problem, Gate::typical, 1, lengths)),
        op_(test_runtime().prepare(device, data_.problem)) {
    for (const TensorSpec& spec : tensor_specs(data_.problem)) {
      if (!spec.present) continue;
      const auto given = data_.tensors.find(spec.name);
      HostTensor content = given != data_.tensors.end() ? given->second : host_tensor(spec);
      const bool in = spec.access == TensorAccess::in;
      if (spec.access == TensorAccess::out) content.poison(kNanPoison);
      good_.arguments.tensor(spec.name) =
          upload(device, content, in ? Role::input : Role::output, std::string(spec.name));
    }
    HostTensor workspace(DType::int64, {static_cast<std::int64_t>(op_.workspace_bytes() / 8)});
    workspace.poison(kNanPoison);
    good_.workspace = upload(device, workspace, Role::workspace, "the workspace").data;
  }

  Launch good() const { return good_; }
  const Operator& op() const { return op_; }

  void expect_nothing_written() const {
    for (const auto& [tensor, before] : outputs_)
      EXPECT_TRUE(same_bytes(tensor.download(), before)) << "an output was written";
  }

 private:
  using Role = DeviceTensor::Role;

  TensorView upload(const Device& device, const HostTensor& host, Role role,
                    const std::string& name) {
    memory_.emplace_back(device, host, DeviceTensor::Guards::bands, role, name);
    if (role != Role::input) outputs_.emplace_back(memory_.back(), host);
    return memory_.back().view();
  }

  OperatorData data_;
  Operator op_;
  std::vector<DeviceTensor> memory_;
  Launch good_;
  std::vector<std::pair<DeviceTensor, HostTensor>> outputs_;
};

void expect_rejected(const Prepared& prepared, const Launch& launch, const std::string& name,
                     const std::vector<std::string>& words) {
  SCOPED_TRACE(name);
  try {
    prepared.op().launch(launch.arguments, launch.workspace);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << error.what();
  }
  prepared.expect_nothing_written();
}

TEST_P(BadInput, IsNamedAndNothingIsWritten) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  const Prepared prepared(device(), problem(), {20, 30});
  for (const BadCase& bad : bad_cases()) {
    Launch launch = prepared.good();
    bad.spoil(launch);
    expect_rejected(prepared, launch, bad.name, bad.words);
  }
  device().synchronize();
  EXPECT_NO_THROW(prepared.op().launch(prepared.good().arguments, prepared.good().workspace));
  device().synchronize();
}

TEST_P(BadInput, WorkspaceThatIsTooSmallIsNamed) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  const Prepared prepared(device(), problem(), {20, 30});
  const Launch good = prepared.good();
  const std::size_t needed = prepared.op().workspace_bytes();
  ASSERT_GT(needed, 0U);
  for (const std::size_t bytes : {std::size_t{0}, needed - 1}) {
    try {
      prepared.op().launch(good.arguments, good.workspace, bytes);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      EXPECT_EQ(error.what(), "workspace_bytes is " + std::to_string(bytes) +
                                  "; it must be at least " + std::to_string(needed));
    }
    prepared.expect_nothing_written();
  }
  EXPECT_NO_THROW(prepared.op().launch(good.arguments, good.workspace, needed));
  device().synchronize();
}

TEST_P(BadInput, InputsMayShareMemory) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  const Prepared prepared(device(), problem(), {20, 30});
  Launch launch = prepared.good();
  launch.arguments.k.data = launch.arguments.q.data;
  EXPECT_NO_THROW(prepared.op().launch(launch.arguments, launch.workspace));
  device().synchronize();
}

TEST_P(BadInput, TensorsThatTheOperatorWasPreparedWithoutAreRejected) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  Problem plain = problem();
  plain.use_gate_in_kernel = plain.has_dt_bias = plain.initial_state = false;
  const Prepared prepared(device(), plain, {20, 30});
  const Launch good = prepared.good();
  const TensorView spare(good.arguments.q.data, DType::fp32, {4});
  Launch launch = good;
  launch.arguments.A_log = spare;
  expect_rejected(prepared, launch, "A_log", {"A_log"});
  launch = good;
  launch.arguments.initial_state = good.arguments.final_state;
  expect_rejected(prepared, launch, "initial_state", {"initial_state"});
}

TEST_P(BadInput, HostLengthsAreCheckedInFull) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  const Prepared prepared(device(), problem(), {20, 30});
  const std::vector<std::pair<std::vector<std::int64_t>, std::string>> bad{
      {{0, 50}, "cu_seqlens"},
      {{1, 20, 50}, "cu_seqlens[0]"},
      {{0, 60, 50}, "cu_seqlens[2]"},
      {{0, 20, 51}, "cu_seqlens[2]"},
      {{0, -1, 50}, "cu_seqlens[1]"}};
  for (const auto& [seqlens, word] : bad) {
    Launch launch = prepared.good();
    launch.arguments.cu_seqlens_host = seqlens;
    expect_rejected(prepared, launch, word, {word});
  }
}

/// Lengths that only the device holds: the CPU checks them; a GPU cannot without waiting, so its
/// kernels clamp them and stay within their tensors.
TEST_P(BadInput, LengthsInDeviceMemoryCannotLeadAstray) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  const std::vector<std::vector<std::int64_t>> bad{
      {0, 60, 50}, {0, 20, 1000000}, {-40, 20, 50}, {7, 3, 9}};
  for (const auto& seqlens : bad) {
    const HostTensor host_lengths(DType::int32, {3}, {seqlens.begin(), seqlens.end()});
    const Prepared prepared(device(), problem(), {20, 30});
    Launch launch = prepared.good();
    const DeviceTensor lengths(device(), host_lengths, Guards::bands, DeviceTensor::Role::input,
                               "cu_seqlens");
    launch.arguments.cu_seqlens = lengths.view();
    if (device().info().cuda) {
      EXPECT_NO_THROW(prepared.op().launch(launch.arguments, launch.workspace));
      EXPECT_NO_THROW(device().synchronize());
      continue;
    }
    expect_rejected(prepared, launch, "cu_seqlens", {"cu_seqlens["});
    // A good host copy does not excuse bad lengths that the kernels will read.
    const std::vector<std::int64_t> host{0, 20, 50};
    launch.arguments.cu_seqlens_host = host;
    expect_rejected(prepared, launch, "cu_seqlens", {"cu_seqlens["});
  }
}

struct BadProblem {
  std::string_view
      words;  // the field, its value and part of what is legal, in this order, by " .. "
  std::function<void(Problem&)> spoil;
};

void expect_words(std::string_view message, std::string_view words) {
  std::size_t at = 0;
  while (!words.empty()) {
    const std::size_t end = std::min(words.find(" .. "), words.size());
    const std::size_t found = message.find(words.substr(0, end), at);
    EXPECT_NE(found, std::string_view::npos)
        << "'" << words.substr(0, end) << "' is not in its place in: " << message;
    at = found == std::string_view::npos ? at : found + end;
    words.remove_prefix(std::min(end + 4, words.size()));
  }
}

/// Beside the examples of problem_fields().
const std::vector<BadProblem>& bad_problems() {
  const auto decode = [](Problem& p) {
    p.pass = Pass::recurrent, p.use_gate_in_kernel = p.has_dt_bias = false;
  };
  const auto inplace = [](Problem& p) { p.inplace_state = true, p.output_final_state = false; };
  const auto conv_pool = [=](Problem& p) {
    inplace(p), p.inplace_conv_state = true, p.short_conv = 4;
  };
  const auto pool = [=](Problem& p) {
    decode(p), inplace(p), p.state_index = true, p.state_slots = 3, p.T = 4;
  };
  const auto kda = [](Problem& p) { p.op = "kda", p.has_dt_bias = false; };
  const auto summarize = [](Problem& p) {
    p.summary = true, p.initial_state = p.output_final_state = false;
  };
  const auto quantize = [](Problem& p) {
    p.output_norm = Activation::silu, p.output_dtype = DType::float8_e4m3, p.V = 128;
  };
  const auto share = [](Problem& p) { p.chunk_size = 64, p.segment_chunks = 16; };
  static const std::vector<BadProblem> all{
      {"g_dtype is int32", [=](Problem& p) { kda(p), p.g_dtype = DType::int32; }},
      {"lower_bound is -2 .. kda", [](Problem& p) { p.lower_bound = -2.0F; }},
      {"lower_bound is 0 .. [-5, 0)", [=](Problem& p) { kda(p), p.lower_bound = 0.0F; }},
      {"lower_bound is -1 .. use_gate_in_kernel",
       [=](Problem& p) { kda(p), p.use_gate_in_kernel = false, p.lower_bound = -1.0F; }},
      {"return_intermediate_states is true .. recurrent",
       [=](Problem& p) { decode(p), p.return_intermediate_states = true; }},
      {"disable_recompute is true .. inplace_state",
       [=](Problem& p) { inplace(p), p.disable_recompute = true; }},
      {"return_intermediate_states is true .. inplace_state",
       [=](Problem& p) { inplace(p), p.return_intermediate_states = true; }},
      {"output_final_state is true .. inplace_state",
       [=](Problem& p) { decode(p), p.inplace_state = true; }},
      {"state_index is true .. initial_state or inplace_state",
       [=](Problem& p) { decode(p), p.state_index = true, p.initial_state = false; }},
      {"intermediate_rows is 4 .. absent for the backward",
       [](Problem& p) { p.pass = Pass::backward, p.intermediate_rows = 4; }},
      {"disable_state_update is true .. false for gdn2; only delta_rule",
       [=](Problem& p) { decode(p), p.op = "gdn2", p.disable_state_update = true; }},
      {"index_columns is 4 .. 0 for gated_delta_product",
       [=](Problem& p) { decode(p), p.op = "gated_delta_product", p.index_columns = 4; }},
      {"index_columns is 4 .. 0 unless inplace_state and state_index",
       [=](Problem& p) { decode(p), p.T = 1, p.index_columns = 4; }},
      {"index_columns is 2 .. at least T",
       [=](Problem& p) { pool(p), p.T = 3, p.index_columns = 2; }},
      {"index_columns is -1 .. between 0", [=](Problem& p) { pool(p), p.index_columns = -1; }},
      {"T is 17 .. between 0 and 16", [=](Problem& p) { pool(p), p.T = 17, p.index_columns = 20; }},
      {"T is 17 .. between 0 and 16",
       [=](Problem& p) { pool(p), p.T = 17, p.intermediate_rows = 2; }},
      {"output_state_index is true .. index_columns",
       [=](Problem& p) { pool(p), p.index_columns = 4, p.output_state_index = true; }},
      {"draft_tokens is 17 .. between 0 and 16",
       [=](Problem& p) { pool(p), p.intermediate_rows = 2, p.draft_tokens = 17; }},
      {"draft_tokens is 2 .. T, which is 3, unless packed",
       [=](Problem& p) { pool(p), p.T = 3, p.intermediate_rows = 2, p.draft_tokens = 2; }},
      {"draft_tokens is absent .. most tokens of a sequence",
       [=](Problem& p) { pool(p), p.packed = true, p.B = 1, p.intermediate_rows = 2; }},
      {"intermediate_rows is -1 .. between 0",
       [=](Problem& p) { pool(p), p.intermediate_rows = -1; }},
      {"output_state_index is true .. disable_state_update",
       [=](Problem& p) { pool(p), p.output_state_index = p.disable_state_update = true; }},
      {"parent is true .. intermediate_states",
       [=](Problem& p) { pool(p), p.parent = p.disable_state_update = true; }},
      {"parent is true .. disable_state_update",
       [=](Problem& p) { pool(p), p.parent = true, p.intermediate_rows = 2; }},
      {"output_final_state is true .. parent",
       [=](Problem& p) {
         decode(p), p.T = 3, p.parent = p.output_final_state = true, p.intermediate_rows = 2;
       }},
      {"keep_output is true .. false for the backward",
       [](Problem& p) {
         p.pass = Pass::backward, p.output_norm = Activation::sigmoid, p.keep_output = true;
       }},
      {"keep_output is true .. inplace_state",
       [=](Problem& p) { inplace(p), p.output_norm = Activation::silu, p.keep_output = true; }},
      {"keep_output is true .. checkpoints",
       [](Problem& p) {
         p.checkpoint_every = 64, p.output_norm = Activation::silu, p.keep_output = true;
       }},
      {"output_dtype is float8_e4m3 .. absent for the backward",
       [=](Problem& p) { quantize(p), p.pass = Pass::backward; }},
      {"output_dtype is float8_e4m3 .. absent where V is 64",
       [=](Problem& p) { quantize(p), p.V = 64; }},
      {"output_dtype is float8_e4m3 .. absent with keep_output",
       [=](Problem& p) { quantize(p), p.keep_output = true; }},
      {"output_dtype is float8_e5m2 .. must be float8_e4m3",
       [=](Problem& p) { quantize(p), p.output_dtype = DType::float8_e5m2; }},
      {"output_scale_tokens_last is true .. false unless output_dtype",
       [](Problem& p) { p.output_norm = Activation::silu, p.output_scale_tokens_last = true; }},
      {"norm_eps is 0 .. finite and above 0",
       [=](Problem& p) { decode(p), p.output_norm = Activation::silu, p.norm_eps = 0.0F; }},
      {"norm_eps is inf .. finite and above 0",
       [=](Problem& p) {
         decode(p), p.output_norm = Activation::silu;
         p.norm_eps = std::numeric_limits<float>::infinity();
       }},
      {"short_conv is 0 .. between 2 and 4", [](Problem& p) { p.short_conv = 0; }},
      {"short_conv is 1 .. between 2 and 4", [](Problem& p) { p.short_conv = 1; }},
      {"inplace_conv_state is false .. true with short_conv and inplace_state",
       [=](Problem& p) { inplace(p), p.short_conv = 4; }},
      {"inplace_conv_state is true .. unless short_conv is set",
       [=](Problem& p) { inplace(p), p.inplace_conv_state = true; }},
      {"inplace_conv_state is true .. unless inplace_state is true",
       [](Problem& p) { p.short_conv = 4, p.inplace_conv_state = true; }},
      {"inplace_conv_state is true .. false for the backward",
       [](Problem& p) { p.pass = Pass::backward, p.short_conv = 4, p.inplace_conv_state = true; }},
      {"initial_conv_state is true .. false with inplace_conv_state",
       [=](Problem& p) { conv_pool(p), p.initial_conv_state = true; }},
      {"output_conv_state is true .. false with inplace_conv_state",
       [=](Problem& p) { conv_pool(p), p.output_conv_state = true; }},
      {"conv_columns is 3 .. absent unless inplace_conv_state",
       [](Problem& p) { p.short_conv = 4, p.conv_columns = 3; }},
      {"conv_columns is 2 .. between 3 and", [=](Problem& p) { conv_pool(p), p.conv_columns = 2; }},
      {"conv_columns is 4294967296 .. between 3 and",
       [=](Problem& p) { conv_pool(p), p.conv_columns = std::int64_t{1} << 32; }},
      {"conv_tokens_first is true .. false unless inplace_conv_state",
       [](Problem& p) { p.short_conv = 4, p.conv_tokens_first = true; }},
      {"conv_columns is 9 .. between 10 and",
       [=](Problem& p) {
         decode(p), conv_pool(p), p.state_index = true, p.state_slots = 4, p.index_columns = 8;
         p.conv_columns = 9;
       }},
      {"output_conv_state is true .. false with parent",
       [=](Problem& p) {
         decode(p), p.short_conv = 4, p.intermediate_rows = 3;
         p.output_conv_state = p.parent = true, p.output_final_state = false;
       }},
      {"conv_activation is 1 .. silu (0) or none (2)",
       [](Problem& p) { p.short_conv = 4, p.conv_activation = Activation::sigmoid; }},
      {"conv_dtype is bf16 .. fp32",
       [](Problem& p) {
         p.dtype = p.beta_dtype = p.g_dtype = DType::fp32;
         p.short_conv = 4, p.conv_dtype = DType::bf16;
       }},
      {"output_norm is 2 .. silu (0) or sigmoid (1)",
       [](Problem& p) { p.output_norm = Activation::none; }},
      {"checkpoint_every is -64 .. multiple of 64", [](Problem& p) { p.checkpoint_every = -64; }},
      {"checkpoint_every is 64 .. 0 with checkpoint_offsets",
       [](Problem& p) { p.checkpoint_every = 64, p.checkpoint_offsets = true; }},
      {"checkpoint_every is 64 .. 0 for the backward",
       [](Problem& p) { p.pass = Pass::backward, p.checkpoint_every = 64; }},
      {"checkpoint_offsets is true .. false for gated_delta_product; only",
       [](Problem& p) { p.op = "gated_delta_product", p.checkpoint_offsets = true; }},
      {"disable_recompute is true .. checkpoints",
       [](Problem& p) { p.checkpoint_every = 64, p.disable_recompute = true; }},
      {"chunk_size is 128 .. divisor of checkpoint_every",
       [](Problem& p) { p.checkpoint_every = 64, p.chunk_size = 128; }},
      {"checkpoint_rows is -1 .. between 0",
       [](Problem& p) { p.checkpoint_every = 64, p.checkpoint_rows = -1; }},
      {"summary is true .. false for the recurrent",
       [=](Problem& p) { decode(p), p.summary = true; }},
      {"transition is true .. false for the backward",
       [](Problem& p) { p.pass = Pass::backward, p.summary = p.transition = true; }},
      {"summary is true .. inplace_state", [=](Problem& p) { inplace(p), p.summary = true; }},
      {"summary is true .. checkpoints",
       [=](Problem& p) { summarize(p), p.checkpoint_offsets = true; }},
      {"summary is true .. disable_recompute",
       [=](Problem& p) { summarize(p), p.disable_recompute = true; }},
      {"summary is true .. return_intermediate_states",
       [=](Problem& p) { summarize(p), p.return_intermediate_states = true; }},
      {"summary is true .. output_norm",
       [=](Problem& p) { summarize(p), p.output_norm = Activation::silu; }},
      {"summary is true .. short_conv", [](Problem& p) { p.summary = true, p.short_conv = 4; }},
      {"summary is true .. output_final_state",
       [=](Problem& p) { summarize(p), p.output_final_state = true; }},
      {"summary is true .. initial_state in the backward",
       [=](Problem& p) { summarize(p), p.pass = Pass::backward, p.initial_state = true; }},
      {"segment_chunks is 16 .. absent for the backward",
       [=](Problem& p) { share(p), p.pass = Pass::backward; }},
      {"segment_chunks is 24 .. 8, 16 or 32", [=](Problem& p) { share(p), p.segment_chunks = 24; }},
      {"segment_chunks is 16 .. chunk_size", [=](Problem& p) { share(p), p.chunk_size.reset(); }},
      {"segment_chunks is 16 .. packed", [=](Problem& p) { share(p), p.packed = true; }},
      {"segment_chunks is 16 .. inplace_state", [=](Problem& p) { share(p), inplace(p); }},
      {"segment_chunks is 16 .. checkpoints",
       [=](Problem& p) { share(p), p.checkpoint_offsets = true; }},
      {"segment_chunks is 16 .. batch_invariant",
       [=](Problem& p) { share(p), p.batch_invariant = true; }},
      {"segment_chunks is 16 .. short_conv", [=](Problem& p) { share(p), p.short_conv = 4; }},
  };
  return all;
}

void expect_bad(const Device& device, Problem p, const BadProblem& bad) {
  bad.spoil(p);
  try {
    test_runtime().prepare(device, p);
    ADD_FAILURE() << "accepted: " << bad.words;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    expect_words(error.what(), bad.words);
  }
}

TEST_P(BadInput, BadProblemsAreNotPrepared) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  Problem p = problem();
  p.packed = false;
  p.T = 8;
  for (const BadProblem& bad : bad_problems()) expect_bad(device(), p, bad);
  Problem plain;
  plain.T = 8;
  for (const ProblemField& field : problem_fields())
    if (field.illegal.spoil != nullptr)
      expect_bad(device(), plain, {field.illegal.words, field.illegal.spoil});
}

TEST_P(BadInput, PlansThatDoNotFitAreNotPrepared) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  Problem p = problem();
  p.packed = false;
  p.T = 64;
  const std::vector<Plan> all = plans(device(), p, 64);
  ASSERT_FALSE(all.empty());
  const auto expect_bad = [&](const Plan& plan, const std::string& word) {
    try {
      test_runtime().prepare(device(), p, plan);
      ADD_FAILURE() << "accepted: " << word;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  Plan plan = all.front();
  plan.pop_back();
  expect_bad(plan, "stage");
  plan = all.front();
  plan.front().template_id = "no_such.template";
  expect_bad(plan, "no_such.template");
  plan = all.front();
  for (PlanStep& step : plan)
    if (step.config.contains("BT")) {
      step.config.set("BT", std::int64_t{32});
      break;
    }
  expect_bad(plan, "BT=");
  plan = all.front();
  plan.back().config = Config{};
  expect_bad(plan, plan.back().template_id);
  expect_bad({}, "");
}

/// Every tensor of every operator and pass, spoiled in every way.
struct TensorCase {
  DeviceKind kind;
  OperatorPass which;
};

void PrintTo(const TensorCase& c, std::ostream* out) { *out << name_of(c.which); }

class BadTensor : public OperatorTest, public ::testing::WithParamInterface<TensorCase> {
 protected:
  static Problem problem() {
    const OperatorPass& which = GetParam().which;
    Problem p = base(which);
    p.packed = true;
    p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
    p.disable_recompute = p.initial_state = which.pass == Pass::backward;
    p.output_norm = Activation::silu;
    if (which.pass == Pass::backward) return p;
    p.state_index = p.inplace_state = true, p.state_slots = 3;
    p.output_state_index = p.has_initial_state = true;
    p.output_final_state = false;
    const OperatorFacts& facts = definition_of(p).facts();
    p.checkpoint_offsets = p.pass == Pass::forward && !facts.householder;
    if (p.pass != Pass::recurrent || facts.householder || !facts.beta) return p;
    p.output_state_index = false;
    p.index_columns = 4, p.intermediate_rows = 3, p.draft_tokens = 2;
    p.disable_state_update = p.parent = true;
    return p;
  }

  /// With windows that are given and wanted.
  static Problem convolved() {
    Problem p = base(GetParam().which);
    p.packed = true;
    p.short_conv = 4;
    p.has_conv_bias = p.initial_conv_state = p.output_conv_state = true;
    return p;
  }
  /// With windows in a pool.
  static Problem convolved_in_place() {
    Problem p = base(GetParam().which);
    p.packed = p.inplace_state = p.state_index = p.has_initial_state = true;
    p.output_final_state = false;
    p.short_conv = 3, p.conv_columns = 4, p.state_slots = 5;
    p.inplace_conv_state = p.conv_tokens_first = true;
    return p;
  }

  void expect_named(const Problem& p);
};

std::string spec_text(const TensorSpec& spec) {
  std::string text = std::string(to_string(spec.dtype)) + " [";
  for (int i = 0; i < spec.rank; ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(spec.shape[static_cast<std::size_t>(i)]);
  return text + "]";
}

TEST_P(BadTensor, IsNamedAndNothingIsWritten) {
  WYVERN_OPEN_OR_SKIP(GetParam().kind);
  expect_named(problem());
  expect_named(convolved());
  if (GetParam().which.pass != Pass::backward) expect_named(convolved_in_place());
}

void BadTensor::expect_named(const Problem& p) {
  const Prepared prepared(device(), p, {20, 30});
  const auto expect = [&](const TensorSpec& spec, const TensorView& bad,
                          std::vector<std::string> words) {
    Launch launch = prepared.good();
    launch.arguments.tensor(spec.name) = bad;
    words.push_back(std::string(spec.name) + " ");
    expect_rejected(prepared, launch, std::string(spec.name), words);
  };
  for (const TensorSpec& spec : tensor_specs(prepared.op().problem())) {
    const TensorView good = prepared.good().arguments.tensor(spec.name);
    if (!spec.present) {
      expect(spec, prepared.good().arguments.q, {"leave it out"});
      continue;
    }
    const std::string legal = spec_text(spec);
    TensorView bad = good;
    expect(spec, {}, {"missing", legal});
    bad.dtype = good.dtype == DType::fp32 ? DType::int32 : DType::fp32;
    expect(spec, bad, {std::string(to_string(bad.dtype)), legal});
    bad = good;
    ++bad.shape[0];
    expect(spec, bad, {"shape [" + std::to_string(bad.shape[0]), legal});
    bad = good;
    if (good.rank == kMaxRank)
      --bad.rank;
    else
      bad.shape[static_cast<std::size_t>(bad.rank++)] = 1;
    expect(spec, bad, {"shape", legal});
    bad = good;
    bad.strides[static_cast<std::size_t>(good.rank - 1)] = 2;
    expect(spec, bad, {"strides", "contiguous"});
    bad = good;
    bad.data = shifted(good.data, 8);
    expect(spec, bad, {"aligned to 16"});
  }
}

std::vector<TensorCase> tensor_cases(DeviceKind kind) {
  std::vector<TensorCase> all;
  for (const OperatorPass& which : all_passes()) all.push_back({kind, which});
  return all;
}

const auto kPass = [](const auto& each) { return name_of(each.param.which); };

INSTANTIATE_TEST_SUITE_P(Cpu, BadTensor, ::testing::ValuesIn(tensor_cases(DeviceKind::cpu)), kPass);
INSTANTIATE_TEST_SUITE_P(Gpu, BadTensor, ::testing::ValuesIn(tensor_cases(DeviceKind::cuda)),
                         kPass);
INSTANTIATE_TEST_SUITE_P(Cpu, BadInput, ::testing::Values(DeviceKind::cpu),
                         [](const auto&) { return "cpu"; });
INSTANTIATE_TEST_SUITE_P(Gpu, BadInput, ::testing::Values(DeviceKind::cuda),
                         [](const auto&) { return "cuda"; });

}  // namespace
}  // namespace wyvern::testing
