// Attention with exact keys (`lln.eager.key_attention`): one softmax over the keys of a query's block,
// those that its group has chosen, and the slots of the summary,
//
//     logits_i = [ αq_if + (L_f - βμ_f) + g + log ρ     slots f = 1 … D
//                | q_i·(k_j - μ) · scale                keys j of the block, then those chosen ]
//
// which are the logits of the formula less q_i·μ · scale: softmax does not change when the same is
// taken off all of them. Keys that are not seen are left out before anything else is done.
#pragma once

#include <algorithm>
#include <limits>
#include "bidirectional.h"

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
  whole_lanes found[GROUP] = {};
  const lanes border = all(least);
  for (int64_t j = 0; j < count; j += 16)
    for (int g = 0; g < GROUP; ++g) found[g] -= load(numbers + j + g * LANES) >= border;
  int64_t total = 0;
  for (int g = 0; g < GROUP; ++g)
    for (int lane = 0; lane < LANES; ++lane) total += found[g][lane];
  return total;
}

// A number that ``wanted`` of the numbers reach, and with the spare ones at most as many more, unless
// there are equal ones: then it is the largest that so many reach. Their count is a multiple of 16
// and no smaller than ``wanted``, the largest of them is ``top``.
inline float border_of(const float* numbers, int64_t count, int64_t wanted, int64_t spare,
                       float top) {
  int64_t low = order_of(LOWEST), high = static_cast<int64_t>(order_of(top)) + 1;
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
    least = whole >= most ? border_of(value, whole, most, 0, highest) : LOWEST;
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

// A number with fewer bits, rounded as a conversion to a shorter type does.
inline float rounded(float number, int64_t dropped) {
  if (!dropped || number != number) return number;
  // Below its normal range a half has steps of 2^-24, as floats have from 1/2 to 1.
  if (dropped == 13 && std::fabs(number) < 0x1p-14f) {
    volatile float shifted = number + 0.75f;
    return shifted - 0.75f;
  }
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  bits &= ~((1u << dropped) - 1);
  std::memcpy(&number, &bits, sizeof number);
  return number;
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

// One head, whose groups of queries choose keys and attend.
struct KeyHead {
  // Groups that choose together, and rows whose weights are in the cache.
  static constexpr int64_t CHOOSERS = 12, ROWS_AT_ONCE = 36;

  const Head& whole;
  const SeenKeys& seen;
  const Call& call;
  Head head;
  int64_t width, values;
  // k, one column per key, as many columns together as a product takes; the mean key; the queries' means, their scores and the choice.
  float *across, *mean, *mean_queries, *scores;
  int64_t* chosen;
  // With a mask how many seen keys lie before each token, and which tokens are seen.
  int64_t *ranks = nullptr, *tokens = nullptr;
  bool has_slots = false;
  // L - βμ + g of the slots and the same with log ρ; keys and values of a group's columns, of which the
  // slots' come first; its keys again, one column per key; weights and what they are divided by.
  float *base, *level, *keys, *value_rows, *turned, *weight, *sums;
  Choice choice;

  // Keys that are scored together: rows as far apart as all keys would share places in the cache.
  static constexpr int64_t PANEL = PACKS * LANES;

  static int64_t score_row(const Call& call) { return (call.keys + PANEL - 1) / PANEL * PANEL + 16; }

  // Of one group: the keys of its block, those chosen, and some more for the last columns.
  static int64_t exact_columns(const Call& call) {
    return (fewer(call.block, call.keys) + call.chosen + 31) / 16 * 16;
  }

  static int64_t floats(const Call& call) {
    const int64_t width = call.width, values = call.value_width;
    const int64_t columns = exact_columns(call), row = score_row(call);
    return row * (width + CHOOSERS) + (4 + CHOOSERS) * width + 2 * call.chosen +
           columns * (2 * width + values) + width * values +
           ROWS_AT_ONCE * (columns + width + 1) + TILE * width + Choice::floats(row) +
           (call.mask ? 4 * call.keys : 0) + 512;
  }

  KeyHead(const Head& of, const SeenKeys& keys_seen, Room& room)
      : whole(of),
        seen(keys_seen),
        call(of.call),
        head(keys_seen.of(of)),
        width(call.width),
        values(call.value_width),
        across(room.take(score_row(call) * width)),
        mean(room.take(width)),
        mean_queries(room.take(CHOOSERS * width)),
        scores(room.take(CHOOSERS * score_row(call))),
        chosen(reinterpret_cast<int64_t*>(room.take(2 * call.chosen))),
        base(room.take(width)),
        level(room.take(width)),
        keys(room.take(exact_columns(call) * width)),
        value_rows(room.take((exact_columns(call) + width) * values)),
        turned(room.take(exact_columns(call) * width)),
        weight(room.take(ROWS_AT_ONCE * (exact_columns(call) + width) + TILE * width)),
        sums(room.take(ROWS_AT_ONCE)),
        choice(fewer(call.chosen, call.keys), score_row(call), room) {
    if (!whole.mask) return;
    ranks = reinterpret_cast<int64_t*>(room.take(2 * (call.keys + 1)));
    tokens = reinterpret_cast<int64_t*>(room.take(2 * call.keys));
    ranks[0] = 0;
    for (int64_t t = 0; t < call.keys; ++t) {
      ranks[t + 1] = ranks[t] + (whole.mask[t] != 0);
      if (whole.mask[t]) tokens[ranks[t]] = t;
    }
  }

  int64_t number() const { return head.call.keys; }

  // Seen keys are counted by places; others are tokens.
  int64_t places_before(int64_t token) const { return ranks ? ranks[token] : token; }
  int64_t token_at(int64_t place) const { return tokens ? tokens[place] : place; }

  // What all groups need.
  void prepare(bool attends) {
    if (choice.most && !call.is_given) {
      const int64_t whole_keys = (number() + 15) / 16 * 16;
      std::memset(seen.k + number() * width, 0, 4 * (whole_keys - number()) * width);
      for (int64_t j = 0; j < whole_keys; j += PANEL)
        transpose(fewer(PANEL, whole_keys - j), width, seen.k + j * width, width,
                  across + j * width);
    }
    if (!attends) return;
    std::memset(mean, 0, 4 * width);
    for (int64_t t = 0; t < number(); t += TILE)
      add_tile_sums(fewer(TILE, number() - t), width, seen.k + t * width, mean);
    for (int64_t d = 0; d < width; ++d) mean[d] /= static_cast<float>(number());
  }

  // What those need that have slots.
  void find_slots(float offset) {
    summarise(head, weight);
    for (int64_t d = 0; d < width; ++d)
      base[d] = d < call.channels
                    ? head.beta * (head.peak[d] - mean[d]) + std::log(head.mass[d]) + offset
                    : NEVER;
    std::memcpy(value_rows, head.centroid, 4 * width * values);
    has_slots = true;
  }

  // The mean of the queries that count among start … end.
  void find_mean_query(int64_t start, int64_t end, float* to) const {
    int64_t counted = 0;
    std::memset(to, 0, 4 * width);
    for (int64_t t = start; t < end; ++t) {
      if (whole.mask && !whole.mask[t]) continue;
      ++counted;
      const float* q = whole.q + t * whole.q_row;
      fetch_row(q + AHEAD * whole.q_row, width);
      for (int64_t d = 0; d < width; d += LANES) store(to + d, load(to + d) + load(q + d));
    }
    const float sign = call.scale < 0 ? -1.0f : 1.0f;
    for (int64_t d = 0; d < width; ++d)
      to[d] = sign * rounded(to[d] / static_cast<float>(larger_of(counted, 1)), call.dropped_bits);
  }

  // Copies rows of keys, less their mean, and of values behind those that are there.
  template <class Place>
  void gather(int64_t behind, int64_t rows, const Place& place) const {
    for (int64_t i = 0; i < rows; ++i) {
      const float *k = seen.k + place(i) * width, *v = seen.v + place(i) * values;
      float *to_k = keys + (behind + i) * width, *to_v = value_rows + (width + behind + i) * values;
      for (int64_t d = 0; d < width; d += LANES) store(to_k + d, load(k + d) - load(mean + d));
      for (int64_t e = 0; e < values; e += LANES) store(to_v + e, load(v + e));
    }
  }

  // The gathered keys from the first on, up to the next multiple of 16, one column per key.
  void turn(int64_t first, int64_t count) const {
    const int64_t end = (count + 15) / 16 * 16, row = exact_columns(call);
    std::memset(keys + count * width, 0, 4 * (end - count) * width);
    for (int64_t j = first / 16 * 16; j < end; j += LANES)
      for (int64_t d = 0; d < width; d += LANES)
        transpose_square(keys + j * width + d, width, turned + d * row + j, row);
  }

  // The rows start … end of a group that meets so many slots and exact keys, into out.
  void attend(int64_t start, int64_t end, int64_t slots, int64_t count, float* out,
              int64_t out_row) const {
    const int64_t columns = (count + 15) / 16 * 16, row = slots + columns;
    for (int64_t t = start; t < end; t += ROWS_AT_ONCE) {
      const int64_t rows = fewer(ROWS_AT_ONCE, end - t);
      const float* q = whole.q + t * whole.q_row;
      // What the next rows are read from, and these are written to, comes in the meantime.
      for (int64_t i = 0; i < rows; ++i) {
        fetch_row(q + (ROWS_AT_ONCE + i) * whole.q_row, width);
        fetch_row(out + (t + i) * out_row, values);
      }
      product(rows, columns, width, {q, whole.q_row, 1}, turned, exact_columns(call), weight + slots,
              row, call.scale, false);
      for (int64_t i = 0; i < rows; ++i) {
        float* own = weight + i * row;
        for (int64_t d = 0; d < slots; d += LANES) {
          const lanes of_query = load(q + i * whole.q_row + d);
          store(own + d, of_query * head.alpha + load(level + d) + unless_finite(of_query));
        }
        for (int64_t j = slots + count; j < row; ++j) own[j] = NEVER;
      }
      raise(rows, row, weight, sums);
      product(rows, values, slots + count, {weight, row, 1}, value_rows + (width - slots) * values,
              values, out + t * out_row, out_row, 1.0f, false);
      for (int64_t i = 0; i < rows; ++i) {
        const lanes share = all(1.0f / sums[i]);
        float* own = out + (t + i) * out_row;
        for (int64_t e = 0; e < values; e += LANES) store(own + e, load(own + e) * share);
      }
    }
  }

  // The places that a caller has chosen for a group; what is not seen counts as none.
  int64_t read_given(const int64_t* given, int64_t* to) const {
    int64_t found = 0;
    for (int64_t n = 0; n < call.chosen; ++n) {
      const int64_t token = given[n];
      if (token < 0 || token >= call.keys || (whole.mask && !whole.mask[token])) continue;
      to[found++] = places_before(token);
    }
    return found;
  }

  // Some groups of all, ``[G, K]``: they choose, or take what is given, and attend if there is an out.
  void run(int64_t first_group, int64_t groups, float offset, int64_t* indices, float* out,
           int64_t out_row) {
    const int64_t begin = first_block(whole), in_block = call.block / call.group;
    const int64_t row = score_row(call);
    const auto inside = [&](int64_t token) { return fewer(larger_of(token, 0), call.queries); };
    if (!number()) {
      const int64_t end = inside(begin + groups * call.group);
      for (int64_t t = inside(begin + first_group * call.group); out && t < end; ++t)
        std::memset(out + t * out_row, 0, 4 * values);
      for (int64_t k = first_group * call.chosen; indices && k < groups * call.chosen; ++k)
        indices[k] = -1;
      return;
    }
    prepare(out != nullptr);
    bool has_block = false;
    int64_t gathered_block = 0;
    for (int64_t first = first_group; first < groups; first += CHOOSERS) {
      const int64_t together = fewer(CHOOSERS, groups - first);
      if (!call.is_given && choice.most) {
        for (int64_t n = 0; n < together; ++n) {
          const int64_t start = begin + (first + n) * call.group;
          find_mean_query(inside(start), inside(start + call.group), mean_queries + n * width);
        }
        for (int64_t j = 0; j < number(); j += PANEL) {
          const int64_t columns = fewer(PANEL, (number() + 15) / 16 * 16 - j);
          product(together, columns, width, {mean_queries, width, 1}, across + j * width, columns,
                  scores + j, row, 1.0f, false);
        }
      }
      for (int64_t n = 0; n < together; ++n) {
        const int64_t group = first + n, block = begin + group / in_block * call.block;
        const int64_t own = places_before(inside(block));
        const int64_t own_count = places_before(inside(block + call.block)) - own;
        int64_t* own_chosen = chosen;
        int64_t far = 0;
        if (call.is_given) {
          far = read_given(indices + group * call.chosen, own_chosen);
        } else if (choice.most) {
          float* score = scores + n * row;
          for (int64_t j = own; j < own + own_count; ++j) score[j] = LOWEST;
          far = choice.of(score, number(), own_chosen);
        }
        if (indices && !call.is_given)
          for (int64_t k = 0; k < call.chosen; ++k)
            indices[group * call.chosen + k] = k < far ? token_at(own_chosen[k]) : -1;
        const int64_t start = inside(begin + group * call.group);
        const int64_t end = inside(begin + (group + 1) * call.group);
        if (!out || start >= end) continue;
        if (!has_block || block != gathered_block) {
          gather(0, own_count, [&](int64_t i) { return own + i; });
          turn(0, own_count);
        }
        has_block = true, gathered_block = block;
        gather(own_count, far, [&](int64_t i) { return own_chosen[i]; });
        turn(own_count, own_count + far);
        const int64_t left = number() - own_count - far;
        if (left > 0) {
          if (!has_slots) find_slots(offset);
          const float share = static_cast<float>(left) / static_cast<float>(number());
          for (int64_t d = 0; d < width; ++d) level[d] = base[d] + std::log(share);
        }
        // Where all keys are exact, slots would weigh nothing.
        attend(start, end, left > 0 ? width : 0, own_count + far, out, out_row);
      }
    }
  }
};

}  // namespace
