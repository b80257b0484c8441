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
  for (int64_t t = 0; t < tokens; t += TILE) {
    lanes sum[GROUP] = {};
    for (int64_t i = t; i < fewer(t + TILE, tokens); ++i)
      for (int64_t d = 0; d < width; d += 16)
        for (int g = 0; g < GROUP; ++g) {
          const lanes own = load(from + i * row + d + g * LANES);
          sum[g] += own * own;
        }
    for (int g = 0; g < GROUP; ++g) total += sum_of(sum[g]);
  }
  return total;
}

// Mean and sum of squares around it of every channel. A tile's are found around its own mean and
// merged with those before (Chan, Golub and LeVeque 1979): Σk² − S·mean² would lose digits.
void gather_moments(const float* from, int64_t row, int64_t tokens, int64_t width, float* mean,
                    float* squares) {
  for (int64_t t = 0; t < tokens; t += TILE) {
    const int64_t own = fewer(TILE, tokens - t);
    const float own_count = static_cast<float>(own), count = static_cast<float>(t + own);
    for (int64_t d = 0; d < width; d += 16) {
      const float* columns = from + t * row + d;
      lanes own_mean[GROUP] = {}, around[GROUP] = {};
      add_rows(columns, row, own, own_mean);
      for (int g = 0; g < GROUP; ++g) own_mean[g] = own_mean[g] / own_count;
      for (int64_t i = 0; i < own; ++i)
        for (int g = 0; g < GROUP; ++g) {
          const lanes away = load(columns + i * row + g * LANES) - own_mean[g];
          around[g] += away * away;
        }
      for (int g = 0; g < GROUP; ++g) {
        float *to_mean = mean + d + g * LANES, *to_squares = squares + d + g * LANES;
        if (t == 0) {
          store(to_mean, own_mean[g]);
          store(to_squares, around[g]);
          continue;
        }
        const lanes moved = own_mean[g] - load(to_mean);
        store(to_mean, load(to_mean) + moved * (own_count / count));
        around[g] += moved * moved * (static_cast<float>(t) * (own_count / count));
        store(to_squares, load(to_squares) + around[g]);
      }
    }
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
