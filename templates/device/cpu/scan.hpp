// The state scan of chunks, for the templates that scan whole sequences, segments for their map of
// states, and segments from a known state. A block has BV columns of the state of one value head,
// which stays in scratch from the first chunk to the last.
#pragma once

#include "device/checkpoints.hpp"
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/cpu/scan_layout.hpp"
#include "device/scan_inputs.hpp"

namespace wyvern::cpu {

template <class S>
struct ForwardScan {
  static constexpr int BT = S::BT, BV = S::BV, K = S::K, V = S::V;
  using DTYPE = Element<S::DTYPE>;
  using U_DTYPE = Element<S::U_DTYPE>;
  using Inputs = ForwardScanInputs<S>;

  /// Scratch of a scan.
  struct Work {
    Tile<BV> state;
    Tile<K> keys;
    Tile<BV> values;
    float *decay, *end_decay;
  };
  template <ForwardScanLayout<S> Place>
  static Work work_at(void* memory) {
    return {.state = tile_at<Place.state>(memory),
            .keys = tile_at<Place.keys>(memory),
            .values = tile_at<Place.values>(memory),
            .decay = vector_at<Place.decay>(memory),
            .end_decay = vector_at<Place.end_decay>(memory)};
  }

  /// Scans `length` tokens that start at a chunk and updates the state. Where `Stored`, writes the
  /// state that enters each chunk to `h` and V' to `v_new`, both at their first element.
  /// write(checkpoint) stores the state at `checkpoint`; `passed` tokens of the sequence are before
  /// the scan. A chunk's V' does not depend on where a checkpoint divides it.
  template <bool Values, bool Stored, class Checkpoint = NoCheckpoints, class Write = NoCheckpoints>
  static void run(const Work& work, const Inputs& in, int64 length, int columns, DTYPE* h,
                  DTYPE* v_new, uint32 passed = 0, Checkpoint checkpoint = {},
                  const Write& write = {}) {
    const Extents& e = in.e;
    for (int64 done = 0; done < length; done += BT) {
      const int rows = static_cast<int>(length - done < BT ? length - done : BT);
      const int64 at = done * e.HV;
      int inside = 0;
      if constexpr (Checkpoint::kInside)
        inside = checkpoint.inside(passed + static_cast<uint32>(done), rows);
      if constexpr (Stored)
        store_tile(work.state, K, columns, h + done / BT * (int64{e.HV} * K * V), V);
      load_decays(e, in.G + at, in.Gk + at * K, in.k_rstd + done * e.H, rows, work.decay,
                  work.end_decay);
      if (inside != 0)
        load_decays(e, in.G + at, in.Gk + at * K, in.k_rstd + done * e.H, inside, work.decay,
                    work.end_decay);
      load_tile(in.w + at * K, int64{e.HV} * K, rows, K, work.keys);
      multiply(rows, columns, K, work.keys, work.state, work.values);
      new_values<Values, Stored>(in, in.u + at * V, v_new + at * V, rows, columns, work.decay,
                                 work.values);
      load_tile(in.k.at(done, 0), rows, K, work.keys);
      if constexpr (Checkpoint::kInside) {
        if (inside != 0) {
          if constexpr (S::VECTOR_GATE)
            decay_keys(e, in.own_k.at(done, 0), in.Gk + at * K, inside, work.keys);
          multiply_add<Layout::columns>(K, columns, inside, work.keys, work.values, work.state,
                                        work.end_decay);
          write(checkpoint);
          checkpoint.pass();
          load_end_decay(e, in.G + at, in.Gk + at * K, inside - 1, rows - 1, work.end_decay);
        }
      }
      multiply_add<Layout::columns>(K, columns, rows - inside, work.keys.from(inside),
                                    work.values.from(inside), work.state, work.end_decay);
      if constexpr (Checkpoint::kAny) {
        if (checkpoint.next != passed + done + rows) continue;
        write(checkpoint);
        checkpoint.pass();
      }
    }
  }

  /// The first checkpoint of sequence n after its first `passed` tokens.
  template <class Index>
  static Checkpoints<S> find_checkpoints(uint32 passed, int64 n, const Extents& e,
                                         const int32* seq_offsets,
                                         const Index* checkpoint_offsets) {
    const int sequence = static_cast<int>(n);
    return checkpoints_behind<S>(passed, sequence,
                                 count_checkpoints<S>(sequence, e, seq_offsets, 0, 1), e,
                                 checkpoint_offsets);
  }

  /// Writes zeros to the block's columns of unused chunk slots; each sequence clears a part of
  /// them.
  static void clear_unused_slots(DTYPE* h, int64 n, int64 hv, int columns,
                                 const int32* chunk_offsets, const Extents& e) {
    for (int64 slot = chunk_offsets[e.N] + n; slot < e.NT; slot += e.N) {
      DTYPE* to = h + (slot * e.HV + hv) * K * V;
      for (int r = 0; r < K; ++r)
        for (int c = 0; c < columns; ++c) to[r * int64{V} + c] = DTYPE{};
    }
  }

 private:
  /// Replaces a chunk's first `rows` rows of kg by k decayed to the last of them; computed from k,
  /// since kg may have decayed to 0.
  static void decay_keys(const Extents& e, const TokenRows<const DTYPE>& k, const float* Gk,
                         int rows, Tile<K> keys) {
    load_tile(k, rows, K, keys);
    const float* const last = Gk + (rows - 1) * (int64{e.HV} * K);
    for (int r = 0; r < rows; ++r) {
      float* const key = keys.row(r);
      const float* const gates = Gk + r * (int64{e.HV} * K);
      f32 squares{};
      if constexpr (S::QK_L2NORM)
        for (int c = 0; c < K; c += kLanes) squares += load(key + c) * load(key + c);
      const float scale = S::QK_L2NORM ? 1.0F / __builtin_sqrtf(sum(squares) + 1e-6F) : 1.0F;
      for (int c = 0; c < K; c += kLanes) {
        const f32 decayed = K - c < kLanes
                                ? exp(load_part(last + c, K - c) - load_part(gates + c, K - c))
                                : exp(load(last + c) - load(gates + c));
        store(key + c, load(key + c) * decayed * scale);
      }
    }
  }

  /// exp(G_last - G_before), of one gate or of each key channel, to `end_decay`.
  static void load_end_decay(const Extents& e, const float* G, const float* Gk, int before,
                             int last, float* end_decay) {
    for (int c = 0; c < K; c += kLanes) {
      f32 sum{};
      if constexpr (S::SCALAR_GATE) sum = splat(G[int64{last} * e.HV] - G[int64{before} * e.HV]);
      if constexpr (S::VECTOR_GATE) {
        const float *to = Gk + last * (int64{e.HV} * K) + c,
                    *from = Gk + before * (int64{e.HV} * K) + c;
        sum =
            K - c < kLanes ? load_part(to, K - c) - load_part(from, K - c) : load(to) - load(from);
      }
      store(end_decay + c, exp(sum));
    }
  }

  /// V' = U - W S for one chunk, or -W S without `Values`, to v_new where `Stored`; the operand of
  /// the state's update, exp(G_end - G_r) V'_r (times the key's scale), replaces W S in `tile`.
  template <bool Values, bool Stored>
  static void new_values(const Inputs& in, const U_DTYPE* u, DTYPE* v_new, int rows, int columns,
                         const float* decay, Tile<BV> tile) {
    const int whole = columns / kLanes * kLanes;
    const auto in_unit = [&](f32 x) { return S::STATE_UNIT ? x * in.u_factor : x; };
    for (int r = 0; r < rows; ++r) {
      const int64 at = r * (int64{in.e.HV} * V);
      float* row = tile.row(r);
      for (int c = 0; c < whole; c += kLanes) {
        const f32 value = (Values ? in_unit(load(u + at + c)) : f32{}) - load(row + c);
        if constexpr (Stored) store(v_new + at + c, value);
        store(row + c, value * decay[r]);
      }
      if (whole < columns) {
        const f32 value = (Values ? in_unit(load_part(u + at + whole, columns - whole)) : f32{}) -
                          load(row + whole);
        if constexpr (Stored) store_part(v_new + at + whole, value, columns - whole);
        store(row + whole, value * decay[r]);
      }
    }
  }

  /// exp(G_end), of one gate or of each key channel, to `end_decay`, and each row's factor in the
  /// state's update, exp(G_end - G_r) times its key's scale, to `decay`: 1 with kg, whose rows
  /// include both.
  static void load_decays(const Extents& e, const float* G, const float* Gk, const float* k_rstd,
                          int rows, float* decay, float* end_decay) {
    if constexpr (S::VECTOR_GATE) {
      fill_column(decay, 1.0F, rows);
      load_column(Gk + (rows - 1) * (int64{e.HV} * K), 1, K, end_decay);
      for (int r = 0; r < K; r += kLanes) store(end_decay + r, exp(load(end_decay + r)));
    } else {
      load_gates<S::SCALAR_GATE>(G, e.HV, rows, decay);
      const float end = decay[rows - 1];
      for (int r = 0; r < rows; r += kLanes) store(decay + r, exp(end - load(decay + r)));
      const f32 fade = exp(splat(end));
      for (int r = 0; r < K; r += kLanes) store(end_decay + r, fade);
      if constexpr (S::QK_L2NORM)
        for (int r = 0; r < rows; ++r) decay[r] *= k_rstd[int64{r} * e.H];
    }
  }
};

}  // namespace wyvern::cpu
