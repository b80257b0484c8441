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

// The same over all channels in double, around the mean of each or around 0: float knows no squares
// beyond 10³⁸. Adds the squares of the means to ``of_mean``.
double wide_squares(const Rows& rows, int64_t width, bool is_centred, double& of_mean) {
  double total = 0;
  for (int64_t d = 0; d < width; ++d) {
    double mean = 0;
    for (int64_t t = 0; is_centred && t < rows.count; ++t) mean += rows.data[t * rows.row + d];
    mean /= rows.count;
    of_mean += mean * mean;
    for (int64_t t = 0; t < rows.count; ++t) {
      const double away = rows.data[t * rows.row + d] - mean;
      total += away * away;
    }
  }
  return total;
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

// α and β of a head.
struct Temperatures {
  float alpha, beta;
};

Temperatures match(const Rows& q, const Rows& k, const Call& call, const Curve& curve,
                   Room& room) {
  if (!k.count) return {1.0f, 1.0f};
  const int64_t width = call.width;
  const double channels = static_cast<double>(call.channels);
  double query_variance = sum_of_squares(q.data, q.row, q.count, width);
  double key_variance = 0, of_mean = 0, none = 0;
  if (!std::isfinite(query_variance)) query_variance = wide_squares(q, width, false, none);
  query_variance /= channels * q.count;
  float *mean = room.take(width), *squares = room.take(width);
  gather_moments(k.data, k.row, k.count, width, mean, squares);
  for (int64_t d = 0; d < width; d += LANES) {
    const lanes own = load(mean + d);
    of_mean += sum_of(own * own);
    key_variance += sum_of(load(squares + d));
  }
  if (!std::isfinite(key_variance + of_mean)) {
    of_mean = 0;
    key_variance = wide_squares(k, width, true, of_mean);
  }
  key_variance /= channels * k.count;
  const double key_size = key_variance + of_mean / channels;
  // NaN counts as healthy, so that it shows in the result.
  if (query_variance < curve.floor * at_least(query_variance, 1) ||
      key_variance < curve.floor * at_least(key_size, 1))
    return {1.0f, 1.0f};
  const double spread = matched_spread(curve, query_variance * key_variance);
  return {static_cast<float>(spread / std::sqrt(query_variance)),
          static_cast<float>(spread / std::sqrt(key_variance))};
}

// What `match_head` needs.
int64_t floats_to_match(const Call& call) {
  return 2 * call.width * ((call.mask ? call.keys : 0) + 1) + 64;
}

// The same of one of all heads, written to the call's. There is one curve, with a mask one for every
// sample: they depend on the number of keys.
void match_head(const Call& call, int64_t index, const Side& query, const Side& key,
                const Curve* curve, Room& room) {
  const int64_t b = index / call.heads, h = index % call.heads;
  const uint8_t* mask = call.mask ? call.mask + b * call.keys : nullptr;
  Rows q{query.data + b * query.batch + h * query.head, query.token, call.queries};
  Rows k{key.data + b * key.batch + key_head_of(call, h) * key.head, key.token, call.keys};
  room.used = 0;
  if (mask) k = seen_rows(k, mask, call.width, room.take(call.keys * call.width));
  // A mask of as many queries as keys counts for both.
  if (mask && call.queries == call.keys)
    q = seen_rows(q, mask, call.width, room.take(call.keys * call.width));
  const Temperatures found = match(q, k, call, mask ? curve[b] : *curve, room);
  call.alphas[index] = found.alpha;
  call.betas[index] = found.beta;
}

}  // namespace
