// Runs two tokens of the gated delta rule on the CPU through the installed library and compares
// with values worked out by hand.
#include <wyvern/cache.hpp>
#include <wyvern/runtime.hpp>

#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kT = 2, kK = 16, kV = 16;

bool near(float value, float wanted) {
  if (std::fabs(value - wanted) <= 1e-5F) return true;
  std::printf("got %g, wanted %g\n", static_cast<double>(value), static_cast<double>(wanted));
  return false;
}

/// `exact`: a pack has the problem's plan.
bool run(const char* cache_directory, bool exact) {
  wyvern::Problem problem;
  problem.T = kT;
  problem.K = kK;
  problem.V = kV;
  problem.dtype = problem.beta_dtype = wyvern::DType::fp32;
  problem.scale = 1.0F;
  problem.output_final_state = true;

  // Both keys are the first unit vector, so only the state's first row is ever written:
  // u_0 = 0.5 v_0, row = u_0; then row <- 0.5 row, u_1 = v_1 - row, row <- row + u_1 = v_1.
  std::vector<float> q(kT * kK, 0.0F), k(kT * kK, 0.0F), v(kT * kV), beta{0.5F, 1.0F};
  std::vector<float> g{0.0F, std::log(0.5F)}, o(kT * kV, NAN), state(kK * kV, NAN);
  q[0] = q[kK] = k[0] = k[kK] = 1.0F;
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = 1.0F + static_cast<float>(i);

  wyvern::RuntimeOptions options;
  options.cache = std::make_shared<wyvern::Cache>(cache_directory);
  wyvern::Runtime runtime(options);
  const wyvern::Device device = wyvern::Device::open("cpu");
  const wyvern::Operator op = runtime.prepare(device, problem);
  const auto workspace = device.allocate(op.workspace_bytes());
  if (exact != (op.origin() == wyvern::Origin::exact)) {
    std::printf("the plan is %s\n", std::string(to_string(op.origin())).c_str());
    return false;
  }

  const auto place = [&](std::vector<float>& host) {
    auto memory = device.allocate(host.size() * sizeof(float));
    device.copy_in(memory.get(), host.data(), host.size() * sizeof(float));
    return memory;
  };
  const auto dq = place(q), dk = place(k), dv = place(v), db = place(beta), dg = place(g);
  const auto out = place(o), last = place(state);
  const auto fp32 = wyvern::DType::fp32;
  wyvern::Arguments arguments;
  arguments.q = {dq.get(), fp32, {1, kT, 1, kK}};
  arguments.k = {dk.get(), fp32, {1, kT, 1, kK}};
  arguments.v = {dv.get(), fp32, {1, kT, 1, kV}};
  arguments.beta = {db.get(), fp32, {1, kT, 1}};
  arguments.g = {dg.get(), fp32, {1, kT, 1}};
  arguments.o = {out.get(), fp32, {1, kT, 1, kV}};
  arguments.final_state = {last.get(), fp32, {1, 1, kK, kV}};
  op.launch(arguments, workspace.get());
  device.synchronize();
  device.copy_out(o.data(), out.get(), o.size() * sizeof(float));
  device.copy_out(state.data(), last.get(), state.size() * sizeof(float));

  bool good = true;
  for (std::size_t i = 0; i < kV; ++i) {
    good &= near(o[i], 0.5F * v[i]);
    good &= near(o[kV + i], v[kV + i]);
    good &= near(state[i], v[kV + i]);
    good &= near(state[kV + i], 0.0F);
  }
  return good;
}

/// An error must arrive as the library's one exception type, with its kind.
bool refuses_bad_input() {
  try {
    wyvern::Device::open("tpu");
  } catch (const wyvern::Error& error) {
    return error.kind() == wyvern::ErrorKind::kBadInput;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (!refuses_bad_input() || !run(argv[1], argc > 2)) return 1;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  std::printf("ok\n");
  return 0;
}
