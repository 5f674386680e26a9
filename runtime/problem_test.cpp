#include <wyvern/error.hpp>
#include <wyvern/problem.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace wyvern {
namespace {

using ::testing::TestWithParam;
using ::testing::Values;

struct BadCase {
  const char* name;
  std::function<void(Problem&)> spoil;
  std::vector<std::string> words;  // argument, value and legal range as the message spells them
};

class BadProblem : public TestWithParam<BadCase> {};

TEST_P(BadProblem, IsNamed) {
  Problem problem;
  problem.T = 8;
  ASSERT_NO_THROW(validate(problem));
  GetParam().spoil(problem);
  try {
    validate(problem);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    for (const std::string& word : GetParam().words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is not in: " << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields, BadProblem,
    Values(BadCase{"HV", [](Problem& p) { p.HV = 0; }, {"HV is 0", "between 1 and"}},
           BadCase{"HVBelowH", [](Problem& p) { p.H = 4, p.HV = 2; }, {"HV is 2", "multiple of H"}},
           BadCase{"KZero", [](Problem& p) { p.K = 0; }, {"K is 0", "between 1 and 256"}},
           BadCase{"TooManyTokens",
                   [](Problem& p) { p.B = p.N = 1 << 16, p.T = 1 << 16; },
                   {"B*T is 4294967296", "at most 2147483647"}},
           BadCase{"PackedN", [](Problem& p) { p.packed = true, p.N = -1; }, {"N is -1"}},
           BadCase{"PackedTokensOfNobody",
                   [](Problem& p) { p.packed = true, p.N = 0; },
                   {"T is 8", "N = 0"}},
           BadCase{
               "GDTypeOfFp32",
               [](Problem& p) { p.dtype = p.beta_dtype = DType::fp32, p.g_dtype = DType::bf16; },
               {"g_dtype is bf16", "fp32"}},
           BadCase{"StateDType",
                   [](Problem& p) { p.state_dtype = DType::int32; },
                   {"state_dtype is int32", "fp32 or bf16 or fp16"}},
           BadCase{"Float8Checkpoints",
                   [](Problem& p) {
                     p.inplace_state = true, p.state_dtype = DType::float8_e5m2;
                     p.checkpoint_every = 64;
                   },
                   {"state_dtype is float8_e5m2", "with checkpoints, which have no scale"}},
           BadCase{"Float8IntermediateStates",
                   [](Problem& p) {
                     p.pass = Pass::recurrent, p.T = 2, p.intermediate_rows = 1;
                     p.inplace_state = true, p.state_dtype = DType::float8_e5m2;
                   },
                   {"state_dtype is float8_e5m2", "with intermediate_states"}},
           BadCase{"Float8StatesOfGdn2",
                   [](Problem& p) {
                     p.op = "gdn2", p.inplace_state = true, p.state_dtype = DType::float8_e4m3;
                   },
                   {"state_dtype is float8_e4m3", "for gdn2; only", "kda take float8"}},
           BadCase{"Scale",
                   [](Problem& p) { p.scale = std::numeric_limits<float>::quiet_NaN(); },
                   {"scale is nan", "finite"}},
           BadCase{"LowerBound",
                   [](Problem& p) { p.lower_bound = -5.0F; },
                   {"lower_bound is -5", "absent for gated_delta_rule", "kda"}},
           BadCase{"BatchInvariantChunks",
                   [](Problem& p) { p.batch_invariant = true, p.chunk_size = 128; },
                   {"chunk_size is 128", "16, 32 or 64 with batch_invariant"}}),
    [](const auto& bad) { return std::string(bad.param.name); });

INSTANTIATE_TEST_SUITE_P(Operators, BadProblem,
                         Values(BadCase{"num_householder",
                                        [](Problem& p) { p.num_householder = 2; },
                                        {"num_householder is 2", "1 for gated_delta_rule"}}),
                         [](const auto& bad) { return std::string(bad.param.name); });

TEST(Problem, EmptyIsLegal) {
  Problem empty;
  EXPECT_NO_THROW(validate(empty));  // T = 0
  empty.B = empty.N = 0;
  EXPECT_NO_THROW(validate(empty));
  empty.B = 1, empty.packed = true;
  EXPECT_NO_THROW(validate(empty));
  EXPECT_NO_THROW(validate_seqlens(empty, std::array<std::int64_t, 1>{0}));
}

TEST(Problem, OddDimensionsAreLegal) {
  Problem problem;
  problem.T = 7, problem.K = 60, problem.V = 100, problem.H = 3, problem.HV = 9;
  EXPECT_NO_THROW(validate(problem));
  problem.K = 256, problem.V = 1;
  EXPECT_NO_THROW(validate(problem));
}

void expect_bad_seqlens(const std::vector<std::int64_t>& seqlens, const char* entry) {
  Problem problem;
  problem.packed = true, problem.N = 3, problem.T = 10;
  try {
    validate_seqlens(problem, seqlens);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    EXPECT_NE(std::string(error.what()).find(entry), std::string::npos) << error.what();
  }
}

TEST(Problem, SequencesOfDraftsAreShort) {
  Problem problem;
  problem.pass = Pass::recurrent, problem.packed = true, problem.N = 2, problem.T = 20;
  problem.inplace_state = problem.state_index = true, problem.index_columns = 4;
  EXPECT_NO_THROW(validate_seqlens(problem, std::vector<std::int64_t>{0, 16, 20}));
  try {
    validate_seqlens(problem, std::vector<std::int64_t>{0, 3, 20});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "the length of sequence 1 is 17; it must be at most 16 with index_columns");
  }
}

TEST(Problem, SeqlensAreCheckedEntryByEntry) {
  Problem problem;
  problem.packed = true, problem.N = 3, problem.T = 10;
  EXPECT_NO_THROW(validate_seqlens(problem, std::vector<std::int64_t>{0, 4, 4, 10}));
  expect_bad_seqlens({0, 4, 10}, "length of cu_seqlens is 3");
  expect_bad_seqlens({}, "length of cu_seqlens is 0");
  expect_bad_seqlens({1, 4, 4, 10}, "cu_seqlens[0] is 1");
  expect_bad_seqlens({0, 5, 4, 10}, "cu_seqlens[2] is 4");
  expect_bad_seqlens({0, 4, 4, 11}, "cu_seqlens[3] is 11");
}

TEST(Problem, KeyBucketsArePowersOfTwo) {
  Problem problem;
  problem.packed = true;
  problem.T = 4097, problem.N = 9;
  EXPECT_EQ(problem_key(problem).tokens, 8192);
  EXPECT_EQ(problem_key(problem).sequences, 16);
  problem.T = 4096, problem.N = 1;
  EXPECT_EQ(problem_key(problem).tokens, 4096);
  EXPECT_EQ(problem_key(problem).sequences, 1);
  problem.T = 0, problem.N = 0;
  EXPECT_EQ(problem_key(problem).tokens, 0);
  EXPECT_EQ(problem_key(problem).sequences, 0);
}

TEST(Problem, KeyFamilyIgnoresFieldsThatNoPlanDependsOn) {
  Problem a;
  a.T = 100;
  Problem b = a;
  b.T = 5000, b.scale = 0.25F, b.state_dtype = DType::bf16, b.seqlens_dtype = DType::int64;
  b.state_v_first = true;  // without a state to lay out
  EXPECT_EQ(problem_key(a).family, problem_key(b).family);
}

TEST(Problem, KeyFamilyTellsApartEverythingElse) {
  const std::vector<std::function<void(Problem&)>> changes{
      [](Problem&) {},
      [](Problem& p) { p.HV = 2; },
      [](Problem& p) { p.H = p.HV = 2; },
      [](Problem& p) { p.K = 64; },
      [](Problem& p) { p.V = 64; },
      [](Problem& p) { p.dtype = p.beta_dtype = DType::fp16; },
      [](Problem& p) { p.beta_dtype = DType::fp32; },
      [](Problem& p) { p.g_dtype = DType::bf16; },
      [](Problem& p) { p.packed = true; },
      [](Problem& p) { p.packed = true, p.seqlens_dtype = DType::int64; },
      [](Problem& p) { p.precision = Precision::ieee; },
      [](Problem& p) { p.use_qk_l2norm = true; },
      [](Problem& p) { p.use_gate_in_kernel = true; },
      [](Problem& p) { p.use_gate_in_kernel = p.has_dt_bias = true; },
      [](Problem& p) { p.use_beta_sigmoid = true; },
      [](Problem& p) { p.use_beta_sigmoid = p.allow_neg_eigval = true; },
      [](Problem& p) { p.initial_state = true; },
      [](Problem& p) { p.initial_state = true, p.state_dtype = DType::bf16; },
      [](Problem& p) { p.output_final_state = true; },
      [](Problem& p) { p.output_final_state = p.state_v_first = true; },
      [](Problem& p) { p.batch_invariant = true; },
  };
  std::set<std::string> families;
  for (const auto& change : changes) {
    Problem problem;
    change(problem);
    EXPECT_NO_THROW(validate(problem));
    families.insert(problem_key(problem).family);
  }
  EXPECT_EQ(families.size(), changes.size());
}

TEST(Problem, DefaultsFollowTheDType) {
  Problem problem;
  EXPECT_EQ(precision_floor(problem), Precision::tf32);
  problem.dtype = DType::fp32;
  EXPECT_EQ(precision_floor(problem), Precision::tf32x3);
  problem.precision = Precision::ieee;
  EXPECT_EQ(precision_floor(problem), Precision::ieee);
  problem.K = 64;
  EXPECT_EQ(scale_of(problem), 0.125F);
  problem.scale = 3.0F;
  EXPECT_EQ(scale_of(problem), 3.0F);
}

TEST(Problem, KeptChunksAreSmallerWhereRowsAreWide) {
  Problem problem;
  problem.V = 512;
  problem.return_intermediate_states = true;
  EXPECT_EQ(kept_chunk_size(problem), 64);
  problem.return_intermediate_states = false;
  problem.disable_recompute = true;
  EXPECT_EQ(kept_chunk_size(problem), 32);
  problem.dtype = DType::fp32;
  EXPECT_EQ(kept_chunk_size(problem), 16);
  problem.V = 128;
  EXPECT_EQ(kept_chunk_size(problem), 64);
  problem.chunk_size = 128;
  EXPECT_EQ(kept_chunk_size(problem), 128);
}

TEST(Seqlens, AreNamedWhereTheyCannotBeRead) {
  Problem problem;
  problem.packed = true, problem.N = 2, problem.T = 50;
  const auto refusal = [&](auto&& lengths) -> std::string {
    try {
      validate_seqlens(problem, lengths);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      return error.what();
    }
    return "accepted";
  };
  const auto expect = [](const std::string& message, std::string_view words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  using Lengths = std::span<const std::int64_t>;
  std::vector<std::int64_t> good{0, 20, 50};
  std::vector<std::int32_t> narrow{0, 20, 50};
  EXPECT_EQ(refusal(Lengths(good)), "accepted");
  EXPECT_EQ(refusal(TensorView(good.data(), DType::int64, {3})), "accepted");
  EXPECT_EQ(refusal(TensorView(narrow.data(), DType::int32, {3})), "accepted");

  expect(refusal(Lengths()), "the length of cu_seqlens is 0; it must be N + 1 = 3");
  expect(refusal(Lengths(static_cast<const std::int64_t*>(nullptr), 3)), "cu_seqlens is null");
  expect(refusal(TensorView(nullptr, DType::int64, {3})), "cu_seqlens is null");
  expect(refusal(TensorView()), "the dtype of cu_seqlens is fp32");
  expect(refusal(TensorView(good.data(), DType::fp32, {3})), "the dtype of cu_seqlens is fp32");
  expect(refusal(TensorView(good.data(), DType::int64, {1, 3})), "the rank of cu_seqlens is 2");
  TensorView negative(good.data(), DType::int64, {3});
  negative.shape[0] = -3;
  expect(refusal(negative), "the length of cu_seqlens is -3");
  for (const std::int64_t N : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(),
                               std::numeric_limits<std::int64_t>::max()}) {
    problem.N = N;
    expect(refusal(Lengths()), "N is " + std::to_string(N));
    expect(refusal(Lengths(good)), "N is " + std::to_string(N));
    expect(refusal(TensorView(good.data(), DType::int64, {3})), "N is " + std::to_string(N));
  }
}

TEST(Problem, HintsOfTheLongestSequenceAreOfPacksInChunkedPasses) {
  const auto refusal = [](const Problem& problem) -> std::string {
    try {
      validate(problem);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  Problem p;
  p.T = 100, p.seqlens_hint = 8;
  const std::string nowhere = "seqlens_hint is 8; it must be absent unless the batch is packed";
  EXPECT_TRUE(refusal(p).starts_with(nowhere)) << refusal(p);
  p.packed = true, p.N = 3;
  EXPECT_EQ(refusal(p), "accepted");
  EXPECT_EQ(longest_sequence(p), 34);  // which is the mean
  p.pass = Pass::recurrent;
  EXPECT_EQ(refusal(p), "seqlens_hint is 8; it must be absent for the recurrent pass");
  p.pass = Pass::backward, p.seqlens_hint = 51;
  EXPECT_EQ(refusal(p), "accepted");
  EXPECT_EQ(longest_sequence(p), 51);
  p.seqlens_hint = 101;
  EXPECT_EQ(refusal(p), "accepted");
  EXPECT_EQ(longest_sequence(p), 100);
  p.seqlens_hint = -1;
  EXPECT_TRUE(refusal(p).starts_with("seqlens_hint is -1; it must be between 0 and"));
}

TEST(Problem, PresetsAreLegalAndFound) {
  for (const Preset& preset : presets()) {
    Problem problem;
    problem.op = preset.op;
    problem.H = preset.H, problem.HV = preset.HV, problem.K = preset.K, problem.V = preset.V;
    EXPECT_NO_THROW(validate(problem)) << preset.name;
    EXPECT_EQ(&find_preset(preset.name), &preset);
  }
  EXPECT_EQ(find_preset("qwen3-next-80b").HV, 32);
  try {
    find_preset("qwen9");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("one of: qwen3.5-9b, "), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace wyvern
