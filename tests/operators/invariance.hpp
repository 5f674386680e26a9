// What batch_invariant promises, as tests of a device ask for it: a sequence has the same bits
// alone, anywhere in any batch, and in pieces of multiples of 64 tokens.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "runtime/operators/operator.hpp"
#include "tests/operators/fixture.hpp"

namespace wyvern::testing {

/// Of a problem: few; many; few, of heads as Hopper's kernels take them.
enum class Options : std::uint8_t { few, many, wide };

using Sequences = std::vector<OperatorData>;
using Order = std::vector<std::size_t>;

/// The axis along which sequences lie one after the other in a pack; nothing for what they share.
inline std::optional<std::size_t> pack_axis(const Problem& p, std::string_view name) {
  for (const char* tokens : {"q", "k", "v", "beta", "erase", "write", "g", "norm_gate", "o"})
    if (name == tokens) return 1;
  for (const char* sequences :
       {"state_index", "final_state", "initial_conv_state", "final_conv_state"})
    if (name == sequences) return 0;
  if (!p.state_index && (name == "initial_state" || name == "state")) return 0;
  return {};
}

/// Tensors one after the other along an axis before which all sizes are 1.
inline HostTensor joined(const std::vector<const HostTensor*>& parts, std::size_t axis) {
  Shape shape = parts.front()->shape();
  shape[axis] = 0;
  for (const HostTensor* part : parts) shape[axis] += part->shape()[axis];
  HostTensor whole(parts.front()->dtype(), shape);
  unsigned char* to = whole.data();
  for (const HostTensor* part : parts) {
    std::memcpy(to, part->data(), part->bytes());
    to += part->bytes();
  }
  return whole;
}

/// The tensors of several launches of one sequence each, as a launch of all has them.
inline HostTensors joined(const Problem& p, const std::vector<const HostTensors*>& parts,
                          std::optional<std::size_t> axis = {}) {
  HostTensors whole = *parts.front();
  for (auto& [name, tensor] : whole) {
    const std::optional<std::size_t> own = pack_axis(p, name);
    if (!own) continue;
    std::vector<const HostTensor*> all;
    for (const HostTensors* part : parts) all.push_back(&part->at(name));
    tensor = joined(all, axis.value_or(*own));
  }
  return whole;
}

inline std::vector<const HostTensors*> chosen(const std::vector<HostTensors>& all,
                                              const Order& order) {
  std::vector<const HostTensors*> some;
  for (const std::size_t i : order) some.push_back(&all[i]);
  return some;
}

/// A packed batch of these sequences, in this order.
inline OperatorData pack(const Sequences& sequences, const Order& order) {
  OperatorData data;
  Lengths lengths;
  std::vector<const HostTensors*> parts;
  for (const std::size_t i : order) {
    lengths.push_back(sequences[i].problem.T);
    parts.push_back(&sequences[i].tensors);
  }
  data.problem = packed(sequences[order.front()].problem, lengths);
  data.tensors = joined(data.problem, parts);
  data.cu_seqlens.assign(1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), std::back_inserter(data.cu_seqlens));
  data.tensors["cu_seqlens"] = HostTensor(data.problem.seqlens_dtype, {data.problem.N + 1},
                                          {data.cu_seqlens.begin(), data.cu_seqlens.end()});
  return data;
}

/// The same without packing, of sequences of one length.
inline OperatorData batch(const Sequences& sequences) {
  OperatorData data = sequences.front();
  data.problem.B = data.problem.N = std::ssize(sequences);
  std::vector<const HostTensors*> parts;
  for (const OperatorData& one : sequences) parts.push_back(&one.tensors);
  data.tensors = joined(data.problem, parts, 0);
  return data;
}

inline Order in_turn(std::size_t count) {
  Order order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

/// On a device that Base, an OperatorTest, has.
template <class Base>
class BatchInvariance : public Base {
 protected:
  /// A problem of one sequence.
  static Problem problem(const OperatorPass& which, Options options) {
    Problem p = base(which);
    p.batch_invariant = true;
    p.B = p.N = 1, p.H = 1, p.HV = 2, p.K = 40, p.V = 24;
    if (options == Options::wide) p.H = 2, p.K = p.V = 128;
    p.initial_state = true;
    p.short_conv = 4;
    p.initial_conv_state = p.output_conv_state = options != Options::many;
    if (options != Options::many) return p;
    p.inplace_conv_state = p.conv_tokens_first = true;
    p.dtype = p.beta_dtype = which.op == "kda" ? DType::fp32 : DType::fp16;
    p.use_qk_l2norm = p.state_v_first = true;
    p.use_beta_sigmoid = definition_of(p).facts().beta;
    p.output_norm = Activation::silu;
    p.use_gate_in_kernel = p.has_dt_bias = gate_kind(p) != GateKind::none;
    p.state_dtype = DType::bf16;
    p.inplace_state = p.state_index = true;
    p.initial_state = p.output_final_state = false;
    p.state_slots = 9;
    return p;
  }

  /// One of each length, with the same gate parameters and pool; of a pool the last is skipped.
  static Sequences sequences(Problem p, const Lengths& lengths) {
    Sequences all;
    for (const std::int64_t length : lengths) {
      p.T = length;
      all.push_back(make_data(p, Gate::typical, 50 + all.size()));
      OperatorData& one = all.back();
      for (auto& [name, tensor] : one.tensors)
        if (!pack_axis(p, name)) tensor = all.front().tensors.at(name);
      if (!p.state_index) continue;
      const bool skipped = all.size() == lengths.size();
      one.tensors.at("state_index").set(0, skipped ? -1 : static_cast<double>(9 - all.size()));
    }
    return all;
  }

  HostTensors run(const OperatorData& data) {
    return run_operator(this->device(), this->prepare(data.problem), data);
  }
  std::vector<HostTensors> run_each(const Sequences& sequences) {
    std::vector<HostTensors> all;
    for (const OperatorData& one : sequences) all.push_back(run(one));
    return all;
  }

  static void expect_same(const HostTensors& got, const HostTensors& wanted) {
    ASSERT_EQ(got.size(), wanted.size());
    for (const auto& [name, tensor] : wanted) EXPECT_TRUE(same_bytes(got.at(name), tensor)) << name;
  }

  /// Runs the pack and compares it with what its sequences gave alone.
  void expect_as_alone(const Sequences& sequences, const std::vector<HostTensors>& alone,
                       const Order& order) {
    SCOPED_TRACE(fmt::format("a pack of {} that begins with sequence {}", order.size(), order[0]));
    const OperatorData data = pack(sequences, order);
    HostTensors wanted = joined(data.problem, chosen(alone, order));
    // A sequence alone writes its own slot of the pool.
    if (data.problem.state_index)
      for (const std::size_t i : order)
        for (const char* pool : {"state", "conv_state"})
          copy_slot(sequences[i], alone[i], pool, wanted.at(pool));
    expect_same(run(data), wanted);
  }

  /// `lengths` has seven, of which the fifth is the longest and none but it is so long. Packs of
  /// all begin with each of `firsts`; `many` is one of 65 more.
  void expect_the_same_anywhere(const Problem& p, const Lengths& lengths, const Order& firsts,
                                bool many) {
    const Sequences all = sequences(p, lengths);
    const std::vector<HostTensors> alone = run_each(all);
    Order order = in_turn(all.size());
    for (const std::size_t first : firsts) {
      std::ranges::rotate(order, std::ranges::find(order, first));
      expect_as_alone(all, alone, order);
    }
    expect_as_alone(all, alone, {4});
    expect_as_alone(all, alone, {1, 4});
    if (p.state_index) return;  // of which no two may name one slot
    order.clear();
    for (std::size_t i = 0; many && i < 65; ++i) order.push_back(i % 8 == 4 ? 4 : i % 4);
    if (many) expect_as_alone(all, alone, order);
    const Sequences equal = sequences(p, Lengths(3, lengths[4]));
    expect_same(run(batch(equal)), joined(p, chosen(run_each(equal), in_turn(3)), 0));
  }

  /// Each piece goes on from the state that the one before left, the first from none.
  void expect_the_same_in_pieces(Problem p) {
    p.state_dtype = DType::fp32;  // in 16 bits it would be rounded between pieces
    p.state_index = p.inplace_state = p.initial_state = false;
    p.output_final_state = true;
    p.inplace_conv_state = p.conv_tokens_first = p.initial_conv_state = false;
    p.output_conv_state = true;
    // Decoding walks token by token: it may go on anywhere.
    const bool recurrent = p.pass == Pass::recurrent;
    const std::int64_t unit = recurrent ? 1 : 64;
    const std::int64_t rest = recurrent ? 2 : 37;
    const OperatorData whole = sequences(p, {3 * unit + rest}).front();
    const HostTensors wanted = run(whole);
    for (const Lengths& pieces :
         {Lengths{unit, 2 * unit + rest}, Lengths{2 * unit, unit, rest}, Lengths{3 * unit, rest}}) {
      std::vector<HostTensors> outputs;
      std::int64_t first = 0;
      for (const std::int64_t length : pieces) {
        OperatorData piece = tokens_of(whole, first, length);
        if (first != 0) {
          piece.problem.initial_state = true;
          piece.tensors["initial_state"] = outputs.back().at("final_state");
          piece.problem.initial_conv_state = p.output_conv_state;
          if (p.output_conv_state)
            piece.tensors["initial_conv_state"] = outputs.back().at("final_conv_state");
        }
        outputs.push_back(run(piece));
        first += length;
      }
      HostTensors got = joined(p, chosen(outputs, in_turn(outputs.size())));
      for (auto& [name, tensor] : got)
        if (name.starts_with("final_")) tensor = outputs.back().at(name);
      expect_same(got, wanted);
    }
  }

 private:
  static void copy_slot(const OperatorData& one, const HostTensors& outputs, const char* name,
                        HostTensor& pool) {
    const auto slot = static_cast<std::int64_t>(one.tensors.at("state_index").at(0));
    if (slot < 0) return;
    const std::size_t bytes = pool.bytes() / static_cast<std::size_t>(one.problem.state_slots);
    const std::size_t at = static_cast<std::size_t>(slot) * bytes;
    std::memcpy(pool.data() + at, outputs.at(name).data() + at, bytes);
  }
};

}  // namespace wyvern::testing
