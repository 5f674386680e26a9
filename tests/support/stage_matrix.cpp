#include "tests/support/stage_matrix.hpp"

#include <algorithm>
#include <cmath>

namespace wyvern::testing {

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

void add(double* y, double factor, const double* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

namespace {

void scale(double* y, double factor, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] *= factor;
}

}  // namespace

Matrix transposed(const Matrix& a) {
  Matrix out(a.cols(), a.rows());
  for (std::int64_t r = 0; r < a.rows(); ++r)
    for (std::int64_t c = 0; c < a.cols(); ++c) out[c][r] = a[r][c];
  return out;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows(), b.cols());
  for (std::int64_t r = 0; r < a.rows(); ++r)
    for (std::int64_t i = 0; i < a.cols(); ++i)
      if (a[r][i] != 0) add(out[r], a[r][i], b[i], b.cols());
  return out;
}

Matrix operator*(double factor, Matrix a) {
  for (std::int64_t i = 0; i < a.rows() * a.cols(); ++i) a[0][i] *= factor;
  return a;
}

Matrix operator+(Matrix a, const Matrix& b) {
  add(a[0], 1, b[0], a.rows() * a.cols());
  return a;
}

Matrix scaled(const Vector& factors, Matrix a) {
  for (std::int64_t r = 0; r < a.rows(); ++r)
    for (std::int64_t c = 0; c < a.cols(); ++c) a[r][c] *= factors[static_cast<std::size_t>(r)];
  return a;
}

Matrix hadamard(Matrix a, const Matrix& b) {
  for (std::int64_t i = 0; i < a.rows() * a.cols(); ++i) a[0][i] *= b[0][i];
  return a;
}

Vector row_dots(const Matrix& a, const Matrix& b) {
  Vector sums;
  for (std::int64_t r = 0; r < a.rows(); ++r) sums.push_back(dot(a[r], b[r], a.cols()));
  return sums;
}

Matrix lower(Matrix a, bool strict) {
  for (std::int64_t r = 0; r < a.rows(); ++r)
    for (std::int64_t c = strict ? r : r + 1; c < a.cols(); ++c) a[r][c] = 0;
  return a;
}

Matrix Chunk::read(const Vector& tensor, std::int64_t heads, std::int64_t width) const {
  Matrix out(rows_, width);
  const std::int64_t head = head_ / (dims_.HV / heads);
  for (std::int64_t r = 0; r < rows_; ++r)
    std::copy_n(tensor.data() + ((begin_ + r) * heads + head) * width, width, out[r]);
  return out;
}

Matrix Chunk::leading(const Vector& tensor, std::int64_t width, std::int64_t count) const {
  Matrix out(rows_, count);
  for (std::int64_t r = 0; r < rows_; ++r)
    std::copy_n(tensor.data() + ((begin_ + r) * dims_.HV + head_) * width, count, out[r]);
  return out;
}

Matrix Chunk::state(const Vector& tensor) const {
  Matrix out(dims_.K, dims_.V);
  const auto index = static_cast<std::int64_t>(slot_) * dims_.HV + head_;
  std::copy_n(tensor.data() + index * dims_.K * dims_.V, dims_.K * dims_.V, out[0]);
  return out;
}

void Chunk::write(Vector& tensor, const Matrix& rows) const {
  const std::int64_t width = width_of(tensor);
  for (std::int64_t r = 0; r < rows_; ++r)
    std::copy_n(rows[r], rows.cols(), tensor.data() + ((begin_ + r) * dims_.HV + head_) * width);
}

void Chunk::write(Vector& tensor, const Vector& scalars) const {
  for (std::int64_t r = 0; r < rows_; ++r)
    tensor[static_cast<std::size_t>((begin_ + r) * dims_.HV + head_)] =
        scalars[static_cast<std::size_t>(r)];
}

void Chunk::write_state(Vector& tensor, const Matrix& state) const {
  const auto index = static_cast<std::int64_t>(slot_) * dims_.HV + head_;
  std::copy(state.data().begin(), state.data().end(), tensor.begin() + index * dims_.K * dims_.V);
}

Decay::Decay(const Chunk& chunk, const Vector& G)
    : rows_(chunk.rows()), width_(G.empty() ? 1 : chunk.width_of(G)), G_(rows_, width_) {
  if (!G.empty()) G_ = chunk.own(G);
}

const double* Decay::factor(std::int64_t r, std::int64_t s) const {
  if (factors_.empty()) {
    factors_.resize(static_cast<std::size_t>(rows_ * rows_ * width_));
    for (std::int64_t i = 0; i < rows_; ++i)
      for (std::int64_t j = 0; j <= i; ++j)
        for (std::int64_t c = 0; c < width_; ++c)
          factors_[static_cast<std::size_t>((i * rows_ + j) * width_ + c)] =
              std::exp(G_[i][c] - G_[j][c]);
  }
  return &factors_[static_cast<std::size_t>((r * rows_ + s) * width_)];
}

Matrix Decay::entering(Matrix rows) const {
  for (std::int64_t r = 0; r < rows_; ++r) {
    if (width_ == 1) scale(rows[r], std::exp(G_[r][0]), rows.cols());
    for (std::int64_t c = 0; width_ > 1 && c < rows.cols(); ++c) rows[r][c] *= std::exp(G_[r][c]);
  }
  return rows;
}

Matrix Decay::leaving(Matrix rows) const {
  const double* const end = G_[rows_ - 1];
  for (std::int64_t r = 0; r < rows_; ++r) {
    if (width_ == 1) scale(rows[r], std::exp(end[0] - G_[r][0]), rows.cols());
    for (std::int64_t c = 0; width_ > 1 && c < rows.cols(); ++c)
      rows[r][c] *= std::exp(end[c] - G_[r][c]);
  }
  return rows;
}

Matrix Decay::through(Matrix state) const {
  for (std::int64_t i = 0; i < state.rows(); ++i)
    scale(state[i], std::exp(G_[rows_ - 1][width_ == 1 ? 0 : i]), state.cols());
  return state;
}

Matrix Decay::product(const Matrix& a, const Matrix& b, bool strict) const {
  Matrix out(rows_, rows_);
  for (std::int64_t r = 0; r < rows_; ++r)
    for (std::int64_t s = 0; s < (strict ? r : r + 1); ++s) {
      const double* const decay = factor(r, s);
      if (width_ == 1) {
        out[r][s] = decay[0] * dot(a[r], b[s], a.cols());
        continue;
      }
      for (std::int64_t c = 0; c < width_; ++c) out[r][s] += a[r][c] * decay[c] * b[s][c];
    }
  return out;
}

Matrix Decay::row_sums(const Matrix& m, const Matrix& b, bool strict) const {
  Matrix out(rows_, b.cols());
  for (std::int64_t r = 0; r < rows_; ++r)
    for (std::int64_t s = 0; s < (strict ? r : r + 1); ++s)
      accumulate(out[r], m[r][s], factor(r, s), b[s], b.cols());
  return out;
}

Matrix Decay::column_sums(const Matrix& m, const Matrix& a, bool strict) const {
  Matrix out(rows_, a.cols());
  for (std::int64_t r = 0; r < rows_; ++r)
    for (std::int64_t s = 0; s < (strict ? r : r + 1); ++s)
      accumulate(out[s], m[r][s], factor(r, s), a[r], a.cols());
  return out;
}

void Decay::accumulate(double* y, double m, const double* decay, const double* x,
                       std::int64_t count) const {
  if (width_ == 1) return add(y, m * decay[0], x, count);
  for (std::int64_t c = 0; c < count; ++c) y[c] += m * decay[c] * x[c];
}

}  // namespace wyvern::testing
