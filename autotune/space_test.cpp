// Spaces of the templates of the build, on architectures that need not be here.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "autotune/neighbourhood.hpp"
#include "autotune/space.hpp"
#include "templates/template.hpp"

namespace wyvern {
namespace {

struct Shape {
  std::int64_t B, T, H, HV, K, V;
};

/// Problems that between them have every operator and pass, and shapes that select other templates.
std::vector<Problem> problems() {
  std::vector<Problem> all;
  for (const std::string_view op : operators())
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent})
      for (const Shape& s : {Shape{1, 8192, 64, 64, 128, 128}, Shape{1, 8192, 8, 8, 256, 256},
                             Shape{1, 512, 1, 2, 32, 32}}) {
        if (s.K == 256 && op != "kda") continue;
        Problem problem;
        problem.op = op;
        problem.pass = pass;
        problem.B = problem.N = s.B;
        problem.T = pass == Pass::recurrent ? 1 : s.T;
        problem.H = s.H;
        problem.HV = s.HV;
        problem.K = s.K;
        problem.V = s.V;
        problem.use_qk_l2norm = s.K != 256;
        problem.use_gate_in_kernel = s.K == 128 && op != "delta_rule";
        problem.num_householder = op == "gated_delta_product" ? 2 : 1;
        problem.packed = problem.state_v_first = s.K == 32;
        problem.return_intermediate_states = s.K == 32 && pass == Pass::forward;
        problem.disable_recompute = s.K == 32 && pass == Pass::backward;
        problem.dtype = problem.beta_dtype = s.K == 32 ? DType::fp32 : DType::bf16;
        problem.initial_state = problem.output_final_state = true;
        if (pass != Pass::recurrent && s.K != 256) problem.output_norm = Activation::silu;
        if (s.K != 256) problem.short_conv = 4;
        all.push_back(problem);
        if (pass == Pass::recurrent || s.K != 128) continue;
        if (pass == Pass::forward) {
          problem.output_dtype = DType::float8_e4m3;
          all.push_back(problem);
          problem.output_dtype.reset();
        }
        problem.output_norm.reset();
        problem.disable_recompute = true;
        all.push_back(problem);
        problem.disable_recompute = false;
        problem.summary = true;
        (pass == Pass::forward ? problem.output_final_state : problem.initial_state) = false;
        all.push_back(problem);
      }
  return all;
}

/// How many configs steps lead to from the default.
std::size_t reachable(const Group& group, const Neighbourhood& steps) {
  std::set<std::size_t> reached{group.default_config};
  std::vector<std::size_t> frontier{group.default_config};
  while (!frontier.empty()) {
    const std::size_t at = frontier.back();
    frontier.pop_back();
    for (const std::size_t next : steps.of(at))
      if (reached.insert(next).second) frontier.push_back(next);
  }
  return reached.size();
}

/// A plan covers all of an optional group or none of it: kda_segment and kda_resume come together.
TEST(Space, HasPlansWithAndWithoutAnOptionalGroup) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p;
  p.op = "kda";
  p.T = 32768, p.H = p.HV = 8, p.K = p.V = 128;
  for (const bool packed : {false, true}) {
    p.packed = packed;
    const SearchSpace space = build_space(p, target);
    EXPECT_EQ(space.default_plan.size(), packed ? 4U : 3U);
    EXPECT_TRUE(candidates_of(space, space.default_plan).has_value()) << packed;
    for (const Group& group : space.groups) {
      ASSERT_LT(group.step, group.context.size());
      const bool segments = std::ranges::any_of(group.context, [&](std::size_t index) {
        return space.groups[index].template_id == "kda_segment.hopper";
      });
      const bool resumes = std::ranges::any_of(group.context, [&](std::size_t index) {
        return space.groups[index].template_id == "kda_resume.hopper";
      });
      EXPECT_EQ(segments, resumes) << group.template_id;
    }
  }
}

/// The kernel behind the groups stands for scans that another step has split.
TEST(Space, HasABackwardPassBySegmentsOnce) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p;
  p.op = "gated_delta_rule";
  p.pass = Pass::backward;
  p.T = 32768, p.H = 2, p.HV = 8, p.K = p.V = 128;
  const SearchSpace space = build_space(p, target);
  EXPECT_EQ(space.default_plan.size(), 5U);
  EXPECT_TRUE(candidates_of(space, space.default_plan).has_value());
  std::map<std::int64_t, int> layers;  // that have the first step, by SEG
  for (const Layer& layer : space.layers)
    if (layer.SEG != 0)
      layers[layer.SEG] += std::ranges::any_of(layer.edges, [&](const Edge& edge) {
        return space.groups[edge.group].template_id == "delta_scans_segment.hopper";
      });
  EXPECT_FALSE(layers.empty());
  for (const auto& [SEG, count] : layers) EXPECT_EQ(count, 1) << SEG;
}

TEST(Space, EveryLegalConfigCanBeReachedFromTheDefault) {
  std::set<std::string> templates;
  std::set<std::pair<std::string, std::vector<Config>>> seen;
  for (const Target& target : {cuda_target("sm_86"), cuda_target("sm_90a"), host_target()})
    for (const Problem& problem : problems()) {
      const SearchSpace space = build_space(problem, target);
      for (const Group& group : space.groups) {
        templates.insert(group.template_id);
        if (!seen.emplace(group.template_id, group.configs).second) continue;
        const Neighbourhood steps(group.configs);
        EXPECT_EQ(reachable(group, steps), group.configs.size())
            << group.template_id << " BT=" << group.BT << " on " << target.name();
      }
    }
  // No operator has these stages.
  templates.insert({"l2norm.cpu", "l2norm.portable", "fold.cpu", "fold.portable"});
  for (const Template& t : all_templates())
    EXPECT_TRUE(templates.contains(t.id())) << t.id() << " takes part in no space";
}

/// A summary has no plan of whole sequences, and one that is short has those of one segment.
TEST(Space, OfSummariesHasSegmentsAlone) {
  Target target = cuda_target("sm_90a");
  target.limits.multiprocessors = 132;
  Problem p;
  p.T = 100, p.K = p.V = 128;
  p.summary = true;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    p.pass = pass;
    const SearchSpace space = build_space(p, target);
    EXPECT_TRUE(candidates_of(space, space.default_plan).has_value());
    std::set<std::int64_t> lengths;
    for (const Layer& layer : space.layers) lengths.insert(layer.SEG);
    EXPECT_EQ(lengths, (std::set<std::int64_t>{8, 16, 32}));
    const std::string kernel =
        pass == Pass::forward ? "delta_segment.hopper" : "delta_scans_segment.hopper";
    EXPECT_TRUE(std::ranges::any_of(
        space.groups, [&](const Group& group) { return group.template_id == kernel; }));
  }
}

TEST(Neighbourhood, BridgesPartsThatTwoStepsDoNotConnect) {
  const auto config = [](std::int64_t a, std::int64_t b, std::int64_t c) {
    return Config{{"a", a}, {"b", b}, {"c", c}};
  };
  const std::vector<Config> configs{config(1, 1, 1), config(1, 1, 2), config(2, 2, 3),
                                    config(2, 2, 2)};
  const Neighbourhood steps(configs);
  EXPECT_EQ(steps.distance(0, 2), 3U);
  EXPECT_EQ(steps.of(0), (std::vector<std::size_t>{1}));
  EXPECT_EQ(steps.of(1), (std::vector<std::size_t>{0, 3}));  // two tunables apart
  const std::vector<Config> apart{config(1, 1, 1), config(2, 2, 2), config(2, 3, 2)};
  EXPECT_EQ(Neighbourhood(apart).of(0), (std::vector<std::size_t>{1}));
  EXPECT_EQ(Neighbourhood(apart).of(1), (std::vector<std::size_t>{2, 0}));
}

}  // namespace
}  // namespace wyvern
