// References of the stages that work on rows, gates and tables alone.
#include <algorithm>
#include <cmath>

#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {
namespace {

using Slot = ChunkLayout::Slot;

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

void chunk_index(const StageContext& c, TensorMap& t) {
  const ChunkLayout& layout = c.layout;
  t["seq_offsets"] = Vector(layout.offsets.begin(), layout.offsets.end());
  t["chunk_offsets"] = Vector(layout.chunk_offsets.begin(), layout.chunk_offsets.end());
  Vector table;
  for (const Slot& slot : layout.slots) {
    table.push_back(static_cast<double>(slot.sequence));
    table.push_back(static_cast<double>(slot.chunk));
  }
  t["chunk_index"] = table;
}

/// The windows of a sequence: their slots, and whether there is anything in front of its rows.
struct Windows {
  std::int64_t from, to;
  bool given, null;
};
Windows windows_of(const StageContext& c, const TensorMap& t, std::size_t n) {
  const Vector &index = optional(t, "state_index"), &outputs = optional(t, "output_state_index");
  const Vector& has_initial_state = optional(t, "has_initial_state");
  Windows windows{static_cast<std::int64_t>(n), 0, true, false};
  if (!index.empty()) windows.from = static_cast<std::int64_t>(index[n]);
  windows.to = outputs.empty() ? windows.from : static_cast<std::int64_t>(outputs[n]);
  if (!index.empty())
    for (const std::int64_t slot : {windows.from, windows.to})
      windows.null = windows.null || slot < c.first_slot || slot >= c.state_slots;
  windows.given = !windows.null && (has_initial_state.empty() || has_initial_state[n] != 0);
  return windows;
}

/// q, k and v side by side as [tokens, channels], whose rows before a sequence's first are its
/// window's columns.
void short_conv(const StageContext& c, TensorMap& t) {
  const std::size_t keys = size(c.dims.H * c.dims.K), values = size(c.dims.HV * c.dims.V);
  const std::size_t channels = keys + size(c.steps) * (keys + values);
  const Vector &weight = t.at("conv_weight"), &bias = optional(t, "conv_bias");
  const Vector& initial = optional(t, "initial_conv_state");
  const std::size_t W = weight.size() / channels, before = W - 1;
  Vector last(size(c.layout.sequences()) * channels * before);
  const bool in_place = t.contains("conv_state");
  const Vector pool = optional(t, "conv_state");
  Vector after = pool;
  const auto place = [&](std::int64_t slot, std::size_t channel, std::size_t column) {
    if (!in_place) return (size(slot) * channels + channel) * before + column;
    const std::size_t columns = size(c.conv_columns);
    return c.conv_tokens_first ? (size(slot) * columns + column) * channels + channel
                               : (size(slot) * channels + channel) * columns + column;
  };
  std::size_t channel = 0;
  for (const auto& [name, width] : {std::pair("q", keys), std::pair("k", size(c.steps) * keys),
                                    std::pair("v", size(c.steps) * values)}) {
    const Vector& given = t.at(name);
    Vector rows(given.size());
    for (std::size_t i = 0; i < width; ++i, ++channel)
      for (std::size_t n = 0; n < size(c.layout.sequences()); ++n) {
        const std::size_t begin = size(c.layout.offsets[n]), end = size(c.layout.offsets[n + 1]);
        const Windows windows = windows_of(c, t, n);
        Vector x(before);
        for (std::size_t j = 0; windows.given && (in_place || !initial.empty()) && j < before; ++j)
          x[j] = (in_place ? pool : initial)[place(windows.from, channel, j)];
        for (std::size_t token = begin; token < end; ++token) x.push_back(given[token * width + i]);
        for (std::size_t token = begin; token < end; ++token) {
          double sum = bias.empty() ? 0 : bias[channel];
          sum += dot(&weight[channel * W], &x[token - begin], static_cast<std::int64_t>(W));
          rows[token * width + i] = c.conv_silu ? sum / (1 + std::exp(-sum)) : sum;
        }
        for (std::size_t j = 0; !windows.null && j < before; ++j) {
          const double row = x[x.size() - before + j];
          last[(n * channels + channel) * before + j] = row;
          if (in_place) after[place(windows.to, channel, j)] = row;
        }
      }
    t[std::string(name) + "_conv"] = rows;
  }
  t["final_conv_state"] = last;
  if (in_place) t["conv_state"] = after;
}

/// The gradient of sum(y dy) + sum(final dfinal) by all that y and final are made of.
void short_conv_bwd(const StageContext& c, TensorMap& t) {
  const std::size_t keys = size(c.dims.H * c.dims.K), values = size(c.dims.HV * c.dims.V);
  const std::size_t channels = keys + size(c.steps) * (keys + values);
  const Vector &weight = t.at("conv_weight"), &bias = optional(t, "conv_bias");
  const Vector& initial = optional(t, "initial_conv_state");
  const Vector& dfinal = optional(t, "dfinal_conv_state");
  const std::size_t W = weight.size() / channels, before = W - 1;
  const std::size_t parts = size((c.layout.tokens() + 255) / 256);
  Vector dinitial(size(c.layout.sequences()) * channels * before);
  Vector dweight(parts * channels * W), dbias(parts * channels);
  std::size_t channel = 0;
  for (const auto& [name, width] : {std::pair("q", keys), std::pair("k", size(c.steps) * keys),
                                    std::pair("v", size(c.steps) * values)}) {
    const Vector &given = t.at(name), &dy = t.at("d" + std::string(name) + "_conv");
    Vector gradient(given.size());
    for (std::size_t i = 0; i < width; ++i, ++channel)
      for (std::size_t n = 0; n < size(c.layout.sequences()); ++n) {
        const std::size_t begin = size(c.layout.offsets[n]), end = size(c.layout.offsets[n + 1]);
        const std::size_t window = (n * channels + channel) * before;
        Vector x(before);
        if (!initial.empty()) std::copy_n(&initial[window], before, x.begin());
        for (std::size_t token = begin; token < end; ++token) x.push_back(given[token * width + i]);
        Vector dx(x.size());
        if (!dfinal.empty())
          std::copy_n(&dfinal[window], before, dx.end() - static_cast<std::ptrdiff_t>(before));
        for (std::size_t token = begin; token < end; ++token) {
          const std::size_t part = token / 256 * channels + channel;
          double d = dy[token * width + i];
          if (c.conv_silu) {
            const double sum =
                (bias.empty() ? 0 : bias[channel]) +
                dot(&weight[channel * W], &x[token - begin], static_cast<std::int64_t>(W));
            const double open = 1 / (1 + std::exp(-sum));
            d *= open + sum * open * (1 - open);
          }
          dbias[part] += d;
          for (std::size_t j = 0; j < W; ++j) {
            dweight[part * W + j] += d * x[token - begin + j];
            dx[token - begin + j] += d * weight[channel * W + j];
          }
        }
        std::copy_n(dx.begin(), before, &dinitial[window]);
        for (std::size_t token = begin; token < end; ++token)
          gradient[token * width + i] = dx[before + token - begin];
      }
    t["d" + std::string(name)] = gradient;
  }
  t["dinitial_conv_state"] = dinitial;
  t["dconv_weight_part"] = dweight;
  t["dconv_bias_part"] = dbias;
}

/// Sums over the parts of each gradient that has them.
void layer_sum(const StageContext& c, TensorMap& t) {
  const auto add_up = [&](const std::string& name, std::size_t width) {
    const auto given = t.find(name + "_part");
    if (given == t.end()) return;
    Vector sums(width);
    for (std::size_t i = 0; i < given->second.size(); ++i) sums[i % width] += given->second[i];
    t[name] = sums;
  };
  const std::size_t keys = size(c.dims.H * c.dims.K), values = size(c.dims.HV * c.dims.V);
  const std::size_t channels = keys + size(c.steps) * (keys + values);
  add_up("dnorm_weight", size(c.dims.V));
  add_up("dconv_weight", channels * size(c.conv_width));
  add_up("dconv_bias", channels);
}

void l2norm_rstd(const StageContext& c, TensorMap& t) {
  const Vector& x = t.at("x");
  Vector rstd;
  for (std::size_t start = 0; start < x.size(); start += size(c.dims.K))
    rstd.push_back(1 / std::sqrt(dot(&x[start], &x[start], c.dims.K) + 1e-6));
  t["rstd"] = rstd;
}

void l2norm(const StageContext& c, TensorMap& t) {
  const Vector& x = t.at("x");
  Vector y(x.size());
  for (std::size_t start = 0; start < x.size(); start += size(c.dims.K)) {
    const double length = std::sqrt(dot(&x[start], &x[start], c.dims.K) + 1e-6);
    for (std::size_t i = start; i < start + size(c.dims.K); ++i) y[i] = x[i] / length;
  }
  t["y"] = y;
}

void l2norm_bwd(const StageContext& c, TensorMap& t) {
  const Vector &x = t.at("x"), &rstd = t.at("rstd"), &dy = t.at("dy");
  Vector dx(x.size());
  const std::size_t K = size(c.dims.K);
  for (std::size_t row = 0; row < rstd.size(); ++row) {
    const double along = dot(&x[row * K], &dy[row * K], c.dims.K) * rstd[row] * rstd[row];
    for (std::size_t i = row * K; i < (row + 1) * K; ++i)
      dx[i] = rstd[row] * (dy[i] - along * x[i]);
  }
  t["dx"] = dx;
}

void head_sum(const StageContext& c, TensorMap& t) {
  const Vector& heads = t.at("dy_heads");
  const std::int64_t K = c.dims.K, HV = c.dims.HV, group = HV / c.dims.H;
  Vector sums(heads.size() / size(group));
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const std::int64_t head = static_cast<std::int64_t>(i) / K % HV;
    const std::int64_t token = static_cast<std::int64_t>(i) / (K * HV);
    sums[size((token * c.dims.H + head / group) * K) + i % size(K)] += heads[i];
  }
  t["dy"] = sums;
}

/// Calls visit(i, x, A_log) for every element of g [tokens, HV] or [tokens, HV, width].
template <class Visit>
void for_each_gate(const StageContext& c, const TensorMap& t, Visit visit) {
  const Vector &g = t.at("g"), &A_log = optional(t, "A_log"), &bias = optional(t, "dt_bias");
  const std::size_t heads = size(c.dims.HV);
  const std::size_t tokens = size(c.layout.tokens());
  const std::size_t width = tokens == 0 ? 1 : g.size() / (heads * tokens);
  for (std::size_t i = 0; i < g.size(); ++i) {
    const std::size_t column = i % (heads * width);
    visit(i, g[i] + (bias.empty() ? 0 : bias[column]), A_log.empty() ? 0 : A_log[column / width]);
  }
}

void gate(const StageContext& c, TensorMap& t) {
  Vector g_log(t.at("g").size());
  for_each_gate(c, t, [&](std::size_t i, double x, double A_log) {
    g_log[i] = gate_value(x, A_log, c.lower_bound).g_log;
  });
  t["g_log"] = g_log;
}

/// The gradient of g, and of A_log and dt_bias as sums over each chunk slot's rows.
void gate_bwd(const StageContext& c, TensorMap& t) {
  const Vector& dg = either(t, "dg_log", "dg");
  Vector dg_raw(dg.size()), dA(dg.size());
  for_each_gate(c, t, [&](std::size_t i, double x, double A_log) {
    const GateValue value = gate_value(x, A_log, c.lower_bound);
    dg_raw[i] = dg[i] * value.by_x;
    dA[i] = dg[i] * value.by_A_log;
  });
  const std::size_t heads = size(c.dims.HV), tokens = size(c.layout.tokens());
  const std::size_t columns = tokens == 0 ? heads : dg.size() / tokens, width = columns / heads;
  Vector dA_part(c.layout.slots.size() * heads), dbias_part(c.layout.slots.size() * columns);
  for (std::size_t slot = 0; slot < c.layout.slots.size(); ++slot)
    for (std::size_t i = size(c.layout.slots[slot].begin) * columns;
         i < size(c.layout.slots[slot].begin + c.layout.slots[slot].rows) * columns; ++i) {
      dA_part[slot * heads + i % columns / width] += dA[i];
      dbias_part[slot * columns + i % columns] += dg_raw[i];
    }
  t["dg_raw"] = dg_raw;
  t["dA_part"] = dA_part;
  t["dbias_part"] = dbias_part;
}

Vector column_sums(const Vector& parts, std::size_t rows) {
  Vector sums(rows == 0 ? 0 : parts.size() / rows);
  for (std::size_t i = 0; i < parts.size(); ++i) sums[i % sums.size()] += parts[i];
  return sums;
}

void gate_param_sum(const StageContext& c, TensorMap& t) {
  for (const auto& [part, sum] : {std::pair{"dA_part", "dA_log"}, {"dbias_part", "ddt_bias"}})
    if (t.contains(part)) t[sum] = column_sums(t.at(part), c.layout.slots.size());
}

void cumsum(const StageContext& c, TensorMap& t) {
  t["G"] = chunk_local_cumsum(c.layout, either(t, "g_log", "g"), c.gate_floor);
  if (t.at("G").size() == zeros(c, c.dims.K).size()) t["Gk"] = t.at("G");
}

/// Gradients of gates that the floor raised are 0.
void reverse_cumsum(const StageContext& c, TensorMap& t) {
  const Vector &dG = either(t, "dG", "dGk"), &G = either(t, "G", "Gk");
  Vector dg(dG.size());
  const std::size_t columns = dG.size() / std::max<std::size_t>(size(c.layout.tokens()), 1);
  for (const Slot& slot : c.layout.slots)
    for (std::size_t column = 0; column < columns; ++column) {
      double sum = 0;
      for (std::int64_t r = slot.rows - 1; r >= 0; --r) {
        const std::size_t at = size(slot.begin + r) * columns + column;
        sum += dG[at];
        const double g = G[at] - (r == 0 ? 0 : G[at - columns]);
        dg[at] = g <= 0.9999 * c.gate_floor ? 0 : sum;
      }
    }
  t["dg"] = dg;
}

}  // namespace

Vector chunk_local_cumsum(const ChunkLayout& layout, const Vector& g, double floor) {
  Vector G(g.size());
  const std::size_t columns = g.size() / std::max<std::size_t>(size(layout.tokens()), 1);
  for (const Slot& slot : layout.slots)
    for (std::size_t column = 0; column < columns; ++column) {
      double sum = 0;
      for (std::int64_t r = 0; r < slot.rows; ++r) {
        const std::size_t at = size(slot.begin + r) * columns + column;
        sum += std::max(g[at], floor);
        G[at] = sum;
      }
    }
  return G;
}

const StageReferences& row_references() {
  static const StageReferences references{{"chunk_index", chunk_index},
                                          {"short_conv", short_conv},
                                          {"short_conv_step", short_conv},
                                          {"short_conv_bwd", short_conv_bwd},
                                          {"layer_sum", layer_sum},
                                          {"l2norm", l2norm},
                                          {"l2norm_rstd", l2norm_rstd},
                                          {"l2norm_bwd", l2norm_bwd},
                                          {"head_sum", head_sum},
                                          {"gate", gate},
                                          {"kda_gate", gate},
                                          {"gate_bwd", gate_bwd},
                                          {"kda_gate_bwd", gate_bwd},
                                          {"gate_param_sum", gate_param_sum},
                                          {"chunk_local_cumsum", cumsum},
                                          {"chunk_local_reverse_cumsum", reverse_cumsum}};
  return references;
}

}  // namespace wyvern::testing
