#include "tools/wyvern/operands.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace wyvern::cli {
namespace {

using Shape = std::vector<std::int64_t>;

template <class... Args>
[[noreturn]] void reject(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::kBadInput, fmt::format(format, std::forward<Args>(args)...));
}

const HostTensor* find(const Tensors& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

const HostTensor& need(const Tensors& tensors, const std::string& name, std::string_view shape) {
  if (const HostTensor* tensor = find(tensors, name)) return *tensor;
  std::vector<std::string> names;
  for (const auto& [held, tensor] : tensors) names.push_back(held);
  reject("{} is missing from the input, which holds [{}]; it must be there with shape {}", name,
         fmt::join(names, ", "), shape);
}

void need_rank(const HostTensor& tensor, std::string_view name, std::size_t rank,
               std::string_view shape) {
  if (tensor.shape.size() != rank)
    reject("{} has shape {}; it must have {} dimensions, {}", name, shape_text(tensor.shape), rank,
           shape);
}

void need_shape(const HostTensor& tensor, std::string_view name, const Shape& wanted,
                std::string_view symbols) {
  if (tensor.shape != wanted)
    reject("{} has shape {}; it must be {} = {}", name, shape_text(tensor.shape), symbols,
           shape_text(wanted));
}

void need_dtype(const HostTensor& tensor, std::string_view name, std::vector<DType> legal) {
  if (std::find(legal.begin(), legal.end(), tensor.dtype) != legal.end()) return;
  std::sort(legal.begin(), legal.end());
  legal.erase(std::unique(legal.begin(), legal.end()), legal.end());
  std::vector<std::string_view> names;
  for (const DType type : legal) names.push_back(to_string(type));
  reject("{} is {}; it must be {}", name, to_string(tensor.dtype), fmt::join(names, " or "));
}

/// q, k, v, beta and g: they set the dimensions.
void infer_main(const Tensors& tensors, Problem& p) {
  const HostTensor& q = need(tensors, "q", "[B,T,H,K]");
  need_rank(q, "q", 4, "[B,T,H,K]");
  need_dtype(q, "q", {DType::bf16, DType::fp16, DType::fp32});
  p.B = p.N = q.shape[0];
  p.T = q.shape[1];
  p.H = q.shape[2];
  p.K = q.shape[3];
  p.dtype = q.dtype;
  const HostTensor& k = need(tensors, "k", "[B,T,H,K]");
  need_shape(k, "k", q.shape, "[B,T,H,K]");
  need_dtype(k, "k", {p.dtype});
  const HostTensor& v = need(tensors, "v", "[B,T,HV,V]");
  need_rank(v, "v", 4, "[B,T,HV,V]");
  p.HV = v.shape[2];
  p.V = v.shape[3];
  need_shape(v, "v", {p.B, p.T, p.HV, p.V}, "[B,T,HV,V]");
  need_dtype(v, "v", {p.dtype});
  const Shape per_head{p.B, p.T, p.HV};
  const HostTensor& beta = need(tensors, "beta", "[B,T,HV]");
  need_shape(beta, "beta", per_head, "[B,T,HV]");
  need_dtype(beta, "beta", {p.dtype, DType::fp32});
  p.beta_dtype = beta.dtype;
  const HostTensor& g = need(tensors, "g", "[B,T,HV]");
  need_shape(g, "g", per_head, "[B,T,HV]");
  need_dtype(g, "g", {p.dtype, DType::fp32});
  p.g_dtype = g.dtype;
}

void infer_seqlens(const HostTensor& tensor, Selection& selection) {
  Problem& p = selection.problem;
  need_rank(tensor, "cu_seqlens", 1, "[N+1]");
  need_dtype(tensor, "cu_seqlens", {DType::int32, DType::int64});
  if (tensor.shape[0] < 1) reject("cu_seqlens has shape [0]; it must be [N+1]");
  if (p.B != 1) reject("B is {}; with cu_seqlens it must be 1", p.B);
  p.packed = true;
  p.N = tensor.shape[0] - 1;
  p.seqlens_dtype = tensor.dtype;
  selection.cu_seqlens.resize(static_cast<std::size_t>(p.N + 1));
  if (tensor.dtype == DType::int64) {
    std::memcpy(selection.cu_seqlens.data(), tensor.data.get(), tensor.bytes());
  } else {
    const auto* values = static_cast<const std::int32_t*>(tensor.data.get());
    std::copy(values, values + p.N + 1, selection.cu_seqlens.begin());
  }
}

void infer_state(const HostTensor& tensor, Problem& p) {
  need_dtype(tensor, "initial_state", {DType::fp32, DType::bf16});
  if (p.state_v_first)
    need_shape(tensor, "initial_state", {p.N, p.HV, p.V, p.K}, "[N,HV,V,K]");
  else
    need_shape(tensor, "initial_state", {p.N, p.HV, p.K, p.V}, "[N,HV,K,V]");
  p.initial_state = true;
  p.state_dtype = tensor.dtype;
}

void infer_gate(const Tensors& tensors, Problem& p) {
  if (!p.use_gate_in_kernel) return;
  const HostTensor* A_log = find(tensors, "A_log");
  if (A_log == nullptr)
    reject("A_log is missing from the input; --use-gate-in-kernel needs it as fp32 [HV] = [{}]",
           p.HV);
  need_shape(*A_log, "A_log", {p.HV}, "[HV]");
  need_dtype(*A_log, "A_log", {DType::fp32});
  if (const HostTensor* dt_bias = find(tensors, "dt_bias")) {
    need_shape(*dt_bias, "dt_bias", {p.HV}, "[HV]");
    need_dtype(*dt_bias, "dt_bias", {DType::fp32});
    p.has_dt_bias = true;
  }
}

TensorView view_of(const Tensors& tensors, const std::string& name, bool used) {
  const HostTensor* tensor = used ? find(tensors, name) : nullptr;
  return tensor != nullptr ? tensor->view() : TensorView{};
}

std::size_t bytes_of(const TensorView& view) {
  return static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
}

constexpr TensorView Arguments::*kInputs[] = {
    &Arguments::q,          &Arguments::k,     &Arguments::v,
    &Arguments::beta,       &Arguments::g,     &Arguments::initial_state,
    &Arguments::cu_seqlens, &Arguments::A_log, &Arguments::dt_bias};
constexpr TensorView Arguments::*kOutputs[] = {&Arguments::o, &Arguments::final_state};

}  // namespace

Selection infer(const std::string& op, const Tensors& tensors, const OptionFlags& options) {
  require_operator(op);
  Selection selection;
  Problem& p = selection.problem;
  p.op = op;
  p.output_final_state = true;
  apply(options, p);
  infer_main(tensors, p);
  if (const HostTensor* seqlens = find(tensors, "cu_seqlens")) infer_seqlens(*seqlens, selection);
  if (const HostTensor* state = find(tensors, "initial_state")) infer_state(*state, p);
  infer_gate(tensors, p);
  validate(p);
  if (p.packed) validate_seqlens(p, selection.cu_seqlens);
  return selection;
}

Tensors make_outputs(const Problem& p) {
  Tensors outputs;
  outputs["o"] = HostTensor::make(p.dtype, {p.B, p.T, p.HV, p.V});
  Shape state{p.N, p.HV, p.K, p.V};
  if (p.state_v_first) std::swap(state[2], state[3]);
  if (p.output_final_state)
    outputs["final_state"] = HostTensor::make(DType::fp32, std::move(state));
  for (auto& [name, tensor] : outputs) std::memset(tensor.data.get(), kPoison, tensor.bytes());
  return outputs;
}

Arguments host_arguments(const Selection& selection, const Tensors& inputs,
                         const Tensors& outputs) {
  const Problem& p = selection.problem;
  Arguments a;
  a.q = view_of(inputs, "q", true);
  a.k = view_of(inputs, "k", true);
  a.v = view_of(inputs, "v", true);
  a.beta = view_of(inputs, "beta", true);
  a.g = view_of(inputs, "g", true);
  a.initial_state = view_of(inputs, "initial_state", p.initial_state);
  a.cu_seqlens = view_of(inputs, "cu_seqlens", p.packed);
  a.A_log = view_of(inputs, "A_log", p.use_gate_in_kernel);
  a.dt_bias = view_of(inputs, "dt_bias", p.has_dt_bias);
  a.o = view_of(outputs, "o", true);
  a.final_state = view_of(outputs, "final_state", p.output_final_state);
  if (p.packed) a.cu_seqlens_host = selection.cu_seqlens;
  return a;
}

DeviceArguments::DeviceArguments(const Device& device, const Arguments& host)
    : on_(device), host_(host), device_(host) {
  const auto place = [&](TensorView& view) {
    if (!view.present()) return;
    memory_.push_back(on_.allocate(std::max<std::size_t>(bytes_of(view), 1)));
    view.data = memory_.back().get();
  };
  for (const auto field : kInputs) {
    place(device_.*field);
    if ((host_.*field).present() && bytes_of(host_.*field) > 0)
      on_.copy_in((device_.*field).data, (host_.*field).data, bytes_of(host_.*field));
  }
  for (const auto field : kOutputs) place(device_.*field);
}

void DeviceArguments::poison() const {
  for (const auto field : kOutputs)
    if (const TensorView& view = device_.*field; view.present() && bytes_of(view) > 0)
      on_.fill(view.data, kPoison, bytes_of(view));
}

void DeviceArguments::fetch_outputs() const {
  for (const auto field : kOutputs)
    if (const TensorView& view = device_.*field; view.present() && bytes_of(view) > 0)
      on_.copy_out((host_.*field).data, view.data, bytes_of(view));
}

}  // namespace wyvern::cli
