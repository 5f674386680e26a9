// The overlap of splits and segments, by bounds on what tokens leave of a state.
#pragma once

#include "device/cuda/warp.cuh"
#include "forward/kda_forward/prepare.cuh"

/// log2 of bounds on how much longer a state can be after a run of tokens: the product of their
/// spectral norms, and the 1-norm of the product of their matrices.
struct RunBounds {
  float spectral, columns;
};

/// At least log2(x), by less than 0.1, for x >= 0.
WYVERN_DEVICE float log2_bound(float x) {
  return static_cast<float>(static_cast<int>(float_bits(x))) * 0x1p-23f - 126.9f;
}

/// Tokens in a warp's run: few, since it goes through them one after the other.
constexpr int kRun = kSlice;

/// The bounds of the kRun tokens that end with token `last`, in all lanes of a warp.
///
/// A token maps S to A S, A = (I - beta k k^T) diag(a), a = exp(g). Its spectral norm is at most
/// max(a) max(1, |1 - beta |k|^2|). Its entries are at most those of (I + beta |k| |k|^T) diag(a),
/// which are not negative; so from r = 1, r <- a (r + beta |k| (|k| . r)) from the last token back
/// bounds the sums of the columns of the product of all A; the largest is its 1-norm. No
/// terms cancel, so that fp32 errs by few parts in 2^24 a token.
WYVERN_DEVICE RunBounds bounds_of_run(const Block& b, int64 last, const GateForm& form,
                                      const TokenRows<const G_DTYPE>& g, const BetaRows& beta,
                                      const TokenRows<const DTYPE>& k) {
  constexpr int kChannels = K / 32;  // of a lane
  constexpr int kAhead = 8;          // tokens that are loaded ahead
  const int first = lane_index() * kChannels;
  const auto bias = load<kChannels>(array_at<kLayout.bias>(b.shared) + first);
  struct Token {
    Vector<G_DTYPE, kChannels> gates;
    Vector<DTYPE, kChannels> keys;
    BETA_DTYPE beta;
  };
  const auto fetch = [&](int64 t) {
    return Token{load<kChannels>(g.row(t) + b.head * K + first),
                 load<kChannels>(k.row(t) + b.key_head * K + first), beta.row(t)[b.head]};
  };
  Token ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = fetch(last - i);
  float r[kChannels];
#pragma unroll
  for (int j = 0; j < kChannels; ++j) r[j] = 1.0f;
  float spectral = 0.0f;
#pragma unroll 1
  for (int done = 0; done < kRun; done += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const Token token = ahead[i];
      if (done + kAhead < kRun) ahead[i] = fetch(last - done - kAhead - i);
      float rate = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(token.beta);
      float a[kChannels];
      float key[kChannels];
      float most = bits_float(0xFF800000U);  // -inf
      float square = 0.0f;
      float product = 0.0f;
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        const float gate = form(to_float(token.gates.at[j]), bias.at[j]);
        const float x = to_float(token.keys.at[j]);
        most = maximum(most, gate);
        a[j] = exp2_fast(gate);
        key[j] = maximum(x, -x);
        square = fused_multiply_add(x, x, square);
        product = fused_multiply_add(key[j], r[j], product);
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        most = maximum(most, shuffle_xor(most, mask));
        square += shuffle_xor(square, mask);
        product += shuffle_xor(product, mask);
      }
      if constexpr (QK_L2NORM) {
        rate *= reciprocal_fast(square + 1e-6f);
      }
      const float kept = 1.0f - rate * square;
      const float grown = maximum(kept, -kept) - 1.0f;
      spectral += most + (grown > 0.0f ? log_one_plus(grown) * kLog2E : 0.0f);
      product *= maximum(rate, -rate);
#pragma unroll
      for (int j = 0; j < kChannels; ++j) r[j] = a[j] * fused_multiply_add(product, key[j], r[j]);
    }
  }
  float most = 0.0f;
  float all = 0.0f;
#pragma unroll
  for (int j = 0; j < kChannels; ++j) {
    most = maximum(most, r[j]);
    all += r[j];
  }
  most = max_warp(most);
  all = sum_warp(all);
  // Out of range r may be NaN, which maximum() passes over.
  return {spectral, all < 0x1p100f ? log2_bound(most) : 128.0f};
}

/// The number of tokens before token `end`, a multiple of kRun, in which any state decays below
/// 2^-30 of its length; 0, if that is not proved within `most` tokens or does not seem to be. By
/// all threads; `sums` is shared memory for two floats a warp.
WYVERN_DEVICE int tokens_to_decay(const Block& b, int64 end, int most, float* sums,
                                  const GateForm& form, const TokenRows<const G_DTYPE>& g,
                                  const BetaRows& beta, const TokenRows<const DTYPE>& k) {
  constexpr float kEnough = -30.25f;  // roundings included
  constexpr int kWarps = kThreads / 32;
  float spectral = 0.0f;
  float columns = K == 64 ? 3.0f : 3.5f;  // log2 K^0.5, from the 1-norm to the spectral norm
#pragma unroll 1
  for (int done = 0; done + kRun <= most;) {
    const int before = done + warp_index() * kRun;
    RunBounds own{0.0f, 0.0f};
    if (before + kRun <= most) own = bounds_of_run(b, end - before - 1, form, g, beta, k);
    sync_block();
    if (lane_index() == 0) {
      sums[2 * warp_index()] = own.spectral;
      sums[2 * warp_index() + 1] = own.columns;
    }
    sync_block();
#pragma unroll 1
    for (int warp = 0; warp < kWarps && done + kRun <= most; ++warp) {
      spectral += sums[2 * warp];
      columns += sums[2 * warp + 1];
      done += kRun;
      if (spectral < kEnough || columns < kEnough) return done;
    }
    const float needed = kEnough * static_cast<float>(done) / static_cast<float>(most);
    if (spectral > needed && columns > needed) return 0;
  }
  return 0;
}
