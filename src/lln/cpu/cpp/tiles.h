// What happens to a tile of tokens: products, softmax, weights of keys and queries.
#pragma once

#include "vectors.h"

namespace {

// A matrix of one head or of a part of it: entry (i, j) is at data[i * row + j * step].
struct Matrix {
  const float* data;
  int64_t row, step;
};

template <int R, int P>
inline void few_rows(int64_t depth, const Matrix& left, const float* right, int64_t right_row, float* out,
                     int64_t out_row, float scale, bool adds) {
  lanes sum[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sum[r][p] = all(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    lanes of_right[P];
    for (int p = 0; p < P; ++p) of_right[p] = load(right + k * right_row + p * LANES);
    for (int r = 0; r < R; ++r) {
      const float of_left = left.data[r * left.row + k * left.step];
      for (int p = 0; p < P; ++p) sum[r][p] += of_left * of_right[p];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) {
      float* to = out + r * out_row + p * LANES;
      store(to, adds ? load(to) + sum[r][p] * scale : sum[r][p] * scale);
    }
}

// R rows at a time, and what is left by fewer.
template <int R, int P>
inline void all_rows(int64_t rows, int64_t depth, Matrix left, const float* right,
                     int64_t right_row, float* out, int64_t out_row, float scale, bool adds) {
  for (; rows >= R; rows -= R) {
    few_rows<R, P>(depth, left, right, right_row, out, out_row, scale, adds);
    left.data += R * left.row, out += R * out_row;
  }
  if constexpr (R > 1)
    all_rows<(R > 2 ? R - 2 : 1), P>(rows, depth, left, right, right_row, out, out_row, scale,
                                     adds);
}

// P vectors of columns at a time, and what is left by fewer.
template <int P>
void all_columns(int64_t rows, int64_t columns, int64_t depth, Matrix left, const float* right,
                 int64_t right_row, float* out, int64_t out_row, float scale, bool adds) {
  for (; columns >= P * LANES; columns -= P * LANES) {
    all_rows<ROWS, P>(rows, depth, left, right, right_row, out, out_row, scale, adds);
    right += P * LANES, out += P * LANES;
  }
  if constexpr (P > 1)
    all_columns<P / 2>(rows, columns, depth, left, right, right_row, out, out_row, scale, adds);
}

// out = scale · left · right, or added to what is there. Rows of right and out are contiguous.
void product(int64_t rows, int64_t columns, int64_t depth, Matrix left, const float* right,
             int64_t right_row, float* out, int64_t out_row, float scale, bool adds) {
  all_columns<PACKS>(rows, columns, depth, left, right, right_row, out, out_row, scale, adds);
}

// A square of as many rows as lanes. Each round puts halves together that were far apart; after as
// many rounds as halves can be made, rows are columns.
inline void transpose_square(const float* from, int64_t from_row, float* to, int64_t to_row) {
  lanes row[LANES], next[LANES];
  for (int i = 0; i < LANES; ++i) row[i] = load(from + i * from_row);
  for (int round = 1; round < LANES; round *= 2) {
    for (int i = 0; i < LANES / 2; ++i) {
      next[2 * i] = row[i], next[2 * i + 1] = row[i + LANES / 2];
      interleave(next[2 * i], next[2 * i + 1], AllLanes{});
    }
    for (int i = 0; i < LANES; ++i) row[i] = next[i];
  }
  for (int i = 0; i < LANES; ++i) store(to + i * to_row, row[i]);
}

// Rows and columns are multiples of 16.
void transpose(int64_t rows, int64_t columns, const float* from, int64_t from_row, float* to) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t j = 0; j < columns; j += LANES)
      transpose_square(from + i * from_row + j, from_row, to + j * rows + i, rows);
}

void softmax(int64_t rows, int64_t columns, float* weight) {
  for (int64_t i = 0; i < rows; ++i, weight += columns) {
    lanes top = load(weight);
    for (int64_t j = LANES; j < columns; j += LANES) top = larger(load(weight + j), top);
    const lanes peak = all(largest_of(top));
    lanes sum = {};
    for (int64_t j = 0; j < columns; j += 16) {
      lanes power[GROUP];
      for (int g = 0; g < GROUP; ++g) power[g] = load(weight + j + g * LANES) - peak;
      exponential(power);
      for (int g = 0; g < GROUP; ++g) {
        store(weight + j + g * LANES, power[g]);
        sum += power[g];
      }
    }
    const lanes share = all(1.0f / sum_of(sum));
    for (int64_t j = 0; j < columns; j += LANES) store(weight + j, load(weight + j) * share);
  }
}

// Softmax without the division: every row's powers and their sum. What takes long for one row, to join
// its lanes, is done for all rows at once, so that the processor need not wait for it.
void raise(int64_t rows, int64_t columns, float* weight, float* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = weight + i * columns;
    lanes top = load(row);
    for (int64_t j = LANES; j < columns; j += LANES) top = larger(load(row + j), top);
    sums[i] = largest_of(top);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* row = weight + i * columns;
    const lanes peak = all(sums[i]);
    lanes sum = {};
    for (int64_t j = 0; j < columns; j += 16) {
      lanes power[GROUP];
      for (int g = 0; g < GROUP; ++g) power[g] = load(row + j + g * LANES) - peak;
      exponential(power);
      for (int g = 0; g < GROUP; ++g) {
        store(row + j + g * LANES, power[g]);
        sum += power[g];
      }
    }
    sums[i] = sum_of(sum);
  }
}

// Replaces the gradient of softmax's results by that of what it took: w ∘ (dw − rowsum(w ∘ dw)).
void softmax_gradient(int64_t rows, int64_t columns, const float* weight, float* gradient) {
  for (int64_t i = 0; i < rows; ++i, weight += columns, gradient += columns) {
    lanes sum = {};
    for (int64_t j = 0; j < columns; j += LANES) sum += load(weight + j) * load(gradient + j);
    const lanes middle = all(sum_of(sum));
    for (int64_t j = 0; j < columns; j += LANES)
      store(gradient + j, load(weight + j) * (load(gradient + j) - middle));
  }
}

// e = exp(β(k − peak)), ``[tokens, D]``. The difference comes first: it is never above 0, while βk
// and a peak of βk, rounded one by one, are 64 apart at 10⁹.
void weigh_keys(int64_t tokens, int64_t width, const float* key, int64_t row, float beta,
                const float* peak, float* weight) {
  for (int64_t t = 0; t < tokens; ++t, key += row, weight += width)
    for (int64_t d = 0; d < width; d += 16) {
      lanes power[GROUP];
      for (int g = 0; g < GROUP; ++g) {
        const int64_t at = d + g * LANES;
        const lanes k = load(key + at);
        power[g] = (k - load(peak + at)) * beta + unless_finite(k);
      }
      exponential(power);
      for (int g = 0; g < GROUP; ++g) store(weight + d + g * LANES, power[g]);
    }
}

// w = softmax(αq + L), ``[tokens, D]``.
void weigh_queries(int64_t tokens, int64_t width, const float* query, int64_t row, float alpha,
                   const float* level, float* weight) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t d = 0; d < width; d += LANES) {
      const lanes q = load(query + t * row + d);
      store(weight + t * width + d, q * alpha + load(level + d) + unless_finite(q));
    }
  softmax(tokens, width, weight);
}

// Adds the sums of a tile's columns, of rows as wide or as far apart as given. Adding token by token
// would round more.
void add_tile_sums(int64_t tokens, int64_t width, const float* weight, float* total,
                   int64_t row = 0) {
  by_strips(width, [&](auto vectors, int64_t d) {
    lanes sum[vectors];
    add_rows(weight + d, row ? row : width, tokens, sum);
    for (int n = 0; n < vectors; ++n) {
      float* to = total + d + n * LANES;
      store(to, load(to) + sum[n]);
    }
  });
}

}  // namespace
