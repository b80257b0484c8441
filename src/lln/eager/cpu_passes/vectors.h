// Numbers by the vector: loads, sums, peaks and exponentials.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8, PACKS = 2;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 4, PACKS = 2;
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
inline lanes larger(lanes one, lanes other) { return one > other ? one : other; }

inline float sum_of(lanes value) {
  float total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += value[lane];
  return total;
}

inline float largest_of(lanes value) {
  float found = value[0];
  for (int lane = 1; lane < LANES; ++lane) found = value[lane] > found ? value[lane] : found;
  return found;
}

// 16 numbers at a time: with several registers in flight the processor need not wait for results.
constexpr int GROUP = 16 / LANES;

// eˣ for x ≤ 1, within 2 units in the last place; from e^-87 on it gets no smaller. It is 2ⁿ times
// a Taylor polynomial of the rest, |r| ≤ log(2) / 2, whose next term is 5e-9 of the result.
inline void exponential(lanes (&x)[GROUP]) {
  // Adding it leaves an integer in the last bits.
  constexpr float rounder = 12582912.0f;
  lanes shifted[GROUP], r[GROUP], square[GROUP], low[GROUP], high[GROUP], power[GROUP];
  for (int g = 0; g < GROUP; ++g) {
    // In this order NaN stays NaN.
    x[g] = -87.0f > x[g] ? all(-87.0f) : x[g];
    shifted[g] = x[g] * 1.44269504f + rounder;
  }
  for (int g = 0; g < GROUP; ++g) {
    const lanes whole = shifted[g] - rounder;
    // log(2) in two parts: the first has so few bits that its multiples are exact.
    r[g] = (x[g] - whole * 0.693359375f) + whole * 2.12194440e-4f;
    square[g] = r[g] * r[g];
  }
  for (int g = 0; g < GROUP; ++g) {
    low[g] = square[g] * (r[g] * (1.0f / 6) + 0.5f);
    high[g] = (r[g] * (1.0f / 120) + 1.0f / 24) + square[g] * (r[g] * (1.0f / 5040) + 1.0f / 720);
  }
  for (int g = 0; g < GROUP; ++g)
    power[g] = 1.0f + (r[g] + (low[g] + square[g] * square[g] * high[g]));
  for (int g = 0; g < GROUP; ++g) {
    whole_lanes bits;
    std::memcpy(&bits, &shifted[g], sizeof bits);
    bits = (bits - (0x4B400000 - 127)) << 23;
    lanes scale;
    std::memcpy(&scale, &bits, sizeof scale);
    x[g] = power[g] * scale;
  }
}

// Adds up rows of 16 columns.
inline void add_rows(const float* from, int64_t row, int64_t rows, lanes (&sum)[GROUP]) {
  for (int64_t i = 0; i < rows; ++i)
    for (int g = 0; g < GROUP; ++g) sum[g] += load(from + i * row + g * LANES);
}

// The largest entries of 16 columns.
inline void find_peaks(const float* from, int64_t row, int64_t rows, lanes (&top)[GROUP]) {
  for (int g = 0; g < GROUP; ++g) top[g] = load(from + g * LANES);
  for (int64_t i = 1; i < rows; ++i)
    for (int g = 0; g < GROUP; ++g) top[g] = larger(load(from + i * row + g * LANES), top[g]);
}

}  // namespace
