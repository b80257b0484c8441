// Numbers by the vector: loads, sums, peaks and exponentials.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Numbers per vector; rows and vectors per row that a product works on at a time.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 6, PACKS = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6, PACKS = 2;
#else
constexpr int LANES = 4, ROWS = 4, PACKS = 4;
#endif
// Tokens that are worked on at a time.
constexpr int64_t TILE = 64;
// Stands for log 0.
constexpr float NEVER = -1e30f;

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));
typedef float loose_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline lanes load(const float* from) { return *reinterpret_cast<const loose_lanes*>(from); }
inline void store(float* to, lanes value) { *reinterpret_cast<loose_lanes*>(to) = value; }
inline lanes all(float number) { return lanes{} + number; }

// While it lives, numbers below the normal range are 0 in this thread: products with them take a
// hundred times as long on x86, and hidden keys weigh e^-87 before they are divided by a sum.
struct WithoutTinyNumbers {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  WithoutTinyNumbers() { _mm_setcsr(before | 0x8040); }
  ~WithoutTinyNumbers() { _mm_setcsr(before); }
#else
  // Others take no longer.
  WithoutTinyNumbers() {}
#endif
};

// one > other ? one : other, and the opposite; the other where one of them is NaN.
#if defined(__AVX512F__)
inline lanes larger(lanes one, lanes other) { return _mm512_max_ps(one, other); }
inline lanes lesser(lanes one, lanes other) { return _mm512_min_ps(one, other); }
#elif defined(__AVX2__)
inline lanes larger(lanes one, lanes other) { return _mm256_max_ps(one, other); }
inline lanes lesser(lanes one, lanes other) { return _mm256_min_ps(one, other); }
#else
inline lanes larger(lanes one, lanes other) { return one > other ? one : other; }
inline lanes lesser(lanes one, lanes other) { return one < other ? one : other; }
#endif

// Rows this far ahead are asked for where they do not lie one behind the other in memory.
constexpr int64_t AHEAD = 12;

// Copies a row of a multiple of 16 numbers.
inline void copy_row(const float* from, int64_t width, float* to) {
  for (int64_t d = 0; d < width; d += LANES) store(to + d, load(from + d));
}

// Asks for a row.
inline void fetch_row(const float* from, int64_t width) {
  for (int64_t d = 0; d < width; d += 16) __builtin_prefetch(from + d);
}

// Writes the numbers that reach a border one behind the other, and their places, of which the first is
// given; how many there are.
inline int64_t collect(lanes number, lanes border, int32_t first, float* to, int32_t* places) {
#if defined(__AVX512F__)
  const __mmask16 found = _mm512_cmp_ps_mask(number, border, _CMP_GE_OQ);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_mask_compressstoreu_ps(to, found, number);
  _mm512_mask_compressstoreu_epi32(places, found, _mm512_add_epi32(lane, _mm512_set1_epi32(first)));
  return __builtin_popcount(found);
#else
  int64_t count = 0;
#if defined(__AVX2__)
  if (!_mm256_movemask_ps(_mm256_cmp_ps(number, border, _CMP_GE_OQ))) return 0;
#endif
  for (int lane = 0; lane < LANES; ++lane) {
    to[count] = number[lane], places[count] = first + lane;
    count += number[lane] >= border[lane];
  }
  return count;
#endif
}

// NaN where a number is NaN or infinite, else 0: e^−∞ = 0 would hide −∞.
inline lanes unless_finite(lanes number) { return number - number; }

// The numbers at the given places of two vectors, of which the second one's come after the first's.
template <int... PLACES>
inline lanes pick(lanes one, lanes other, std::integer_sequence<int, PLACES...>) {
#if defined(__clang__)
  return __builtin_shufflevector(one, other, PLACES...);
#else
  return __builtin_shuffle(one, other, whole_lanes{PLACES...});
#endif
}

// The lanes with those that are as far away as the step exchanged.
template <int STEP, int... LANE>
inline lanes exchange(lanes value, std::integer_sequence<int, LANE...>) {
  return pick(value, value, std::integer_sequence<int, (LANE ^ STEP)...>{});
}

using AllLanes = std::make_integer_sequence<int, LANES>;

// Sum and largest entry. Halves are joined until one number is left: the processor would wait for
// each of a row of additions.
template <int STEP = LANES / 2>
inline float sum_of(lanes value) {
  value += exchange<STEP>(value, AllLanes{});
  if constexpr (STEP > 1) return sum_of<STEP / 2>(value);
  return value[0];
}

template <int STEP = LANES / 2>
inline float largest_of(lanes value) {
  value = larger(value, exchange<STEP>(value, AllLanes{}));
  if constexpr (STEP > 1) return largest_of<STEP / 2>(value);
  return value[0];
}

// Both vectors' first halves, one number from each in turn, and both second halves.
template <int... LANE>
inline void interleave(lanes& one, lanes& other, std::integer_sequence<int, LANE...>) {
  const lanes low = pick(
      one, other, std::integer_sequence<int, (LANE / 2 + (LANE % 2) * LANES)...>{});
  other = pick(
      one, other, std::integer_sequence<int, (LANE / 2 + LANES / 2 + (LANE % 2) * LANES)...>{});
  one = low;
}

// 16 numbers at a time: with several registers in flight the processor need not wait for results.
constexpr int GROUP = 16 / LANES;

// eˣ for x ≤ 1, within 2 units in the last place; from e^-87 on it gets no smaller. It is 2ⁿ times
// a polynomial of the rest, |r| ≤ log(2) / 2, which is 1.1e-8 of the result off at most.
inline void exponential(lanes (&x)[GROUP]) {
  // Adding it leaves n in the last bits, and 127 with it, which stands for 2⁰ in an exponent.
  constexpr float rounder = 12582912.0f + 127.0f;
  constexpr float terms[] = {1.3926184e-3f, 8.3631789e-3f, 4.1666556e-2f, 1.6666576e-1f, 0.5f, 1, 1};
  lanes shifted[GROUP], r[GROUP], power[GROUP];
  for (int g = 0; g < GROUP; ++g) {
    // NaN stays NaN.
    x[g] = larger(all(-87.0f), x[g]);
    shifted[g] = x[g] * 1.44269504f + rounder;
  }
  for (int g = 0; g < GROUP; ++g) {
    const lanes whole = shifted[g] - rounder;
    // log(2) in two parts: the first has so few bits that its multiples are exact.
    r[g] = (x[g] - whole * 0.693359375f) + whole * 2.12194440e-4f;
    power[g] = all(terms[0]);
  }
  for (int term = 1; term < 7; ++term)
    for (int g = 0; g < GROUP; ++g) power[g] = power[g] * r[g] + terms[term];
  for (int g = 0; g < GROUP; ++g) {
    whole_lanes bits;
    std::memcpy(&bits, &shifted[g], sizeof bits);
    bits <<= 23;
    lanes scale;
    std::memcpy(&scale, &bits, sizeof scale);
    x[g] = power[g] * scale;
  }
}

// Columns are worked on by the strip, as wide as registers allow: rows are then read as they lie in
// memory. ``work(strip, d)`` gets the number of its vectors as a type, and its first column.
constexpr int WIDEST = LANES < 8 ? 8 : 64 / LANES;

template <int VECTORS = WIDEST, class Work>
inline void by_strips(int64_t width, const Work& work, int64_t d = 0) {
  for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
    work(std::integral_constant<int, VECTORS>{}, d);
  if constexpr (VECTORS > GROUP) by_strips<VECTORS / 2>(width, work, d);
}

// Goes over the rows of a strip: result = step(result, numbers of the row, which vector). Of few
// vectors several rows have results of their own, which are joined at the end: each step waits for
// the one before.
template <int VECTORS, class Step, class Join>
inline void over_rows(const float* from, int64_t row, int64_t rows, lanes (&result)[VECTORS],
                      const Step& step, const Join& join) {
  constexpr int PARTS = VECTORS < 4 ? 4 / VECTORS : 1;
  lanes part[PARTS][VECTORS];
  for (int p = 0; p < PARTS; ++p)
    for (int n = 0; n < VECTORS; ++n) part[p][n] = result[n];
  int64_t i = 0;
  for (; i + PARTS <= rows; i += PARTS)
    for (int p = 0; p < PARTS; ++p)
      for (int n = 0; n < VECTORS; ++n)
        part[p][n] = step(part[p][n], load(from + (i + p) * row + n * LANES), n);
  for (; i < rows; ++i)
    for (int n = 0; n < VECTORS; ++n)
      part[0][n] = step(part[0][n], load(from + i * row + n * LANES), n);
  for (int n = 0; n < VECTORS; ++n) {
    result[n] = part[0][n];
    for (int p = 1; p < PARTS; ++p) result[n] = join(result[n], part[p][n]);
  }
}

inline lanes plus(lanes one, lanes other) { return one + other; }

// The sums of a strip's columns.
template <int VECTORS>
inline void add_rows(const float* from, int64_t row, int64_t rows, lanes (&sum)[VECTORS]) {
  for (int n = 0; n < VECTORS; ++n) sum[n] = all(0.0f);
  over_rows(from, row, rows, sum, [](lanes so_far, lanes own, int) { return so_far + own; }, plus);
}

// The sums of their squares around a centre.
template <int VECTORS>
inline void add_squares(const float* from, int64_t row, int64_t rows,
                        const lanes (&centre)[VECTORS], lanes (&sum)[VECTORS]) {
  for (int n = 0; n < VECTORS; ++n) sum[n] = all(0.0f);
  const auto step = [&](lanes so_far, lanes own, int n) {
    const lanes away = own - centre[n];
    return so_far + away * away;
  };
  over_rows(from, row, rows, sum, step, plus);
}

// Their largest entries.
template <int VECTORS>
inline void find_peaks(const float* from, int64_t row, int64_t rows, lanes (&top)[VECTORS]) {
  for (int n = 0; n < VECTORS; ++n) top[n] = load(from + n * LANES);
  over_rows(from, row, rows, top, [](lanes so_far, lanes own, int) { return larger(own, so_far); },
            larger);
}

}  // namespace
