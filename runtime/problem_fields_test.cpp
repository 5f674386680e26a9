// The table of Problem's fields: that it has all of them, and what is made from it.
#include "runtime/problem_fields.hpp"

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern {
namespace {

/// Does not compile when Problem gains or loses a field: the table must follow.
TEST(ProblemFields, AreAllThere) {
  Problem problem;
  auto& [f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15, f16, f17, f18, f19, f20,
         f21, f22, f23, f24, f25, f26, f27, f28, f29, f30, f31, f32, f33, f34, f35, f36, f37, f38,
         f39, f40, f41, f42, f43, f44, f45, f46, f47, f48, f49, f50, f51, f52, f53, f54, f55, f56,
         f57, f58, f59, f60, f61, f62, f63, f64, f65, f66, f67, f68] = problem;
  std::set<const void*> fields{
      &f1,  &f2,  &f3,  &f4,  &f5,  &f6,  &f7,  &f8,  &f9,  &f10, &f11, &f12, &f13, &f14,
      &f15, &f16, &f17, &f18, &f19, &f20, &f21, &f22, &f23, &f24, &f25, &f26, &f27, &f28,
      &f29, &f30, &f31, &f32, &f33, &f34, &f35, &f36, &f37, &f38, &f39, &f40, &f41, &f42,
      &f43, &f44, &f45, &f46, &f47, &f48, &f49, &f50, &f51, &f52, &f53, &f54, &f55, &f56,
      &f57, &f58, &f59, &f60, &f61, &f62, &f63, &f64, &f65, &f66, &f67, &f68};
  const void* before = nullptr;
  for (const ProblemField& field : problem_fields()) {
    const void* const at =
        visit_field(field, problem, [](auto& value) { return static_cast<const void*>(&value); });
    EXPECT_EQ(fields.erase(at), 1U) << field.name << " is there twice";
    EXPECT_LT(before, at) << field.name << " is not where Problem has it";
    before = at;
  }
  EXPECT_TRUE(fields.empty());
}

TEST(ProblemFields, HaveNamesHelpAndOptionsOfTheirOwn) {
  std::set<std::string_view> names, options;
  std::set<int> places;
  for (const ProblemField& field : problem_fields()) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_FALSE(field.help.empty()) << field.name;
    EXPECT_EQ(&problem_field(field.name), &field);
    EXPECT_TRUE(field.key.place == 0 || places.insert(field.key.place).second) << field.name;
    EXPECT_TRUE(!field.distance || field.key.place != 0) << field.name;
    EXPECT_EQ(field.option.name.empty(), field.option.verbs == FieldOption::For::nothing);
    if (!field.option.name.empty()) {
      EXPECT_TRUE(options.insert(field.option.name).second) << field.option.name;
      EXPECT_TRUE(field.option.name.starts_with("--")) << field.option.name;
    }
  }
  EXPECT_THROW(problem_field("colour"), std::out_of_range);
}

TEST(ProblemFields, HaveAnIllegalExampleButForThreeThatAreAlwaysLegal) {
  Problem good;
  good.T = 8;
  EXPECT_NO_THROW(validate(good));
  std::vector<std::string_view> legal;
  for (const ProblemField& field : problem_fields()) {
    if (field.illegal.spoil == nullptr) {
      legal.push_back(field.name);
      continue;
    }
    Problem problem = good;
    field.illegal.spoil(problem);
    try {
      validate(problem);
      ADD_FAILURE() << field.name << ": the example is accepted";
    } catch (const Error& error) {
      const std::string_view words = field.illegal.words;
      const std::string_view first = words.substr(0, words.find(" .. "));
      EXPECT_TRUE(std::string_view(error.what()).starts_with(first))
          << field.name << ": '" << first << "' does not begin: " << error.what();
    }
  }
  EXPECT_EQ(legal,
            (std::vector<std::string_view>{"use_qk_l2norm", "initial_state", "state_v_first"}));
}

TEST(ProblemFields, ScopesAreSaidInWords) {
  EXPECT_EQ(scope_text(problem_field("scale").scope), "");
  EXPECT_EQ(scope_text(problem_field("inplace_state").scope), "forward, recurrent only");
  EXPECT_EQ(scope_text(problem_field("disable_recompute").scope), "forward, backward only");
  EXPECT_EQ(scope_text(problem_field("batch_invariant").scope), "forward, recurrent only");
  EXPECT_TRUE(scope_text(problem_field("checkpoint_every").scope).ends_with("forward only"));
  const std::string bounded = scope_text(problem_field("lower_bound").scope);
  EXPECT_TRUE(bounded.starts_with("gdn2, kda")) << bounded;
  EXPECT_TRUE(bounded.ends_with(" only")) << bounded;
}

/// Winners are stored under these: a key that changes loses them. Taken from a build before the
/// fields were a table (2026-11-21).
TEST(ProblemKey, StaysWhatItIs) {
  const struct {
    void (*set)(Problem&);
    const char* key;
  } cases[] = {
      {[](Problem& p) {
         p.op = "delta_rule", p.pass = Pass::recurrent, p.T = 25, p.H = 2, p.HV = 6, p.V = 16,
         p.state_dtype = DType::bf16, p.precision = Precision::ieee, p.use_qk_l2norm = true,
         p.use_beta_sigmoid = true, p.allow_neg_eigval = true, p.initial_state = true,
         p.state_v_first = true, p.chunk_size = 128, p.inplace_state = true, p.state_index = true,
         p.state_slots = 7, p.index_dtype = DType::int64;
       },
       "delta_rule/recurrent/H=2,HV=6,K=128,V=16/bf16,beta=bf16/floor=ieee/initial_state=bf16/"
       "state_v_first/qk_l2norm/beta_sigmoid,neg/chunk_size=128/inplace=bf16/state_index=int64/"
       "tokens=32/sequences=1"},
      {[](Problem& p) {
         p.pass = Pass::backward, p.T = 219, p.V = 16, p.N = 4, p.packed = true,
         p.dtype = DType::fp32, p.beta_dtype = DType::fp32, p.scale = 0.5F,
         p.precision = Precision::tf32, p.use_gate_in_kernel = true, p.has_dt_bias = true,
         p.use_beta_sigmoid = true, p.allow_neg_eigval = true, p.initial_state = true,
         p.output_final_state = true, p.state_v_first = true, p.chunk_size = 32,
         p.disable_recompute = true;
       },
       "gated_delta_rule/backward/H=1,HV=1,K=128,V=16/fp32,beta=fp32,g=fp32/floor=tf32/"
       "packed=int32/initial_state=fp32/final_state/state_v_first/gate,dt_bias/beta_sigmoid,neg/"
       "chunk_size=32/kept/tokens=256/sequences=4"},
      {[](Problem& p) {
         p.T = 4856, p.H = 2, p.HV = 4, p.V = 64, p.N = 6, p.packed = true, p.dtype = DType::fp16,
         p.beta_dtype = DType::fp16, p.g_dtype = DType::fp16, p.seqlens_dtype = DType::int64,
         p.precision = Precision::ieee, p.use_gate_in_kernel = true, p.disable_recompute = true,
         p.index_dtype = DType::int64;
       },
       "gated_delta_rule/forward/H=2,HV=4,K=128,V=64/fp16,beta=fp16,g=fp16/floor=ieee/packed=int64/"
       "gate/kept/tokens=8192/sequences=8"},
      {[](Problem& p) {
         p.op = "kda", p.pass = Pass::backward, p.T = 8238, p.K = 256, p.V = 100,
         p.beta_dtype = DType::fp32, p.state_dtype = DType::bf16, p.scale = 1.5F,
         p.lower_bound = -3.0F, p.use_gate_in_kernel = true, p.has_A_log = false,
         p.use_beta_sigmoid = true, p.allow_neg_eigval = true;
       },
       "kda/backward/H=1,HV=1,K=256,V=100/bf16,beta=fp32,g=fp32/floor=tf32/gate,bounded,no_A_log/"
       "beta_sigmoid,neg/tokens=16384/sequences=1"},
      {[](Problem& p) {
         p.op = "kda", p.T = 23, p.HV = 2, p.K = 256, p.N = 2, p.packed = true,
         p.state_dtype = DType::bf16, p.seqlens_dtype = DType::int64, p.scale = 2.0F,
         p.lower_bound = -5.0F, p.use_gate_in_kernel = true, p.has_A_log = false,
         p.has_dt_bias = true, p.allow_neg_eigval = true, p.output_final_state = true,
         p.return_intermediate_states = true, p.index_dtype = DType::int64;
       },
       "kda/forward/H=1,HV=2,K=256,V=128/bf16,beta=bf16,g=fp32/floor=tf32/packed=int64/final_state/"
       "gate,dt_bias,bounded,no_A_log/intermediate_states/tokens=32/sequences=2"},
      {[](Problem& p) {
         p.op = "kda", p.B = 0, p.T = 2834, p.H = 3, p.HV = 6, p.V = 512, p.N = 0,
         p.dtype = DType::fp16, p.beta_dtype = DType::fp32, p.seqlens_dtype = DType::int64,
         p.scale = 1.5F, p.lower_bound = -3.0F, p.use_gate_in_kernel = true,
         p.allow_neg_eigval = true, p.state_v_first = true, p.chunk_size = 32;
       },
       "kda/forward/H=3,HV=6,K=128,V=512/fp16,beta=fp32,g=fp32/floor=tf32/gate,bounded/"
       "chunk_size=32/tokens=0/sequences=0"},
      {[](Problem& p) {
         p.op = "kda", p.pass = Pass::recurrent, p.T = 12, p.K = 60, p.N = 5, p.packed = true,
         p.dtype = DType::fp32, p.beta_dtype = DType::fp32, p.seqlens_dtype = DType::int64,
         p.lower_bound = -1.0F, p.safe_gate = true, p.use_qk_l2norm = true,
         p.use_gate_in_kernel = true, p.has_dt_bias = true, p.initial_state = true,
         p.chunk_size = 16, p.inplace_state = true, p.index_dtype = DType::int64;
       },
       "kda/recurrent/H=1,HV=1,K=60,V=128/fp32,beta=fp32,g=fp32/floor=tf32x3/packed=int64/"
       "initial_state=fp32/qk_l2norm/gate,dt_bias,bounded/chunk_size=16/inplace=fp32/tokens=16/"
       "sequences=8"},
      {[](Problem& p) {
         p.op = "kda", p.pass = Pass::recurrent, p.T = 28, p.H = 2, p.HV = 4, p.K = 33, p.V = 100,
         p.packed = true, p.beta_dtype = DType::fp32, p.g_dtype = DType::bf16,
         p.state_dtype = DType::bf16, p.precision = Precision::tf32x3, p.lower_bound = -5.0F,
         p.safe_gate = true, p.use_qk_l2norm = true, p.use_beta_sigmoid = true,
         p.initial_state = true, p.output_final_state = true, p.state_v_first = true,
         p.chunk_size = 64, p.state_index = true, p.state_slots = 2;
       },
       "kda/recurrent/H=2,HV=4,K=33,V=100/bf16,beta=fp32,g=bf16/floor=tf32x3/packed=int32/"
       "initial_state=bf16/final_state/state_v_first/qk_l2norm/safe_gate/beta_sigmoid/"
       "chunk_size=64/state_index=int32/tokens=32/sequences=1"},
  };
  for (const auto& one : cases) {
    Problem problem;
    one.set(problem);
    EXPECT_EQ(problem_key(problem).to_string(), one.key);
  }
}

TEST(ProblemKey, HasTheLongestSequenceOfAnUnevenPack) {
  Problem problem;
  problem.packed = true, problem.T = 36864, problem.N = 65;  // a mean of 568
  const ProblemKey even = problem_key(problem);
  for (const std::int64_t hint : {0, 568, 851}) {
    problem.seqlens_hint = hint;
    EXPECT_EQ(problem_key(problem).to_string(), even.to_string()) << hint;
  }
  for (const std::int64_t hint : {16385, 32768}) {
    problem.seqlens_hint = hint;
    EXPECT_EQ(problem_key(problem).family, even.family + "/longest=32768") << hint;
  }
  problem.seqlens_hint = 1 << 30;  // no sequence is longer than the pack
  EXPECT_EQ(problem_key(problem).family, even.family + "/longest=65536");
  problem.batch_invariant = true;
  EXPECT_EQ(problem_key(problem).family, even.family + "/batch_invariant");
  problem = {};
  problem.packed = true, problem.T = 0, problem.N = 0, problem.seqlens_hint = 5;
  EXPECT_EQ(problem_key(problem).family, even.family);
}

TEST(ProblemKey, TellsNewOptionsApart) {
  Problem problem;
  const std::string plain = problem_key(problem).family;
  EXPECT_EQ(plain.find("n="), std::string::npos);
  problem.num_householder = 2;
  EXPECT_NE(problem_key(problem).family, plain);
  problem.num_householder = 1;
  problem.has_g = false;
  EXPECT_NE(problem_key(problem).family, plain);
  problem.has_g = problem.batch_invariant = true;
  EXPECT_EQ(problem_key(problem).family, plain + "/batch_invariant");
  problem.batch_invariant = false;
  problem.inplace_state = problem.state_index = true;
  const std::string pool = problem_key(problem).family;
  problem.null_slot_zero = true;  // of a launch
  EXPECT_EQ(problem_key(problem).family, pool);
  problem.output_state_index = problem.has_initial_state = true;
  EXPECT_EQ(problem_key(problem).family, pool + "/output_state_index/has_initial_state");
  problem = {};
  problem.index_columns = 5, problem.disable_state_update = true;
  EXPECT_EQ(problem_key(problem).family, plain + "/index_columns/disable_state_update");
  problem = {};
  problem.intermediate_rows = 7, problem.parent = true;
  const std::string tree = problem_key(problem).family;
  EXPECT_EQ(tree, plain + "/token_states=fp32:int32/parent");
  problem.intermediate_rows = 8, problem.draft_tokens = 3;  // of a launch
  EXPECT_EQ(problem_key(problem).family, tree);
  problem = {};
  problem.output_norm = Activation::silu;
  EXPECT_EQ(problem_key(problem).family, plain + "/output_norm=silu");
  problem.output_norm = Activation::sigmoid, problem.norm_eps = 1e-5F;  // of a launch
  EXPECT_EQ(problem_key(problem).family, plain + "/output_norm=sigmoid");
  problem.output_dtype = DType::float8_e4m3;
  EXPECT_EQ(problem_key(problem).family, plain + "/output_norm=sigmoid/output=float8_e4m3");
  problem.output_scale_tokens_last = true;
  EXPECT_EQ(problem_key(problem).family,
            plain + "/output_norm=sigmoid/output=float8_e4m3,tokens_last");
  problem = {};
  problem.short_conv = 4;
  EXPECT_EQ(problem_key(problem).family, plain + "/short_conv=4");
  problem.conv_activation = Activation::silu;
  EXPECT_EQ(problem_key(problem).family, plain + "/short_conv=4");
  problem.conv_activation = Activation::none, problem.conv_dtype = DType::bf16;
  problem.has_conv_bias = problem.initial_conv_state = problem.output_conv_state = true;
  EXPECT_EQ(problem_key(problem).family,
            plain +
                "/short_conv=4,activation=none,bias,weight=bf16/initial_conv_state/"
                "final_conv_state");
  problem = {};
  problem.short_conv = 4, problem.inplace_conv_state = true, problem.conv_columns = 3;
  EXPECT_EQ(problem_key(problem).family, plain + "/short_conv=4/inplace_conv");
  problem.conv_columns = 7, problem.conv_tokens_first = true;
  EXPECT_EQ(problem_key(problem).family,
            plain + "/short_conv=4/inplace_conv,columns=7,tokens_first");
  problem = {};
  problem.summary = true;
  EXPECT_EQ(problem_key(problem).family, plain + "/summary");
  problem.transition = true;
  EXPECT_EQ(problem_key(problem).family, plain + "/summary,transition");
  problem = {};
  problem.checkpoint_every = 128;
  const std::string every = problem_key(problem).family;
  EXPECT_EQ(every, plain + "/checkpoint_every=128/checkpoints=fp32");
  problem.checkpoint_rows = 3;  // of a launch
  EXPECT_EQ(problem_key(problem).family, every);
  problem = {};
  problem.checkpoint_offsets = true;
  problem.index_dtype = DType::int64, problem.state_dtype = DType::bf16;
  EXPECT_EQ(problem_key(problem).family, plain + "/checkpoint_offsets=int64/checkpoints=bf16");
  problem.fp32_checkpoints = true;
  EXPECT_EQ(problem_key(problem).family, plain + "/checkpoint_offsets=int64/checkpoints=fp32");
}

}  // namespace
}  // namespace wyvern
