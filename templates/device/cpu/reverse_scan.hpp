// The reverse state scan of chunks, from the last to the first, for the templates that scan whole
// sequences, segments for their map of gradients, and segments from a known gradient. A block has
// BV columns of the gradient of the state of one value head, which stays in scratch from the last
// chunk to the first.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"
#include "device/cpu/scan_layout.hpp"
#include "device/scan_inputs.hpp"

namespace wyvern::cpu {

template <class S>
struct ReverseScan {
  static constexpr int BT = S::BT, BV = S::BV, K = S::K, V = S::V;
  static constexpr bool kScaledKeys = S::QK_L2NORM && !S::VECTOR_GATE;
  using DTYPE = Element<S::DTYPE>;
  using Inputs = ReverseScanInputs<S>;

  /// Factors of one chunk.
  struct Decays {
    float* from_start;  ///< scale exp(G_r), with the query's scale, for each row
    float* to_end;      ///< exp(G_end - G_r), with the key's scale; qg and kg have all but `scale`
    float* end;  ///< exp(G_end), of the head or of each key channel, for each row of the state
  };

  /// Scratch of a scan.
  struct Work {
    Tile<BV> state;
    Tile<K> keys;
    Tile<BV> values;
    Decays decay;
  };
  template <ReverseScanLayout<S> Place>
  static Work work_at(void* memory) {
    return {.state = tile_at<Place.state>(memory),
            .keys = tile_at<Place.keys>(memory),
            .values = tile_at<Place.values>(memory),
            .decay = {.from_start = vector_at<Place.from_start>(memory),
                      .to_end = vector_at<Place.to_end>(memory),
                      .end = vector_at<Place.end>(memory)}};
  }

  /// Scans `length` tokens that start at a chunk, last chunk to first, and updates the state's
  /// gradient; dO and dv_local are 0 without `Values`. Where `Stored`, writes the gradient of the
  /// state that leaves each chunk to `dh` and dU to `du`, both at the first chunk's first element.
  template <bool Values, bool Stored>
  static void run(const Work& work, const Inputs& in, int64 length, int columns, DTYPE* dh,
                  DTYPE* du) {
    const Extents& e = in.e;
    for (int64 chunk = (length + BT - 1) / BT - 1; chunk >= 0; --chunk) {
      const int64 done = chunk * BT;
      const int rows = static_cast<int>(length - done < BT ? length - done : BT);
      const int64 at = done * e.HV, key_at = done * e.H;
      if constexpr (Stored)
        store_tile(work.state, K, columns, dh + chunk * (int64{e.HV} * K * V), V);
      load_decays(e, in.G + at, in.Gk + at * K, in.q_rstd + key_at, in.k_rstd + key_at, rows,
                  in.scale, work.decay);

      load_tile(in.k.at(done, 0), rows, K, work.keys);
      multiply(rows, columns, K, work.keys, work.state, work.values);
      value_gradient<Values, Stored>(in, in.dv_local + at * V, du + at * V, rows, columns,
                                     work.decay.to_end, work.values);

      // Both parts of the update in one product: W's rows above Q's, -dU's above dO's.
      load_tile(in.w + at * K, int64{e.HV} * K, rows, K, work.keys);
      if constexpr (Values) {
        load_tile(in.q.at(done, 0), rows, K, work.keys.from(rows));
        load_tile<true>(in.dO.at(done, 0), rows, columns, work.values.from(rows),
                        work.decay.from_start);
      }
      multiply_add<Layout::columns>(K, columns, Values ? 2 * rows : rows, work.keys, work.values,
                                    work.state, work.decay.end);
    }
  }

 private:
  static void load_decays(const Extents& e, const float* G, const float* Gk, const float* q_rstd,
                          const float* k_rstd, int rows, float scale, const Decays& decay) {
    load_gates<S::SCALAR_GATE>(G, e.HV, rows, decay.to_end);
    const float end = decay.to_end[rows - 1];
    for (int r = 0; r < rows; r += kLanes) {
      const f32 gate = load(decay.to_end + r);
      store(decay.from_start + r, exp(gate) * scale);
      store(decay.to_end + r, exp(end - gate));
    }
    if constexpr (kScaledKeys)
      for (int r = 0; r < rows; ++r) {
        decay.from_start[r] *= q_rstd[int64{r} * e.H];
        decay.to_end[r] *= k_rstd[int64{r} * e.H];
      }
    if constexpr (S::VECTOR_GATE) load_column(Gk + (rows - 1) * (int64{e.HV} * K), 1, K, decay.end);
    for (int r = 0; r < K; r += kLanes)
      store(decay.end + r, exp(S::VECTOR_GATE ? load(decay.end + r) : splat(end)));
  }

  /// dU = dv_local + diag(decay) K dS for one chunk, or only the second part without `Values`, to
  /// du where `Stored`; -dU replaces K dS in `tile`.
  template <bool Values, bool Stored>
  static void value_gradient(const Inputs& in, const DTYPE* dv_local, DTYPE* du, int rows,
                             int columns, const float* decay, Tile<BV> tile) {
    const int whole = columns / kLanes * kLanes;
    const auto in_unit = [&](f32 x) { return S::STATE_UNIT ? x * in.dv_factor : x; };
    for (int r = 0; r < rows; ++r) {
      const int64 at = r * (int64{in.e.HV} * V);
      float* row = tile.row(r);
      for (int c = 0; c < whole; c += kLanes) {
        const f32 value =
            (Values ? in_unit(load(dv_local + at + c)) : f32{}) + load(row + c) * decay[r];
        if constexpr (Stored) store(du + at + c, value);
        store(row + c, -value);
      }
      if (whole < columns) {
        const f32 value =
            (Values ? in_unit(load_part(dv_local + at + whole, columns - whole)) : f32{}) +
            load(row + whole) * decay[r];
        if constexpr (Stored) store_part(du + at + whole, value, columns - whole);
        store(row + whole, -value);
      }
    }
  }
};

}  // namespace wyvern::cpu
