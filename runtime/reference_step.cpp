#include "runtime/reference_step.hpp"

#include <algorithm>

// One version of each loop per width of vectors; the loader picks the CPU's own. It does so before
// the thread sanitizer, which would watch it do so, is ready.
#if defined(__has_feature)
#define WYVERN_WATCHED __has_feature(thread_sanitizer)
#else
#define WYVERN_WATCHED 0
#endif
#if defined(__x86_64__) && defined(__linux__) && !WYVERN_WATCHED
#define WYVERN_EVERY_WIDTH \
  __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define WYVERN_EVERY_WIDTH
#endif

namespace wyvern {

WYVERN_EVERY_WIDTH
void decay_and_read(const double* from, double* to, std::span<const double> decay,
                    std::span<const double> k, std::span<double> out) {
  const std::size_t V = out.size();
  double* const sum = out.data();
  std::fill(out.begin(), out.end(), 0.0);
  for (std::size_t i = 0; i < k.size(); ++i) {
    const double* const source = from + i * V;
    double* const row = to + i * V;
    const double keep = decay[i], key = k[i];
#pragma omp simd
    for (std::size_t j = 0; j < V; ++j) {
      const double value = keep * source[j];
      row[j] = value;
      sum[j] += key * value;
    }
  }
}

WYVERN_EVERY_WIDTH
void write_and_read(const double* from, double* to, std::span<const double> k,
                    std::span<const double> u, std::span<const double> q, std::span<double> out) {
  const std::size_t V = out.size();
  const double* const update = u.data();
  double* const sum = out.data();
  std::fill(out.begin(), out.end(), 0.0);
  for (std::size_t i = 0; i < k.size(); ++i) {
    const double* const source = from + i * V;
    double* const row = to + i * V;
    const double key = k[i], query = q[i];
#pragma omp simd
    for (std::size_t j = 0; j < V; ++j) {
      const double value = source[j] + key * update[j];
      row[j] = value;
      sum[j] += query * value;
    }
  }
}

WYVERN_EVERY_WIDTH
void adjoint_rows(const double* S, double* dS, std::span<const double> erasing_key,
                  std::span<const double> decay, std::span<const double> u,
                  std::span<const double> du, std::span<const double> d_o, std::span<double> dq,
                  std::span<double> dk, std::span<double> d_erasing_key, std::span<double> dg) {
  const std::size_t V = u.size();
  const double *const update = u.data(), *const d_update = du.data(), *const d_out = d_o.data();
  for (std::size_t i = 0; i < erasing_key.size(); ++i) {
    const double* const state = S + i * V;
    double* const row = dS + i * V;
    const double read = erasing_key[i], keep = decay[i];
    double read_out = 0, along_update = 0, read_update = 0, along_state = 0;
#pragma omp simd reduction(+ : read_out, along_update, read_update, along_state)
    for (std::size_t j = 0; j < V; ++j) {
      read_out += state[j] * d_out[j];
      along_update += row[j] * update[j];
      read_update += state[j] * d_update[j];
      const double value = row[j] - read * d_update[j];
      along_state += value * state[j];
      row[j] = keep * value;
    }
    dq[i] = read_out;
    dk[i] = along_update;
    d_erasing_key[i] = -read_update;
    dg[i] = along_state;
  }
}

}  // namespace wyvern
