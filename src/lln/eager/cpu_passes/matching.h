// Moments of queries and keys, and the temperatures that match them (`lln.matching.moments`).
#pragma once

#include <cmath>
#include <cstring>
#include "call.h"
#include "vectors.h"

namespace {

// Rows of a head's queries or keys.
struct Rows {
  const float* data;
  int64_t row, count;
};

// Those that are seen, one behind the other.
Rows seen_rows(const Rows& rows, const uint8_t* mask, int64_t width, float* to) {
  Rows found{to, width, 0};
  for (int64_t t = 0; t < rows.count; ++t)
    if (mask[t])
      std::memcpy(to + found.count++ * width, rows.data + t * rows.row, 4 * width);
  return found;
}

double sum_of_squares(const float* from, int64_t row, int64_t tokens, int64_t width) {
  double total = 0;
  for (int64_t t = 0; t < tokens; t += TILE)
    by_strips(width, [&](auto vectors, int64_t d) {
      const lanes zero[vectors] = {};
      lanes sum[vectors];
      add_squares(from + t * row + d, row, fewer(TILE, tokens - t), zero, sum);
      for (int n = 0; n < vectors; ++n) total += sum_of(sum[n]);
    });
  return total;
}

// Mean and sum of squares around it of every channel. A tile's are found around its own mean and
// merged with those before (Chan, Golub and LeVeque 1979): Σk² − S·mean² would lose digits.
void gather_moments(const float* from, int64_t row, int64_t tokens, int64_t width, float* mean,
                    float* squares) {
  for (int64_t t = 0; t < tokens; t += TILE) {
    const int64_t own = fewer(TILE, tokens - t);
    const float own_count = static_cast<float>(own), count = static_cast<float>(t + own);
    by_strips(width, [&](auto vectors, int64_t d) {
      lanes own_mean[vectors], around[vectors];
      add_rows(from + t * row + d, row, own, own_mean);
      for (int n = 0; n < vectors; ++n) own_mean[n] = own_mean[n] / own_count;
      add_squares(from + t * row + d, row, own, own_mean, around);
      for (int n = 0; n < vectors; ++n) {
        float *to_mean = mean + d + n * LANES, *to_squares = squares + d + n * LANES;
        if (t == 0) {
          store(to_mean, own_mean[n]);
          store(to_squares, around[n]);
          continue;
        }
        const lanes moved = own_mean[n] - load(to_mean);
        store(to_mean, load(to_mean) + moved * (own_count / count));
        around[n] += moved * moved * (static_cast<float>(t) * (own_count / count));
        store(to_squares, load(to_squares) + around[n]);
      }
    });
  }
}

inline double at_least(double number, double least) { return number < least ? least : number; }

// s = α·σq = β·σk for scores of variance p; see `lln.matching.curves`.
double matched_spread(const Curve& curve, double p) {
  // NaN stays NaN.
  const double clamped = p > curve.most ? curve.most : at_least(p, curve.least);
  const double u = std::log(clamped);
  double log_spread = 0;
  for (int power = 4; power >= 0; --power) log_spread = log_spread * u + curve.coefficients[power];
  return std::exp(log_spread) * std::sqrt(p / clamped);
}

}  // namespace
