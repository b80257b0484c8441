// Attention with exact keys (`lln.eager.key_attention`): one softmax over the keys of a query's block,
// those that its group has chosen, and the slots of the summary,
//
//     logits_i = [ αq_if + (L_f - βμ_f) + g + log ρ     slots f = 1 … D
//                | q_i·(k_j - μ) · scale                keys j of the block, then those chosen ]
//
// which are the logits of the formula less q_i·μ · scale: softmax does not change when the same is
// taken off all of them. Keys that are not seen are left out before anything else is done.
//
// Backward, weights are computed again, group by group, from the keys that were chosen. With dz the
// gradient of the logits
//
//     dq = dz (k − μ) · scale + α dz_f    dL_f = Σ_i dz_if    dμ = Σ_i q_i Σ_f dz_if · scale − β dL
//
// and those of the slots go back through the summary.
#pragma once

#include "bidirectional.h"
#include "choice.h"

namespace {

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

// What the backward pass of one head needs, and what it has found so far.
struct KeyGradients {
  // Those of keys and values are of the seen ones, and are added to.
  Gradients to;
  // The gathered values with those of the slots, one column per key; the gradients of logits, of the
  // chosen keys and values, of C, of the slots' logits and of μ.
  float *turned, *of_scores, *of_keys, *of_values, *of_centroid, *of_level, *of_mean;
  double of_alpha = 0;

  // Of one group: the keys of its block, those chosen, and some more for the last columns.
  static int64_t exact_columns(const Call& call) {
    return (fewer(call.block, call.keys) + call.chosen + 31) / 16 * 16;
  }

  static int64_t columns(const Call& call) { return exact_columns(call) + call.width; }

  static int64_t floats(const Call& call) {
    const int64_t width = call.width, values = call.value_width;
    return columns(call) * (values + TILE) + call.chosen * (width + values) +
           width * (2 * values + 2 + 2 * TILE) + 256;
  }

  KeyGradients(const Gradients& where, const Call& call, Room& room)
      : to(where),
        turned(room.take(columns(call) * call.value_width)),
        of_scores(room.take(columns(call) * TILE)),
        of_keys(room.take(call.chosen * call.width)),
        of_values(room.take(call.chosen * call.value_width)),
        of_centroid(room.take(call.width * call.value_width)),
        of_level(room.take(call.width)),
        of_mean(room.take(call.width)) {
    std::memset(of_centroid, 0, 4 * call.width * call.value_width);
    std::memset(of_level, 0, 4 * call.width);
    std::memset(of_mean, 0, 4 * call.width);
  }
};

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
  // Null in the forward pass.
  KeyGradients* gradients = nullptr;
  // L - βμ + g of the slots and the same with log ρ; keys and values of a group's columns, of which the
  // slots' come first; its keys again, one column per key; weights and what they are divided by.
  float *base, *level, *keys, *value_rows, *turned, *weight, *sums;
  Choice choice;

  // Keys that are scored together: rows as far apart as all keys would share places in the cache.
  static constexpr int64_t PANEL = PACKS * LANES;

  static int64_t score_row(const Call& call) { return (call.keys + PANEL - 1) / PANEL * PANEL + 16; }

  static int64_t exact_columns(const Call& call) { return KeyGradients::exact_columns(call); }

  static int64_t floats(const Call& call) {
    const int64_t width = call.width, values = call.value_width;
    const int64_t columns = exact_columns(call), row = score_row(call);
    return row * (width + CHOOSERS) + (4 + CHOOSERS) * width + 2 * call.chosen +
           columns * (2 * width + values) + width * values +
           TILE * (columns + 2 * width) + ROWS_AT_ONCE + Choice::floats(row) +
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
        weight(room.take(TILE * (exact_columns(call) + width))),
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
    if (gradients) turn_values(0, width);
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
    if (!gradients) return;
    std::memset(value_rows + (width + count) * values, 0, 4 * (end - count) * values);
    turn_values(width + first / 16 * 16, width + end);
  }

  // The same for values, of which the slots' come first.
  void turn_values(int64_t first, int64_t end) const {
    const int64_t row = KeyGradients::columns(call);
    for (int64_t j = first; j < end; j += LANES)
      for (int64_t e = 0; e < values; e += LANES)
        transpose_square(value_rows + j * values + e, values, gradients->turned + e * row + j, row);
  }

  // The logits of some rows, of so many slots and exact keys.
  void find_logits(const float* q, int64_t rows, int64_t slots, int64_t count) const {
    const int64_t columns = (count + 15) / 16 * 16, row = slots + columns;
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
  }

  // The rows start … end of a group that meets so many slots and exact keys, into out.
  void attend(int64_t start, int64_t end, int64_t slots, int64_t count, float* out,
              int64_t out_row) const {
    const int64_t row = slots + (count + 15) / 16 * 16;
    for (int64_t t = start; t < end; t += ROWS_AT_ONCE) {
      const int64_t rows = fewer(ROWS_AT_ONCE, end - t);
      const float* q = whole.q + t * whole.q_row;
      // What the next rows are read from, and these are written to, comes in the meantime.
      for (int64_t i = 0; i < rows; ++i) {
        fetch_row(q + (ROWS_AT_ONCE + i) * whole.q_row, width);
        fetch_row(out + (t + i) * out_row, values);
      }
      find_logits(q, rows, slots, count);
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

  // The gradients that come from the rows start … end of a group, which meets so many slots, the keys
  // of its block from a place on, and those chosen.
  void differentiate(int64_t start, int64_t end, int64_t slots, int64_t own, int64_t own_count,
                     int64_t far) {
    KeyGradients& found = *gradients;
    const Gradients& to = found.to;
    const int64_t count = own_count + far, row = slots + (count + 15) / 16 * 16;
    std::memset(found.of_keys, 0, 4 * far * width);
    std::memset(found.of_values, 0, 4 * far * values);
    for (int64_t t = start; t < end; t += TILE) {
      const int64_t rows = fewer(TILE, end - t);
      const float *q = whole.q + t * whole.q_row, *g = to.g + t * to.g_row;
      float *to_query = to.to_query + t * width, *of_exact = found.of_scores + slots;
      find_logits(q, rows, slots, count);
      softmax(rows, row, weight);
      product(rows, row, values, {g, to.g_row, 1}, found.turned + width - slots,
              KeyGradients::columns(call), found.of_scores, row, 1.0f, false);
      softmax_gradient(rows, row, weight, found.of_scores);
      product(rows, width, count, {of_exact, row, 1}, keys, width, to_query, width, call.scale, false);
      const auto add = [&](int64_t first, int64_t some, float* to_keys, float* to_values) {
        product(some, width, rows, {of_exact + first, 1, row}, q, whole.q_row, to_keys, width,
                call.scale, true);
        product(some, values, rows, {weight + slots + first, 1, row}, g, to.g_row, to_values, values,
                1.0f, true);
      };
      add(0, own_count, to.to_key + own * width, to.to_value + own * values);
      add(own_count, far, found.of_keys, found.of_values);
      if (!slots) continue;
      product(width, values, rows, {weight, 1, row}, g, to.g_row, found.of_centroid, values, 1.0f,
              true);
      add_tile_sums(rows, width, found.of_scores, found.of_level, row);
      float by_slots[TILE];
      lanes of_alpha = {};
      for (int64_t i = 0; i < rows; ++i) {
        lanes total = {};
        for (int64_t d = 0; d < width; d += LANES) {
          const lanes own_slot = load(found.of_scores + i * row + d);
          float* of_query = to_query + i * width + d;
          store(of_query, load(of_query) + own_slot * head.alpha);
          of_alpha += own_slot * load(q + i * whole.q_row + d);
          total += own_slot;
        }
        by_slots[i] = sum_of(total);
      }
      product(1, width, rows, {by_slots, 0, 1}, q, whole.q_row, found.of_mean, width, call.scale,
              true);
      found.of_alpha += sum_of(of_alpha);
    }
    add_rows_at(chosen, far, width, found.of_keys, to.to_key);
    add_rows_at(chosen, far, values, found.of_values, to.to_value);
  }

  // After all groups: what comes through the summary, and the gradients of α, β and the offset.
  void differentiate_slots(Room& room, float* of_alpha, float* of_beta, float* of_offset) {
    KeyGradients& found = *gradients;
    *of_alpha = static_cast<float>(found.of_alpha), *of_beta = *of_offset = 0;
    if (!has_slots) return;
    double total = 0;
    for (int64_t d = 0; d < width; ++d) {
      total += found.of_level[d];
      found.of_mean[d] -= head.beta * found.of_level[d];
      found.of_mean[d] /= static_cast<float>(number());
    }
    *of_offset = static_cast<float>(total);
    *of_beta = static_cast<float>(differentiate_summary(head, found.to, found.of_centroid,
                                                        found.of_level, room, mean, found.of_mean));
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

  // Some groups of all, ``[G, K]``: they choose, or take what is given, and attend if there is an out,
  // or find gradients.
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
    prepare(out || gradients);
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
        if (!(out || gradients) || start >= end) continue;
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
        const int64_t slots = left > 0 ? width : 0;
        if (gradients) differentiate(start, end, slots, own, own_count, far);
        else attend(start, end, slots, own_count + far, out, out_row);
      }
    }
  }
};

}  // namespace
