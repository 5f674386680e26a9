// The sums over a chunk's rows inside it, for a slice of channels:
//   by rows     x_r = sum over s < r of m_rs k_s 2^(G_r - G_s), m in registers
//   by columns  y_s = sum over r > s of (f_rs q_r + m_rs k_r) 2^(G_r - G_s), F and M in tiles
// Operands are decayed to or from the anchor of their rows. Rows of an accumulator go from the
// anchor of one group of rows to the next one's, in which direction all decays are at most 1, until
// they are at their own. What they start with is decayed all the way: x from the first anchor, y
// from the last.
#pragma once

#include "backward/kda_gradient/block.cuh"

using Fragment = sm90::FragmentA<DTYPE, kRows>;

/// Groups of Rows rows, each with an anchor.
template <int Rows>
struct Sweep {
  static constexpr int kGroups = kRows / Rows;
  static constexpr int kTable = kAnchors / kGroups;  ///< rows of the table from one to the next

  /// The groups of this thread's two rows.
  WYVERN_DEVICE static int group_of(int half) { return Square::row(2 * half) / Rows; }

  /// From anchor to anchor, `later` and the one before, where `moves` rows do.
  WYVERN_DEVICE static void move(const Block& b, Square& x, int later, const bool (&moves)[2]) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const Float2 to = b.anchor(later * kTable, Square::col(4 * j));
      const Float2 from = b.anchor((later - 1) * kTable, Square::col(4 * j));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float factor = exp2_fast(to.at[n] - from.at[n]);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (moves[half]) x.x[4 * j + 2 * half + n] *= factor;
      }
    }
  }
  WYVERN_DEVICE static void move_down(const Block& b, Square& x, int group) {
    if (group == 0) return;
    const bool moves[2] = {group_of(0) >= group, group_of(1) >= group};
    move(b, x, group, moves);
  }
  WYVERN_DEVICE static void move_up(const Block& b, Square& y, int group) {
    if (group + 1 == kGroups) return;
    const bool moves[2] = {group_of(0) <= group, group_of(1) <= group};
    move(b, y, group + 1, moves);
  }

  /// Of sixteen columns of a left operand those of the group.
  WYVERN_DEVICE static void select(uint32 (&to)[4], const uint32 (&from)[4], int group) {
    const int four = group % 4;
    const bool is_own = lane_index() % 4 / 2 == four % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = Rows == 16 || (i / 2 == four / 2 && is_own) ? from[i] : 0;
  }

  /// Starts products of sixteen rows.
  WYVERN_DEVICE static void multiply_rows(const Block& b, Square& x, const uint32 (&m)[4],
                                          int step) {
    sm90::wgmma<DTYPE, kRows, sm90::Major::mn>(x.x, m, sm90::columns_of(b.k_to()).at(step), true);
  }
  WYVERN_DEVICE static void multiply_columns(const Block& b, Square& y, const uint32 (&f)[4],
                                             const uint32 (&m)[4], int step) {
    if constexpr (Rows == 16) {
      constexpr auto kMajor = sm90::Major::mn;
      sm90::wgmma<DTYPE, kRows, kMajor, kMajor>(y.x, sm90::columns_of(b.F()).at(step),
                                                sm90::columns_of(b.q_from()).at(step), true);
      sm90::wgmma<DTYPE, kRows, kMajor, kMajor>(y.x, sm90::columns_of(b.M()).at(step),
                                                sm90::columns_of(b.k_from()).at(step), true);
    } else {
      sm90::wgmma<DTYPE, kRows, sm90::Major::mn>(y.x, f, sm90::columns_of(b.q_from()).at(step),
                                                 true);
      sm90::wgmma<DTYPE, kRows, sm90::Major::mn>(y.x, m, sm90::columns_of(b.k_from()).at(step),
                                                 true);
    }
  }
  /// This warp's rows of a tile's transpose, columns of a group: where a left operand must be
  /// selected from.
  WYVERN_DEVICE static void load_selected(uint32 (&to)[4], const SquareTile& tile, int group) {
    if constexpr (Rows == 16) return;
    uint32 all[4];
    const int lane = lane_index();
    load_matrix_x4_transposed(all, tile.at(group * Rows / 16 * 16 + lane % 8 + lane / 16 * 8,
                                           16 * (warp_index() % 4) + lane / 8 % 2 * 8));
    select(to, all, group);
  }

  /// Sixteen rows at a time, since a fragment's registers cannot be told apart at run time; their
  /// groups in a loop.
  WYVERN_DEVICE static void by_rows(const Block& b, Square& x, Fragment& m) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll 1
      for (int group = 16 / Rows * step; group < 16 / Rows * (step + 1); ++group) {
        uint32 own[4];
        select(own, m.x[step], group);
        move_down(b, x, group);
        sm90::begin_products(x);
        multiply_rows(b, x, own, step);
        sm90::wgmma_commit();
        sm90::end_products<0>(x);
        sm90::pin(own);
      }
  }
  /// Both, step by step in turns.
  WYVERN_DEVICE static void by_rows_and_columns(const Block& b, Square& x, Square& y, Fragment& m) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll 1
      for (int group = 16 / Rows * step; group < 16 / Rows * (step + 1); ++group) {
        const int last = kGroups - 1 - group;
        uint32 own[4], f_own[4] = {}, m_own[4] = {};
        select(own, m.x[step], group);
        load_selected(f_own, b.F(), last);
        load_selected(m_own, b.M(), last);
        move_down(b, x, group);
        move_up(b, y, last);
        sm90::begin_products(x);
        multiply_rows(b, x, own, step);
        sm90::wgmma_commit();
        sm90::begin_products(y);
        multiply_columns(b, y, f_own, m_own, 3 - step);
        sm90::wgmma_commit();
        sm90::end_products<1>(x);
        sm90::pin(own);
        sm90::end_products<0>(y);
        sm90::pin(f_own);
        sm90::pin(m_own);
      }
  }
};

WYVERN_DEVICE void sweep(const Block& b, bool steep, Square& x, Fragment& m) {
  if constexpr (kMayBeSteep) {
    if (steep) return Sweep<4>::by_rows(b, x, m);
  }
  Sweep<16>::by_rows(b, x, m);
}
WYVERN_DEVICE void sweep(const Block& b, bool steep, Square& x, Square& y, Fragment& m) {
  if constexpr (kMayBeSteep) {
    if (steep) return Sweep<4>::by_rows_and_columns(b, x, y, m);
  }
  Sweep<16>::by_rows_and_columns(b, x, y, m);
}
