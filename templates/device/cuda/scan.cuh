// The state scan over chunks, for the templates that scan whole sequences, segments for their
// effect on a state, and segments from a known state. Chunks of w, k, u and the gate stream through
// num_stages buffers, one barrier a chunk.
#pragma once

#include "device/cuda/checkpoints.cuh"
#include "device/cuda/scan_block.cuh"
#include "device/cuda/warp.cuh"
#include "device/scan_inputs.hpp"
#include "device/state_slots.hpp"

namespace wyvern::cuda {

/// The scan of a block's columns of the state. S is the kernel's Spec. Exact is for scans whose
/// chunks erase most of the state and add nothing: rounding errors of bf16 then outlast the rest,
/// so the state and V' enter their products in two parts.
template <class S, bool Exact = false>
struct ForwardScan : ScanBlock<S> {
  using Block = ScanBlock<S>;
  using Block::columns_from;
  using Block::kPaddedK;
  using Block::kParts;
  using Block::kRows;
  using Block::kScaledKeys;
  using Block::kStrips;
  using Block::kThreads;
  using typename Block::State;
  using typename Block::T;
  using typename Block::Values;
  using U = Element<S::U_DTYPE>;
  using Inputs = ForwardScanInputs<S>;
  static constexpr int K = S::K, V = S::V;
  static constexpr int BT = S::BT, BV = S::BV;
  static constexpr ForwardScanLayout<S> kLayout{S{}};

  /// Numbers of T whose sum the state is in its product with w. fp16 has bits enough for one.
  static constexpr int kExactParts = Exact && S::DTYPE == DType::bf16 ? 2 : 1;
  /// 16-bit numbers whose sum V' is where it enters the state. With beta up to 2 the state need not
  /// decay, and neither does what rounding V' does to it. With few keys, where U is fp32, most of
  /// what a chunk's rows add cancels, and what rounding does to them does not.
  static constexpr int kUpdateParts = kHalf<T> && (S::NEG_EIGVAL || !kHalf<U>) ? 2 : kExactParts;

  /// One of the buffers that chunks pass through; a gate or scale that there is none of has no
  /// place.
  struct Buffer {
    unsigned char* const start;
    TileAt<kLayout.w> w = tile_at<kLayout.w>(start);
    TileAt<kLayout.k> k = tile_at<kLayout.k>(start);
    TileAt<kLayout.u> u = tile_at<kLayout.u>(start);
    float* G = array_at<kLayout.G>(start);
    float* Gk_end = array_at<kLayout.Gk_end>(start);
    float* k_rstd = array_at<kLayout.k_rstd>(start);

    /// Of the buffers that start at `shared`, the chunk's.
    WYVERN_DEVICE Buffer(unsigned char* shared, int chunk)
        : start(shared + chunk % S::num_stages * kLayout.buffer_bytes) {}
  };

  /// Of enter_unit().
  WYVERN_DEVICE static float* unit_scratch(unsigned char* shared) {
    return array_at<kLayout.largest>(shared);
  }

  /// V'^T = U^T - S^T W^T.
  WYVERN_DEVICE static void subtract_prediction(Values& values, const State& state,
                                                const Buffer& buffer, float* sums, float u_factor) {
    Block::template start_rows<kExactParts>(values, state, buffer.w, sums);
    Block::sync_pair();
    Block::finish_rows(values, sums);
    const int first_row = Block::warp_row(), first_col = Block::warp_column();
#pragma unroll
    for (int i = 0; i < kStrips; ++i)
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const Accumulator u = load_transposed(buffer.u, first_row + n * 8, first_col + i * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          values[i][n].x[j] = (S::STATE_UNIT ? u.x[j] * u_factor : u.x[j]) - values[i][n].x[j];
      }
  }

  /// Rows of a chunk, by multiples of 16: all of them where it has no checkpoint inside, as where
  /// warps share columns.
  struct Rows {
    int begin = 0, end = BT;
    WYVERN_DEVICE bool has(int row) const { return begin <= row && row < end; }
  };

  /// V'^T <- V'^T diag(exp(G_C - G)), with the scales of keys. kg's rows have both factors already.
  WYVERN_DEVICE static void decay_to_end(Values& values, const Buffer& buffer, int last, Rows of) {
    if constexpr (S::SCALAR_GATE || kScaledKeys) {
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (!of.has(n * 8)) continue;
          const int r = Block::warp_row() + n * 8 + accumulator_col(j);
          float factor = 1.0f;
          if constexpr (S::SCALAR_GATE) factor = decay(buffer.G[last] - buffer.G[r]);
          if constexpr (kScaledKeys) factor *= buffer.k_rstd[r];
#pragma unroll
          for (int i = 0; i < kStrips; ++i) {
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
              float& x = values[i][n].x[j + half];
              x = kScaledKeys ? within_range<T>(x * factor) : x * factor;
            }
          }
        }
    }
  }

  /// S^T <- exp(G_C) S^T + V'^T diag(exp(G_C - G)) K; `last` is the chunk's last row. Scales
  /// `values` in place.
  WYVERN_DEVICE static void update_state(State& state, Values& values, const Buffer& buffer,
                                         int last) {
    if constexpr (S::SCALAR_GATE) decay_state<false>(state, buffer.G + last);
    if constexpr (S::VECTOR_GATE) decay_state<true>(state, buffer.Gk_end + Block::warp_key());
    if constexpr (kParts == 1)
      add_values(state, values, buffer, last, {});
    else
      add_shared_values(state, values, buffer, last);
  }

  /// S^T += V'^T diag(exp(G_last - G)) K, over some rows of a chunk. Scales `values` in place.
  WYVERN_DEVICE static void add_values(State& state, Values& values, const Buffer& buffer, int last,
                                       Rows of) {
    decay_to_end(values, buffer, last, of);
#pragma unroll
    for (int step = 0; step < BT / kDepth<T>; ++step) {
      if (!of.has(step * kDepth<T>)) continue;
      FragmentA<T> a[kStrips];
#pragma unroll
      for (int part = 0; part < kUpdateParts; ++part) {
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          a[i] = fragment_a<T>(values[i], step);
          if (part + 1 < kUpdateParts)
#pragma unroll
            for (int n = 2 * step; n < 2 * step + 2; ++n)
              values[i][n] = rounded_off<T>(values[i][n]);
        }
        add_rows<S::precision>(state, a, buffer.k, step);
      }
    }
  }

  /// The same over all rows, of warps that share columns: V' takes U's place on its way.
  WYVERN_DEVICE static void add_shared_values(State& state, Values& values, const Buffer& buffer,
                                              int last) {
    if constexpr (kParts > 1) {
      static_assert(kUpdateParts == 1);
      decay_to_end(values, buffer, last, {});
      const int first_row = Block::warp_row(), first_col = Block::warp_column();
#pragma unroll
      for (int i = 0; i < kStrips; ++i)
#pragma unroll
        for (int step = 0; step < kRows / 16; ++step)
          Block::hand_fragment(buffer.u, first_row + step * 16, first_col + i * 16,
                               fragment_a<T>(values[i], step));
      Block::sync_pair();
#pragma unroll
      for (int step = 0; step < BT / 16; ++step) {
        FragmentA<T> a[kStrips];
#pragma unroll
        for (int i = 0; i < kStrips; ++i)
          a[i] = Block::handed_fragment(buffer.u, step * 16, first_col + i * 16);
        add_rows<S::precision>(state, a, Block::template warp_keys<BT>(buffer.k), step);
      }
    }
  }

  /// S^T <- exp(G_last - G_before) S^T, with the gates of a chunk that starts at `token`; `before`
  /// may be -1, in front of it.
  WYVERN_DEVICE static void decay_between(State& state, const Buffer& buffer, const Inputs& in,
                                          int64 token, int head, int before, int last) {
    float factor = 1.0f;
    if constexpr (S::SCALAR_GATE)
      factor = decay(buffer.G[last] - (before < 0 ? 0.0f : buffer.G[before]));
    if constexpr (S::SCALAR_GATE || S::VECTOR_GATE) {
      const float* const Gk = in.Gk + (token * in.e.HV + head) * K;
      const auto gate = [&](int row, int k) {
        return row < 0 || k >= K ? 0.0f : Gk[int64{row} * in.e.HV * K + k];
      };
#pragma unroll
      for (int i = 0; i < kStrips; ++i)
        state[i].scale_channels([&](int k) -> Float2 {
          if constexpr (!S::VECTOR_GATE) return {{factor, factor}};
          return {{decay(gate(last, k) - gate(before, k)),
                   decay(gate(last, k + 1) - gate(before, k + 1))}};
        });
    }
  }

  /// Keys of the first `rows` rows of a chunk that starts at `token`, a warp a row, decayed to the
  /// last of them in the place of kg's: what kg holds may be too little to go back from.
  WYVERN_DEVICE static void decay_keys(const Buffer& buffer, const Inputs& in, int64 token,
                                       int head, int rows) {
    for (int r = warp_index(); r < rows; r += S::num_warps) {
      const T* const key = in.own_k.row(token + r) + in.e.key_head(head) * K;
      const float* const Gk = in.Gk + ((token + r) * in.e.HV + head) * K;
      float scale = 1.0f;
      if constexpr (S::QK_L2NORM) {
        float square = 0.0f;
        for (int k = lane_index(); k < K; k += 32) square += to_float(key[k]) * to_float(key[k]);
        scale = reciprocal_sqrt(sum_warp(square) + 1e-6f);
      }
      for (int k = lane_index(); k < K; k += 32)
        *buffer.k.at(r, k) = from_float<T>(
            to_float(key[k]) * scale * decay(Gk[int64{rows - 1 - r} * in.e.HV * K + k] - Gk[k]));
    }
  }

  /// update_state by way of checkpoints: write(element, state) keeps the states at those of the
  /// chunk that starts at `token`, `passed` tokens of its sequence behind. A chunk's V' does not
  /// depend on where it is divided.
  template <class Write>
  WYVERN_DEVICE static void update_state(State& state, Values& values, const Buffer& buffer,
                                         const Inputs& in, int64 token, int head, uint32 passed,
                                         int rows, Checkpoints<S>& checkpoints, Write&& write) {
    const int inside = checkpoints.inside(passed, rows);
    if (inside != 0) {
      if constexpr (S::VECTOR_GATE) {
        decay_keys(buffer, in, token, head, inside);
        sync_block();
      }
      decay_between(state, buffer, in, token, head, -1, inside - 1);
      add_values(state, values, buffer, inside - 1, {0, inside});
      write(checkpoints.element(head, in.e), state);
      checkpoints.pass();
      decay_between(state, buffer, in, token, head, inside - 1, rows - 1);
      add_values(state, values, buffer, rows - 1, {inside, BT});
      return;
    }
    update_state(state, values, buffer, rows - 1);
    if (checkpoints.next != passed + rows) return;
    write(checkpoints.element(head, in.e), state);
    checkpoints.pass();
  }

  /// The state that enters a sequence, `from` times `scale`, null for zeros, in the scan's unit,
  /// which it returns; `units` as for enter_unit().
  template <class Element>
  WYVERN_DEVICE static float enter_sequence(unsigned char* shared, State& state, int tile_v,
                                            const Element* from, float scale,
                                            const ScanRange& range, const Extents& e,
                                            float* units) {
    if (from != nullptr)
      Block::for_each_element(state, tile_v, S::V, [from, scale](int row, int v, float& x) {
        x = to_float(from[state_offset<S::STATE_V_FIRST, K, V>(row, v)]) * scale;
      });
    return Block::enter_unit(unit_scratch(shared), state, from, scale, range, e, units,
                             kValueUnit<S>);
  }
  /// The state that leaves a sequence, out of `unit`: in place, and to the final states.
  template <class Element>
  WYVERN_DEVICE static void leave_sequence(State& state, int tile_v, const StateSlots& slots,
                                           float unit, Element* in_place, const float* state_scale,
                                           float* final_state) {
    if constexpr (S::INPLACE_STATE) {
      const float factor = unit / scale_at<S>(state_scale, slots.to_scale);
      Block::for_each_element(state, tile_v, S::V, [&](int row, int v, float& x) {
        in_place[slots.to + state_offset<S::STATE_V_FIRST, K, V>(row, v)] =
            from_float<Element>(x * factor);
      });
    }
    if constexpr (S::FINAL_STATE)
      Block::for_each_element(state, tile_v, S::V, [&](int row, int v, float& x) {
        final_state[slots.to + state_offset<S::STATE_V_FIRST, K, V>(row, v)] = x * unit;
      });
  }

  /// The `update` of a scan that starts `passed` tokens into its sequence and writes checkpoints
  /// from `kept` on: the warp's columns, which start at `first_v`, of a state in `unit`.
  template <class Element>
  WYVERN_DEVICE static auto by_checkpoints(State& state, const Inputs& in, const ScanRange& range,
                                           uint32 passed, Checkpoints<S>& kept, int first_v,
                                           Element* to, const float& unit) {
    return [&, passed, first_v, to](int chunk, int rows, Values& values, const Buffer& buffer) {
      update_state(state, values, buffer, in, range.token + int64{chunk} * BT, range.head,
                   passed + chunk * BT, rows, kept, [&](int64 element, State& at) {
                     visit_state<S::STATE_V_FIRST, K, V>(
                         at, first_v, [to = to + element, &unit](int64 offset, float& x) {
                           to[offset] = from_float<Element>(x * unit);
                         });
                   });
    };
  }

  /// Updates `state` by the chunks of the range. `begin` sets it, once the first loads have
  /// started; `before(chunk, state)` sees the state that enters each chunk, `found(chunk, rows,
  /// values)` the chunk's V'^T. `update(chunk, rows, values, buffer)`, where it is given, updates
  /// `state` to the chunk's end in place of update_state.
  template <class Begin, class Before, class Found, class... Update>
  WYVERN_DEVICE static void scan_chunks(unsigned char* shared, State& state, const Inputs& in,
                                        const ScanRange& range, const StateColumns& columns,
                                        Begin&& begin, Before&& before, Found&& found,
                                        Update&&... update) {
    scan_chunks_beside(
        shared, state, in, range, columns, [](int, int64, int) {}, begin, before, found, update...);
  }

  /// The same, where `beside(chunk, token, rows)` starts further loads for the chunk at this token,
  /// which are there with the chunk's own.
  template <class Beside, class Begin, class Before, class Found, class... Update>
  WYVERN_DEVICE static void scan_chunks_beside(unsigned char* shared, State& state,
                                               const Inputs& in, const ScanRange& range,
                                               const StateColumns& columns, Beside&& beside,
                                               Begin&& begin, Before&& before, Found&& found,
                                               Update&&... update) {
    const int chunks = ceil_div(range.tokens, BT);
    const auto load = [&](int chunk) {
      if (chunk < chunks) {
        const Buffer buffer(shared, chunk);
        const int64 first = range.token + int64{chunk} * BT;
        const int64 row = first * in.e.HV + range.head;
        const int rows = smaller(range.tokens - chunk * BT, BT);
        load_tile<kThreads, K>(buffer.w, in.w + row * K, int64{in.e.HV} * K, rows, K);
        load_tile<kThreads, V>(buffer.u, in.u + row * V + columns.first, int64{in.e.HV} * V,
                               columns.values ? rows : 0, columns_from(columns.first));
        if constexpr (S::SCALAR_GATE)
          load_column<kThreads, BT>(buffer.G, in.G + row, in.e.HV, rows);
        if constexpr (S::VECTOR_GATE)
          load_column<kThreads, kPaddedK>(buffer.Gk_end,
                                          in.Gk + (row + int64{rows - 1} * in.e.HV) * K, 1, K);
        const int key = Block::key_head(range.head, in.e);
        if constexpr (kScaledKeys)
          load_column<kThreads, BT>(buffer.k_rstd, in.k_rstd + first * in.e.H + key, in.e.H, rows);
        load_tile<kThreads, K>(buffer.k, in.k.at(first, key * K), rows, K);
        beside(chunk, first, rows);
      }
      copy_async_commit();
    };
    for (int i = 0; i < S::num_stages - 1; ++i) load(i);
    begin();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if constexpr (S::num_stages == 1) {
        if (chunk > 0) sync_block();
        load(chunk);
      }
      copy_async_wait<larger(S::num_stages - 2, 0)>();
      sync_block();
      if constexpr (S::num_stages > 1) load(chunk + S::num_stages - 1);
      const Buffer buffer(shared, chunk);
      const int rows = smaller(range.tokens - chunk * BT, BT);
      Values values;
      before(chunk, state);
      subtract_prediction(values, state, buffer, array_at<kLayout.sums>(shared), in.u_factor);
      found(chunk, rows, values);
      if constexpr (sizeof...(Update) == 0)
        update_state(state, values, buffer, rows - 1);
      else
        (update(chunk, rows, values, buffer), ...);
    }
  }

  /// Zeros in BV value columns of one head of the chunk slots that no sequence has: the blocks of
  /// all sequences clear them in turns.
  WYVERN_DEVICE static void clear_unused_slots(T* h, int sequence, int head, int tile_v,
                                               const int32* chunk_offsets, const Extents& e) {
    for (int64 slot = chunk_offsets[e.N] + sequence; slot < e.NT; slot += e.N) {
      T* const h_chunk = h + (slot * e.HV + head) * K * V + tile_v;
      for (int i = thread_index(); i < K * BV; i += kThreads)
        if (tile_v + i % BV < V) h_chunk[int64{i / BV} * V + i % BV] = from_float<T>(0.0f);
    }
  }
};

}  // namespace wyvern::cuda
