// Small dense matrices in float64 and the decays of one chunk: the stage references use them, so
// that they read as section 3 of runtime/SPECIFICATION.md does.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/support/stage_reference.hpp"

namespace wyvern::testing {

/// Row-major, zero when made.
class Matrix {
 public:
  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t cols)
      : rows_(rows), cols_(cols), data_(static_cast<std::size_t>(rows * cols)) {}

  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  double* operator[](std::int64_t r) { return data_.data() + r * cols_; }
  const double* operator[](std::int64_t r) const { return data_.data() + r * cols_; }
  const Vector& data() const { return data_; }

 private:
  std::int64_t rows_ = 0, cols_ = 0;
  Vector data_;
};

Matrix transposed(const Matrix& a);
Matrix operator*(const Matrix& a, const Matrix& b);
Matrix operator*(double factor, Matrix a);
Matrix operator+(Matrix a, const Matrix& b);
/// diag(factors) a.
Matrix scaled(const Vector& factors, Matrix a);
/// Element by element.
Matrix hadamard(Matrix a, const Matrix& b);
/// Rows' sums of a * b.
Vector row_dots(const Matrix& a, const Matrix& b);
/// The elements on or below the diagonal, or with `strict` below it.
Matrix lower(Matrix a, bool strict);

double dot(const double* a, const double* b, std::int64_t count);
/// y += factor * x.
void add(double* y, double factor, const double* x, std::int64_t count);

/// One chunk of one value head: how its rows lie in tensors.
class Chunk {
 public:
  Chunk(const ChunkLayout& layout, const Dims& dims, std::size_t slot, std::int64_t head)
      : dims_(dims),
        BT_(layout.BT),
        tokens_(layout.tokens()),
        slot_(slot),
        begin_(layout.slots[slot].begin),
        rows_(layout.slots[slot].rows),
        head_(head) {}

  std::int64_t rows() const { return rows_; }
  std::int64_t head() const { return head_; }
  std::size_t slot() const { return slot_; }
  /// Columns of a row of a tensor [tokens, HV, ...].
  std::int64_t width_of(const Vector& tensor) const {
    return static_cast<std::int64_t>(tensor.size()) / (tokens_ * dims_.HV);
  }

  /// Rows of a tensor [tokens, heads, width] with `heads` H or HV.
  Matrix read(const Vector& tensor, std::int64_t heads, std::int64_t width) const;
  Matrix keys(const Vector& tensor) const { return read(tensor, dims_.H, dims_.K); }
  /// All columns of a tensor [tokens, HV, ...].
  Matrix own(const Vector& tensor) const { return read(tensor, dims_.HV, width_of(tensor)); }
  Matrix wide_keys(const Vector& tensor) const { return read(tensor, dims_.HV, dims_.K); }
  Matrix values(const Vector& tensor) const { return read(tensor, dims_.HV, dims_.V); }
  /// [tokens, HV, BT] without the columns past the chunk's rows.
  Matrix square(const Vector& tensor) const { return leading(tensor, BT_, rows_); }
  /// [tokens, HV].
  Vector scalars(const Vector& tensor) const { return read(tensor, dims_.HV, 1).data(); }
  /// [NT, HV, K, V].
  Matrix state(const Vector& tensor) const;

  /// Writes rows of a tensor with HV heads as wide as it is; columns past the matrix's stay.
  void write(Vector& tensor, const Matrix& rows) const;
  void write(Vector& tensor, const Vector& scalars) const;
  void write_state(Vector& tensor, const Matrix& state) const;

 private:
  /// The first `count` of `width` columns of a tensor with HV heads.
  Matrix leading(const Vector& tensor, std::int64_t width, std::int64_t count) const;

  const Dims& dims_;
  std::int64_t BT_, tokens_;
  std::size_t slot_;
  std::int64_t begin_, rows_, head_;
};

/// Calls visit(chunk) for every chunk that is used and every value head.
template <class Visit>
void for_each_chunk(const ChunkLayout& layout, const Dims& dims, Visit visit) {
  for (std::size_t slot = 0; slot < layout.slots.size(); ++slot)
    for (std::int64_t head = 0; head < dims.HV && layout.slots[slot].sequence >= 0; ++head)
      visit(Chunk(layout, dims, slot, head));
}

/// The decays of one chunk: none (an empty G), one a row, or one a row and key channel. Not
/// thread-safe.
class Decay {
 public:
  /// `G` [tokens, HV] or [tokens, HV, K]; empty: no decay.
  Decay(const Chunk& chunk, const Vector& G);

  /// exp(G_r) * row r.
  Matrix entering(Matrix rows) const;
  /// exp(G_C - G_r) * row r.
  Matrix leaving(Matrix rows) const;
  /// exp(G_C) * a state [K, V].
  Matrix through(Matrix state) const;

  /// sum over c of a_rc exp(G_rc - G_sc) b_sc for r >= s, with `strict` for r > s.
  Matrix product(const Matrix& a, const Matrix& b, bool strict) const;
  /// Row r: sum over s < r, or s <= r, of m_rs exp(G_r - G_s) * b_s.
  Matrix row_sums(const Matrix& m, const Matrix& b, bool strict) const;
  /// Row s: sum over r > s, or r >= s, of m_rs exp(G_r - G_s) * a_r.
  Matrix column_sums(const Matrix& m, const Matrix& a, bool strict) const;

 private:
  /// exp(G_r - G_s) for r >= s: one number or `width_` of them. The first call computes all, which
  /// takes longest; references that only propagate states call it never.
  const double* factor(std::int64_t r, std::int64_t s) const;

  /// y += m * decay * x.
  void accumulate(double* y, double m, const double* decay, const double* x,
                  std::int64_t count) const;

  std::int64_t rows_, width_;
  Matrix G_;                // [rows, width]
  mutable Vector factors_;  // [rows, rows, width]
};

}  // namespace wyvern::testing
