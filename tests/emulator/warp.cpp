#include "tests/emulator/warp.hpp"

#include <wyvern/dtype.hpp>

#include <bit>
#include <cstdint>
#include <cstring>

namespace wyvern::emulator {
namespace {

using Lanes = std::array<LaneOperands*, 32>;
using Half = std::uint16_t;

Half half_of(unsigned word, int index) { return static_cast<Half>(word >> (16 * index)); }
unsigned word_of(Half low, Half high) { return low | static_cast<unsigned>(high) << 16; }

/// The lane and the half of its register that hold element (row, col) of an 8x8 matrix.
int lane_of(int row, int col) { return row * 4 + col / 2; }

void transpose(const Lanes& lanes) {
  std::array<unsigned, 32> result{};
  for (int row = 0; row < 8; ++row)
    for (int col = 0; col < 8; col += 2)
      result[lane_of(row, col)] = word_of(half_of(lanes[lane_of(col, row)]->a[0], row % 2),
                                          half_of(lanes[lane_of(col + 1, row)]->a[0], row % 2));
  for (int lane = 0; lane < 32; ++lane) *lanes[lane]->r = result[lane];
}

std::string load_matrix(const Lanes& lanes, bool transposed) {
  for (const LaneOperands* lane : lanes)
    if (reinterpret_cast<std::uintptr_t>(lane->row) % 16 != 0)
      return "ldmatrix of a row that is not aligned to 16 bytes";
  for (int matrix = 0; matrix < 4; ++matrix) {
    Half element[8][8];
    for (int row = 0; row < 8; ++row)
      std::memcpy(element[row], lanes[matrix * 8 + row]->row, sizeof(element[row]));
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4;
      const int col = lane % 4 * 2;
      lanes[lane]->r[matrix] = transposed ? word_of(element[col][row], element[col + 1][row])
                                          : word_of(element[row][col], element[row][col + 1]);
    }
  }
  return {};
}

std::string store_matrix(const Lanes& lanes, bool transposed) {
  for (const LaneOperands* lane : lanes)
    if (reinterpret_cast<std::uintptr_t>(lane->to) % 16 != 0)
      return "stmatrix of a row that is not aligned to 16 bytes";
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int row = 0; row < 8; ++row) {
      Half element[8];
      for (int col = 0; col < 8; ++col)
        element[col] = transposed ? half_of(lanes[lane_of(col, row)]->a[matrix], row % 2)
                                  : half_of(lanes[lane_of(row, col)]->a[matrix], col % 2);
      std::memcpy(lanes[matrix * 8 + row]->to, element, sizeof(element));
    }
  return {};
}

/// d += a * b for 16 x Depth times Depth x 8 operands already gathered from the lanes. The inner
/// loop goes over columns, so that the compiler carries out several at once.
template <int Depth>
void accumulate(const Lanes& lanes, const float (&a)[16][Depth], const float (&b)[Depth][8]) {
  float sum[16][8] = {};
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < Depth; ++k)
      for (int col = 0; col < 8; ++col) sum[row][col] += a[row][k] * b[k][col];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      lanes[lane]->d[i] += sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

template <class ToFloat>
void mma_16bit(const Lanes& lanes, ToFloat to_float) {
  float a[16][16];
  float b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[g + i % 2 * 8][t * 2 + i / 2 * 8 + half] = to_float(half_of(lanes[lane]->a[i], half));
      for (int i = 0; i < 2; ++i)
        b[t * 2 + i * 8 + half][g] = to_float(half_of(lanes[lane]->b[i], half));
    }
  }
  accumulate(lanes, a, b);
}

/// What the instruction sees of a float: the last 13 bits do not take part.
float tf32(unsigned bits) { return std::bit_cast<float>(bits & 0xFFFFE000U); }

void mma_tf32(const Lanes& lanes) {
  float a[16][8];
  float b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = tf32(lanes[lane]->a[i]);
    for (int i = 0; i < 2; ++i) b[t + i * 4][g] = tf32(lanes[lane]->b[i]);
  }
  accumulate(lanes, a, b);
}

std::string shuffle(const Lanes& lanes) {
  for (const LaneOperands* lane : lanes) {
    if (lane->b[0] >= 32) return "a shuffle from a lane that does not exist";
    *lane->r = lanes[lane->b[0]]->a[0];
  }
  return {};
}

}  // namespace

std::string execute(Collective operation, const Lanes& lanes) {
  switch (operation) {
    case Collective::sync_warp: return {};
    case Collective::shuffle: return shuffle(lanes);
    case Collective::transpose_8x8: transpose(lanes); return {};
    case Collective::load_matrix_x4: return load_matrix(lanes, false);
    case Collective::load_matrix_x4_transposed: return load_matrix(lanes, true);
    case Collective::store_matrix_x4: return store_matrix(lanes, false);
    case Collective::store_matrix_x4_transposed: return store_matrix(lanes, true);
    case Collective::mma_bf16: mma_16bit(lanes, [](Half x) { return bf16_number(x); }); return {};
    case Collective::mma_fp16: mma_16bit(lanes, fp16_to_float); return {};
    case Collective::mma_tf32: mma_tf32(lanes); return {};
    case Collective::wgmma_fence:
    case Collective::wgmma:
    case Collective::wgmma_commit:
    case Collective::wgmma_wait:
    case Collective::set_registers: break;  // a block's WarpProducts carry them out
  }
  return "an unknown instruction";
}

}  // namespace wyvern::emulator
