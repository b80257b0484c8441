// The places of the largest scores.
#pragma once

#include <cmath>
#include <limits>
#include "call.h"
#include "vectors.h"

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Floats as whole numbers of the same order.
inline int32_t order_of(float number) {
  int32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float of_order(int32_t order) {
  const int32_t bits = order ^ ((order >> 31) & 0x7fffffff);
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// How many of the numbers are at least so large; their count is a multiple of 16.
inline int64_t count_from(const float* numbers, int64_t count, float least) {
  lanes found[GROUP] = {};
  const lanes border = all(least);
  for (int64_t j = 0; j < count; j += 16)
    for (int g = 0; g < GROUP; ++g)
      found[g] += load(numbers + j + g * LANES) >= border ? all(1.0f) : all(0.0f);
  for (int g = 1; g < GROUP; ++g) found[0] += found[g];
  return static_cast<int64_t>(sum_of(found[0]));
}

// A number that ``wanted`` of the numbers reach, and with the spare ones at most as many more, unless
// there are equal ones: then it is the largest that so many reach. Their count is a multiple of 16
// and no smaller than ``wanted``, the largest of them is ``top``, and so many reach ``least``.
inline float border_of(const float* numbers, int64_t count, int64_t wanted, int64_t spare,
                       float top, float least = LOWEST) {
  int64_t low = order_of(least), high = static_cast<int64_t>(order_of(top)) + 1;
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t found = count_from(numbers, count, of_order(static_cast<int32_t>(middle)));
    if (found >= wanted) low = middle;
    else high = middle;
    if (found >= wanted && found <= wanted + spare) break;
  }
  return of_order(static_cast<int32_t>(low));
}

// Chooses among scores.
struct Choice {
  int64_t most;
  float *maxima, *value;
  int32_t* place;

  static int64_t floats(int64_t keys) { return 3 * (keys + 64); }

  Choice(int64_t most_keys, int64_t keys, Room& room) : most(most_keys) {
    maxima = room.take(keys + 32), value = room.take(keys + 32);
    place = reinterpret_cast<int32_t*>(room.take(keys + 32));
  }

  // The places of the largest scores, in their order; of equal ones the first are taken, of those
  // below all numbers none, and beside NaN none at all (as `lln.eager.selection.largest`). There is
  // room for scores up to the next multiple of 16. Returns how many.
  int64_t of(float* scores, int64_t number, int64_t* chosen) {
    const int64_t count = (number + 15) / 16 * 16, vectors = count / LANES;
    for (int64_t j = number; j < count; ++j) scores[j] = LOWEST;
    if (!most) return 0;
    // The largest of a few vectors each. As many as are wanted reach the border of these, so no score
    // below it counts.
    int64_t joined = 1;
    while (joined < 16 && number >= joined * 8 * most) joined *= 2;
    lanes top = all(LOWEST), none = {};
    int64_t maxima_count = 0;
    for (int64_t v = 0; v < vectors; v += joined, maxima_count += LANES) {
      lanes own = all(LOWEST);
      for (int64_t n = v; n < fewer(v + joined, vectors); ++n) {
        const lanes score = load(scores + n * LANES);
        own = larger(score, own);
        // Neither infinity is NaN.
        none += score == score ? all(0.0f) : score;
      }
      store(maxima + maxima_count, own);
      top = larger(own, top);
    }
    if (std::isnan(sum_of(none))) return 0;
    for (; maxima_count % 16; ++maxima_count) maxima[maxima_count] = LOWEST;
    const float highest = largest_of(top);
    float least = LOWEST;
    if (maxima_count >= most) least = border_of(maxima, maxima_count, most, most / 4, highest);
    int64_t candidates = 0;
    for (int64_t j = 0; j < count; j += LANES)
      candidates += collect(load(scores + j), all(least), static_cast<int32_t>(j),
                            value + candidates, place + candidates);
    int64_t whole = candidates;
    for (; whole % 16; ++whole) value[whole] = LOWEST;
    least = whole >= most ? border_of(value, whole, most, 0, highest, least) : LOWEST;
    int64_t above = 0, taken = 0;
    for (int64_t j = 0; j < candidates; ++j) above += value[j] > least;
    int64_t equal = most - above;
    for (int64_t j = 0; j < candidates; ++j) {
      if (value[j] == LOWEST || value[j] < least) continue;
      if (value[j] == least && equal-- <= 0) continue;
      chosen[taken++] = place[j];
    }
    return taken;
  }
};

}  // namespace
