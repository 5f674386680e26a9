// The windows of a convolution from which sequences go on, of the kernel for many states that also
// convolves. S is the kernel's Spec.
#pragma once

#include "decode/recurrent/rows.cuh"

namespace wyvern::cuda::decode {

/// The windows of an item's channels from which its sequence goes on: of its head of v, and behind
/// the last head that reads them of q and k. By a warp.
template <class S>
class NextWindows {
 public:
  WYVERN_DEVICE NextWindows(const StateItem& item, const Tensors<S>& in, const Convolution<S>& conv)
      : item_(item), in_(in), conv_(conv), with_keys_(item.head % S::GROUP == S::GROUP - 1) {
    if (!wanted()) return;
    for (int step = 0; step < S::STEPS; ++step) load(values_[step], in.values(item.head, step));
    if (!with_keys_) return;
    load(queries_, in.queries(item.head));
    for (int step = 0; step < S::STEPS; ++step) load(keys_[step], in.keys(item.head, step));
  }
  WYVERN_DEVICE void store() {
    if (!wanted()) return;
    for (int step = 0; step < S::STEPS; ++step) store(values_[step], in_.values(item_.head, step));
    if (!with_keys_) return;
    store(queries_, in_.queries(item_.head));
    for (int step = 0; step < S::STEPS; ++step) store(keys_[step], in_.keys(item_.head, step));
  }

 private:
  template <int Count>
  using Window = HeldWindow<S, Count>;
  using Rows = HeadRows<S>;

  WYVERN_DEVICE bool wanted() const { return !S::KEEP_POOL && conv_.last(item_) != nullptr; }
  template <int Count>
  WYVERN_DEVICE void load(Window<Count>& window, const Rows& rows) const {
    if (item_.slots.null)
      window.clear();
    else
      window.load(rows, item_.end, item_, conv_);
  }
  template <int Count>
  WYVERN_DEVICE void store(Window<Count>& window, const Rows& rows) const {
    window.store(conv_.last(item_), rows.channel, conv_.channels);
  }

  const StateItem& item_;
  const Tensors<S>& in_;
  const Convolution<S>& conv_;
  const bool with_keys_;
  Window<S::K> queries_, keys_[S::STEPS];
  Window<S::V> values_[S::STEPS];
};

}  // namespace wyvern::cuda::decode
