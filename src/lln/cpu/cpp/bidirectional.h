// LLN attention, blocks of softmax, or both. With e the weights of the keys and m the masses of the
// slots,
//
//     e = exp(β(k − peak))   m = Σ_j e_j       C = eᵀv / m        L = β peak + log m
//     w = softmax(αq + L)    out = w C
//
// and with g the gradient of the output
//
//     dw = g Cᵀ      dC = wᵀ g      dz = w ∘ (dw − rowsum(w ∘ dw))      dq = α dz
//     dv = e (dC / m)               dk = β e ∘ (v (dC / m)ᵀ + (Σ_i dz_i − rowsum(C ∘ dC)) / m)
//
// The summary of a head, ``[D, E + 2]``, holds C, the peaks and the masses.
#pragma once

#include <cmath>
#include "call.h"
#include "tiles.h"

namespace {

// The keys of a head that are seen, one behind the other, and their number: everything else works on
// them as on all keys, so that what masked tokens hold is never read. There is room for a multiple of
// 16.
struct SeenKeys {
  Call call;
  float *k, *v;

  static int64_t floats(const Call& call) {
    return (call.keys + 15) / 16 * 16 * (call.width + call.value_width);
  }

  SeenKeys(const Head& head, Room& room) : call(head.call) {
    const int64_t all_keys = call.keys, places = (all_keys + 15) / 16 * 16;
    room.used = 0;
    k = room.take(places * call.width);
    v = room.take(places * call.value_width);
    call.keys = 0;
    for (int64_t t = 0; t < all_keys; ++t) {
      fetch_row(head.k + (t + AHEAD) * head.k_row, call.width);
      fetch_row(head.v + (t + AHEAD) * head.v_row, call.value_width);
      if (head.mask && !head.mask[t]) continue;
      copy_row(head.k + t * head.k_row, call.width, k + call.keys * call.width);
      copy_row(head.v + t * head.v_row, call.value_width, v + call.keys * call.value_width);
      ++call.keys;
    }
  }

  Head of(const Head& head) const {
    return {call,       head.alpha, head.beta,        head.q,        k,         v,
            head.q_row, call.width, call.value_width, head.centroid, head.peak, head.mass,
            nullptr};
  }

  // Rows of the keys that are seen to their places; 0 for the others.
  static void spread(const Head& head, int64_t width, const float* rows, float* to) {
    for (int64_t t = 0; t < head.call.keys; ++t, to += width) {
      if (head.mask[t]) {
        std::memcpy(to, rows, 4 * width);
        rows += width;
      } else {
        std::memset(to, 0, 4 * width);
      }
    }
  }
};

// C = eᵀv / m and the peaks and masses of the slots.
void summarise(const Head& head, float* weight) {
  const Call& call = head.call;
  const int64_t width = call.width, values = call.value_width;
  for (int64_t t = 0; t < call.keys; t += TILE)
    by_strips(width, [&](auto vectors, int64_t d) {
      lanes top[vectors];
      find_peaks(head.k + t * head.k_row + d, head.k_row, fewer(TILE, call.keys - t), top);
      for (int n = 0; n < vectors; ++n) {
        float* to = head.peak + d + n * LANES;
        store(to, t > 0 ? larger(top[n], load(to)) : top[n]);
      }
    });
  std::memset(head.centroid, 0, sizeof(float) * width * values);
  std::memset(head.mass, 0, sizeof(float) * width);
  for (int64_t t = 0; t < call.keys; t += TILE) {
    const int64_t tokens = fewer(TILE, call.keys - t);
    weigh_keys(tokens, width, head.k + t * head.k_row, head.k_row, head.beta, head.peak, weight);
    add_tile_sums(tokens, width, weight, head.mass);
    product(width, values, tokens, {weight, 1, width}, head.v + t * head.v_row, head.v_row,
            head.centroid, values, 1.0f, true);
  }
  for (int64_t d = 0; d < width; ++d) {
    const lanes share = all(1.0f / head.mass[d]);
    float* row = head.centroid + d * values;
    for (int64_t e = 0; e < values; e += LANES) store(row + e, load(row + e) * share);
  }
}

// L = β peak + log m; channels that are not the caller's weigh nothing.
void find_levels(const Head& head, float* level) {
  for (int64_t d = 0; d < head.call.channels; ++d)
    level[d] = head.beta * head.peak[d] + std::log(head.mass[d]);
  for (int64_t d = head.call.channels; d < head.call.width; ++d) level[d] = NEVER;
}

// The keys and values that the queries of one block meet: those of the block, or of their windows.
// Whole groups without a mask are used where they lie; of others the keys that are seen are gathered,
// and columns of scores are added to make whole groups.
struct Block {
  // Its queries are start … end, its keys come from first_key on; their number, and that of the
  // columns of its scores.
  int64_t start, end, first_key, count, columns;
  const float *k, *v;
  int64_t k_row, v_row;
  bool is_gathered;
  // The places of the keys, where they are gathered.
  int64_t* places;

  static int64_t floats(const Call& call) {
    return most_columns(call) * (call.width + call.value_width + 2);
  }

  Block(const Head& head, int64_t begin, float* room) {
    const Call& call = head.call;
    start = larger_of(begin, 0), end = fewer(begin + call.block, call.queries);
    const int64_t before = larger_of(call.window, 0), behind = call.is_causal ? 0 : before;
    first_key = larger_of(start - before, 0);
    const int64_t end_key = fewer(end + behind, call.keys);
    is_gathered = head.mask || (end_key - first_key) % 16;
    if (!is_gathered) {
      count = columns = end_key - first_key;
      k = head.k + first_key * head.k_row, v = head.v + first_key * head.v_row;
      k_row = head.k_row, v_row = head.v_row;
      return;
    }
    const int64_t most = most_columns(call);
    places = reinterpret_cast<int64_t*>(room);
    float* own_k = room + 2 * most;
    float* own_v = own_k + most * call.width;
    k = own_k, v = own_v, k_row = call.width, v_row = call.value_width, count = 0;
    for (int64_t t = first_key; t < end_key; ++t) {
      if (head.mask && !head.mask[t]) continue;
      std::memcpy(own_k + count * k_row, head.k + t * head.k_row, 4 * k_row);
      std::memcpy(own_v + count * v_row, head.v + t * head.v_row, 4 * v_row);
      places[count++] = t;
    }
    columns = (count + 15) / 16 * 16;
    std::memset(own_k + count * k_row, 0, 4 * (columns - count) * k_row);
    std::memset(own_v + count * v_row, 0, 4 * (columns - count) * v_row);
  }

  // How many of its keys lie before a token.
  int64_t before(int64_t token) const {
    if (!is_gathered) return fewer(larger_of(token - first_key, 0), count);
    int64_t found = 0;
    while (found < count && places[found] < token) ++found;
    return found;
  }
};

// Where the first block of a head begins, at or before token 0: blocks are counted from the first
// key that is seen.
int64_t first_block(const Head& head) {
  int64_t first = 0;
  if (head.call.window >= 0) return 0;
  while (head.mask && first < head.call.keys && !head.mask[first]) ++first;
  const int64_t over = first % head.call.block;
  return over ? over - head.call.block : 0;
}

// Softmax inside a block of the rows t … t + tokens, ``[tokens, columns]``; ``turned`` is its kᵀ.
void weigh_block(const Head& head, const Block& block, int64_t t, int64_t tokens,
                 const float* turned, float* weight) {
  const Call& call = head.call;
  product(tokens, block.columns, call.width, {head.q + t * head.q_row, head.q_row, 1}, turned,
          block.columns, weight, block.columns, call.scale, false);
  // A row that sees no key at all would weigh all of them alike.
  bool sees_all = block.count == block.columns;
  int64_t blind[TILE], blind_rows = 0;
  if (call.is_causal || call.window >= 0 || !sees_all)
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t first = call.window < 0 ? 0 : block.before(t + i - call.window);
      const int64_t last = call.is_causal      ? block.before(t + i + 1)
                           : call.window < 0 ? block.count
                                               : block.before(t + i + call.window + 1);
      float* row = weight + i * block.columns;
      for (int64_t j = 0; j < first; ++j) row[j] = NEVER;
      for (int64_t j = last; j < block.columns; ++j) row[j] = NEVER;
      if (first >= last) blind[blind_rows++] = i;
    }
  softmax(tokens, block.columns, weight);
  for (int64_t i = 0; i < blind_rows; ++i)
    std::memset(weight + blind[i] * block.columns, 0, 4 * block.columns);
}

// Without keys, or with blocks alone, LLN adds nothing.
void read(const Head& head, bool has_summary, float* out, float* level, float* weight,
          float* turned, float* block_room) {
  const Call& call = head.call;
  const int64_t values = call.value_width;
  const float mix = call.block ? call.mix : 1.0f;
  if (has_summary) {
    find_levels(head, level);
    for (int64_t t = 0; t < call.queries; t += TILE) {
      const int64_t tokens = fewer(TILE, call.queries - t);
      weigh_queries(tokens, call.width, head.q + t * head.q_row, head.q_row, head.alpha, level,
                    weight);
      product(tokens, values, call.width, {weight, call.width, 1}, head.centroid, values,
              out + t * values, values, mix, false);
    }
  } else {
    std::memset(out, 0, sizeof(float) * call.queries * values);
  }
  if (!call.block) return;
  for (int64_t begin = first_block(head); begin < call.queries; begin += call.block) {
    const Block block(head, begin, block_room);
    if (!block.count) continue;
    transpose(block.columns, call.width, block.k, block.k_row, turned);
    for (int64_t t = block.start; t < block.end; t += TILE) {
      const int64_t tokens = fewer(TILE, block.end - t);
      weigh_block(head, block, t, tokens, turned, weight);
      product(tokens, values, block.count, {weight, block.columns, 1}, block.v, block.v_row,
              out + t * values, values, 1 - mix, true);
    }
  }
}

// Where LLN adds nothing; every entry of the three is written.
void differentiate_nothing(const Call& call, const Gradients& to) {
  std::memset(to.to_query, 0, sizeof(float) * call.queries * call.width);
  std::memset(to.to_key, 0, sizeof(float) * call.keys * call.width);
  std::memset(to.to_value, 0, sizeof(float) * call.keys * call.value_width);
}

// Gradients of keys and values that come from those of the summary: of C, and of the slots' logits in
// all queries, both of which are used up. With a mean, what it says is added to each key, and all is
// added to what is there; then the result is the gradient of β where slots are those of keys less
// their mean.
double differentiate_summary(const Head& head, const Gradients& to, float* of_centroid,
                             float* of_level, Room& room, const float* mean = nullptr,
                             const float* of_mean = nullptr) {
  const Call& call = head.call;
  const int64_t width = call.width, values = call.value_width;
  float* weight = room.take(TILE * width);
  float* turned = room.take(width * values);
  float* of_keys = room.take(TILE * width);
  double of_beta = 0;
  for (int64_t d = 0; d < width; ++d) {
    const float share = 1.0f / head.mass[d];
    lanes middle = {};
    float* own = of_centroid + d * values;
    for (int64_t e = 0; e < values; e += LANES) {
      middle += load(own + e) * load(head.centroid + d * values + e);
      store(own + e, load(own + e) * share);
    }
    of_level[d] = head.beta * (of_level[d] - sum_of(middle)) * share;
  }
  transpose(width, values, of_centroid, values, turned);
  for (int64_t t = 0; t < call.keys; t += TILE) {
    const int64_t tokens = fewer(TILE, call.keys - t);
    const float* k = head.k + t * head.k_row;
    float* to_key = to.to_key + t * width;
    weigh_keys(tokens, width, k, head.k_row, head.beta, head.peak, weight);
    product(tokens, values, width, {weight, width, 1}, of_centroid, values,
            to.to_value + t * values, values, 1.0f, mean != nullptr);
    product(tokens, width, values, {head.v + t * head.v_row, head.v_row, 1}, turned, width, of_keys,
            width, head.beta, false);
    lanes by_beta = {};
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t d = 0; d < width; d += LANES) {
        const int64_t at = i * width + d;
        lanes own = (load(of_keys + at) + load(of_level + d)) * load(weight + at);
        if (mean) {
          by_beta += own * (load(k + i * head.k_row + d) - load(mean + d));
          own += load(to_key + at) + load(of_mean + d);
        }
        store(to_key + at, own);
      }
    of_beta += sum_of(by_beta);
  }
  return of_beta / head.beta;
}

// Gradients that come from LLN; every entry of the three is written.
void differentiate(const Head& head, const Gradients& to, Room& room) {
  const Call& call = head.call;
  const int64_t width = call.width, values = call.value_width;
  const float mix = call.block ? call.mix : 1.0f;
  room.used = 0;
  float* level = room.take(width);
  float* weight = room.take(TILE * width);
  float* turned = room.take(width * values);
  float* of_centroid = room.take(width * values);
  float* row = room.take(width);
  find_levels(head, level);
  transpose(width, values, head.centroid, values, turned);
  std::memset(of_centroid, 0, sizeof(float) * width * values);
  std::memset(row, 0, sizeof(float) * width);
  for (int64_t t = 0; t < call.queries; t += TILE) {
    const int64_t tokens = fewer(TILE, call.queries - t);
    const float* g = to.g + t * to.g_row;
    float* to_query = to.to_query + t * width;
    weigh_queries(tokens, width, head.q + t * head.q_row, head.q_row, head.alpha, level, weight);
    product(width, values, tokens, {weight, 1, width}, g, to.g_row, of_centroid, values, mix, true);
    product(tokens, width, values, {g, to.g_row, 1}, turned, width, to_query, width, mix, false);
    softmax_gradient(tokens, width, weight, to_query);
    for (int64_t d = 0; d < width; d += LANES) {
      lanes sum = {};
      for (int64_t i = 0; i < tokens; ++i) {
        const lanes own = load(to_query + i * width + d);
        sum += own;
        store(to_query + i * width + d, own * head.alpha);
      }
      store(row + d, load(row + d) + sum);
    }
  }
  differentiate_summary(head, to, of_centroid, row, room);
}

// Adds rows to those at their places.
void add_rows_at(const int64_t* places, int64_t rows, int64_t width, const float* from, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < width; d += LANES) {
      float* own = to + places[i] * width + d;
      store(own, load(own) + load(from + i * width + d));
    }
}

// Adds the gradients that come from the blocks.
void differentiate_blocks(const Head& head, const Gradients& to, Room& room) {
  const Call& call = head.call;
  const int64_t most = most_columns(call), width = call.width, values = call.value_width;
  room.used = 0;
  float* keys = room.take(width * most);
  float* turned = room.take(values * most);
  float* weight = room.take(TILE * most);
  float* of_scores = room.take(TILE * most);
  float* to_keys = room.take(width * most);
  float* to_values = room.take(values * most);
  float* block_room = room.take(Block::floats(call));
  for (int64_t begin = first_block(head); begin < call.queries; begin += call.block) {
    const Block block(head, begin, block_room);
    if (!block.count) continue;
    const int64_t columns = block.columns;
    transpose(columns, width, block.k, block.k_row, keys);
    transpose(columns, values, block.v, block.v_row, turned);
    float* own_key = to.to_key + block.first_key * width;
    float* own_value = to.to_value + block.first_key * values;
    if (block.is_gathered) {
      own_key = to_keys, own_value = to_values;
      std::memset(own_key, 0, 4 * block.count * width);
      std::memset(own_value, 0, 4 * block.count * values);
    }
    for (int64_t t = block.start; t < block.end; t += TILE) {
      const int64_t tokens = fewer(TILE, block.end - t);
      const float *q = head.q + t * head.q_row, *g = to.g + t * to.g_row;
      weigh_block(head, block, t, tokens, keys, weight);
      product(tokens, columns, values, {g, to.g_row, 1}, turned, columns, of_scores, columns,
              1 - call.mix, false);
      softmax_gradient(tokens, columns, weight, of_scores);
      product(tokens, width, block.count, {of_scores, columns, 1}, block.k, block.k_row,
              to.to_query + t * width, width, call.scale, true);
      product(block.count, width, tokens, {of_scores, 1, columns}, q, head.q_row, own_key, width,
              call.scale, true);
      product(block.count, values, tokens, {weight, 1, columns}, g, to.g_row, own_value, values,
              1 - call.mix, true);
    }
    if (!block.is_gathered) continue;
    add_rows_at(block.places, block.count, width, to_keys, to.to_key);
    add_rows_at(block.places, block.count, values, to_values, to.to_value);
  }
}

}  // namespace
