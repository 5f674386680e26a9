// A token's row of q, k or v as a warp holds it before it prepares it: as it is given, or with the
// rows before it, for the convolution in front of the recurrence. S is the kernel's Spec.
#pragma once

#include "decode/recurrent/items.cuh"
#include "device/cuda/conv_taps.cuh"

namespace wyvern::cuda::decode {

/// A warp's part of a vector, four neighbours a lane and turn; zeros past its end.
template <class T, int Count>
struct WarpVector {
  static constexpr int kTurns = larger(ceil_div(Count, 128), 1);
  Vector<T, 4> part[kTurns] = {};

  /// visit(turn, index of the turn's first element) for the lane's turns.
  template <class Visit>
  WYVERN_DEVICE static void each(Visit&& visit) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const int first = t * 128 + lane_index() * 4;
      if (Count % 128 == 0 || first < Count) visit(t, first);
    }
  }
  WYVERN_DEVICE void load(const T* from) {
    each([&](int t, int first) { part[t] = cuda::load<4>(from + first); });
  }
  WYVERN_DEVICE void store(T* to) const {
    each([&](int t, int first) { store_run<true>(to + first, part[t].at); });
  }
  /// change(x, turn, i) of all elements.
  template <class Change>
  WYVERN_DEVICE void change(Change&& change) {
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[t].at[i] = change(part[t].at[i], t, i);
  }
  WYVERN_DEVICE float dot(const WarpVector& with) const {
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fused_multiply_add(part[t].at[i], with.part[t].at[i], sum);
    return sum_warp(sum);
  }
};

template <class T, int Count>
WYVERN_DEVICE WarpVector<float, Count> in_floats(const WarpVector<T, Count>& x) {
  WarpVector<float, Count> y;
  y.change([&](float, int t, int i) { return to_float(x.part[t].at[i]); });
  return y;
}

/// A head's columns of q, or of one step of k or v.
template <class S>
struct HeadRows {
  TokenRows<const Element<S::DTYPE>> rows;
  int steps;      ///< rows of a token
  int64 channel;  ///< of the convolution: the first column's

  WYVERN_DEVICE const Element<S::DTYPE>* row(int64 token) const { return rows.row(token * steps); }
};

/// The convolution's weights and windows; what stands for them without one.
template <class S, bool = kConvolves<S>>
struct Convolution : NoWindows {};
template <class S>
struct Convolution<S, true> {
  static constexpr bool kAny = true;  ///< windows
  using Row = Element<S::DTYPE>;
  const Element<S::CONV_DTYPE>*weight, *bias;
  ConvStates<Row, Element<S::INDEX_DTYPE>> states;
  int64 channels;

  /// Sequence n's windows.
  WYVERN_DEVICE WindowPlaces places(int64 n, const Extents& e) const {
    const auto found = find_windows<S>(n, channels, e, states);
    return {.first = found.first == nullptr ? kNoWindow : found.first - before(),
            .last = found.last == nullptr ? kNoWindow : found.last - behind()};
  }
  WYVERN_DEVICE const Row* first(const StateItem& item) const {
    return item.windows.first == kNoWindow ? nullptr : before() + item.windows.first;
  }
  WYVERN_DEVICE Row* last(const StateItem& item) const {
    return item.windows.last == kNoWindow ? nullptr : behind() + item.windows.last;
  }

 private:
  WYVERN_DEVICE const Row* before() const {
    return S::CONV_INPLACE ? states.conv_state : states.initial_conv_state;
  }
  WYVERN_DEVICE Row* behind() const {
    return S::CONV_INPLACE ? states.conv_state : states.final_conv_state;
  }
};

/// The rows that the convolution of a row reads before it; behind a sequence's last row, the window
/// from which it goes on.
template <class S, int Count>
class HeldWindow {
 public:
  using Row = Element<S::DTYPE>;
  using Turns = WarpVector<Row, Count>;
  static constexpr int kBefore = S::CONV_WIDTH - 1;

  /// Those before a token of the item.
  WYVERN_DEVICE void load(const HeadRows<S>& in, int64 token, const StateItem& item,
                          const Convolution<S>& conv) {
    const int64 count = token - item.begin;
    const Row* const window = count < kBefore ? conv.first(item) : nullptr;
    Turns::each([&](int t, int first) {
      columns_[t].load_from(window, in.channel + first, conv.channels);
#pragma unroll
      for (int back = kBefore; back > 0; --back)
        if (back <= count) columns_[t].push(cuda::load<4>(in.row(token - back) + first));
    });
  }
  WYVERN_DEVICE void clear() {
    Turns::each([&](int t, int) { columns_[t].load_from(nullptr, 0, 0); });
  }
  WYVERN_DEVICE void store(Row* window, int64 channel, int64 channels) {
    Turns::each([&](int t, int first) { columns_[t].store_to(window, channel + first, channels); });
  }
  WYVERN_DEVICE const Vector<Row, 4>& column(int turn, int j) const {
    return columns_[turn].columns[j];
  }

 private:
  ConvWindow<S, Row, 4> columns_[Turns::kTurns] = {};
};

/// A row as it is given.
template <class S, int Count, bool = kConvolves<S>>
class HeldRow {
 public:
  WYVERN_DEVICE void load(const HeadRows<S>& in, int64 token, const StateItem&,
                          const Convolution<S>&) {
    x_.load(in.row(token));
  }
  WYVERN_DEVICE WarpVector<float, Count> floats(const HeadRows<S>&, const Convolution<S>&) const {
    return in_floats(x_);
  }

 private:
  WarpVector<Element<S::DTYPE>, Count> x_;
};

/// A row that is convolved, with the bits of short_conv_step.
template <class S, int Count>
class HeldRow<S, Count, true> {
 public:
  using Row = Element<S::DTYPE>;

  WYVERN_DEVICE void load(const HeadRows<S>& in, int64 token, const StateItem& item,
                          const Convolution<S>& conv) {
    before_.load(in, token, item, conv);
    x_.load(in.row(token));
  }
  WYVERN_DEVICE WarpVector<float, Count> floats(const HeadRows<S>& of,
                                                const Convolution<S>& conv) const {
    constexpr int kBefore = S::CONV_WIDTH - 1;
    WarpVector<float, Count> y;
    y.each([&](int t, int first) {
      ConvTaps<S, 4> taps = {};
      taps.load_from(conv.weight, conv.bias, of.channel + first);
      float x[S::CONV_WIDTH][4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int j = 0; j < kBefore; ++j) x[j][c] = to_float(before_.column(t, j).at[c]);
        x[kBefore][c] = to_float(x_.part[t].at[c]);
      }
      const auto convolved = convolved_row<S, Row>(taps, x, kBefore);
#pragma unroll
      for (int c = 0; c < 4; ++c) y.part[t].at[c] = to_float(convolved.at[c]);
    });
    return y;
  }

 private:
  HeldWindow<S, Count> before_;
  WarpVector<Row, Count> x_;
};

}  // namespace wyvern::cuda::decode
