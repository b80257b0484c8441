// LLN attention, alone or with blocks of softmax; the formulas are those of `lln.eager.few_passes`.
//
// The summary of a head, ``[D, E + 2]``, holds C, the peaks of βk and the masses m of the slots.
#pragma once

#include <cmath>
#include "call.h"
#include "tiles.h"

namespace {

// The keys of a head that are seen, one behind the other, and their number: everything else works on
// them as on all keys, so that what masked tokens hold is never read.
struct SeenKeys {
  Call call;
  float *k, *v;

  SeenKeys(const Head& head, int64_t index, Room& room) : call(head.call) {
    const uint8_t* mask = call.mask + index / call.heads * call.keys;
    const int64_t all_keys = call.keys;
    room.used = 0;
    k = room.take(all_keys * call.width);
    v = room.take(all_keys * call.value_width);
    call.keys = 0;
    for (int64_t t = 0; t < all_keys; ++t) {
      if (!mask[t]) continue;
      std::memcpy(k + call.keys * call.width, head.k + t * head.k_row, 4 * call.width);
      std::memcpy(v + call.keys * call.value_width, head.v + t * head.v_row,
                  4 * call.value_width);
      ++call.keys;
    }
  }

  Head of(const Head& head) const {
    return {call, head.alpha,  head.beta, head.q,        k,         v,
            head.q_row, call.width, call.value_width, head.centroid, head.peak, head.mass};
  }

  // Rows of the keys that are seen to their places; 0 for the others.
  static void spread(const Call& call, int64_t index, int64_t width, const float* rows, float* to) {
    const uint8_t* mask = call.mask + index / call.heads * call.keys;
    for (int64_t t = 0; t < call.keys; ++t, to += width) {
      if (mask[t]) {
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
  for (int64_t d = 0; d < width; d += 16) {
    lanes top[GROUP];
    find_peaks(head.k + d, head.k_row, call.keys, top);
    for (int g = 0; g < GROUP; ++g) store(head.peak + d + g * LANES, top[g] * head.beta);
  }
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

// L = peak + log m.
void find_levels(const Head& head, float* level) {
  for (int64_t d = 0; d < head.call.width; ++d) level[d] = head.peak[d] + std::log(head.mass[d]);
}

// Softmax inside a block of the rows t … t + tokens, ``[tokens, b]``; ``turned`` is the block's kᵀ.
void weigh_block(const Head& head, int64_t t, int64_t tokens, const float* turned, float* weight) {
  const int64_t block = head.call.block;
  product(tokens, block, head.call.width, {head.q + t * head.q_row, head.q_row, 1}, turned, block,
          weight, block, head.call.scale, false);
  softmax(tokens, block, weight);
}

void read(const Head& head, float* out, float* level, float* weight, float* turned) {
  const Call& call = head.call;
  const int64_t values = call.value_width;
  find_levels(head, level);
  const float mix = call.block ? call.mix : 1.0f;
  for (int64_t t = 0; t < call.queries; t += TILE) {
    const int64_t tokens = fewer(TILE, call.queries - t);
    weigh_queries(tokens, call.width, head.q + t * head.q_row, head.q_row, head.alpha, level,
                  weight);
    product(tokens, values, call.width, {weight, call.width, 1}, head.centroid, values,
            out + t * values, values, mix, false);
  }
  if (!call.block) return;
  for (int64_t start = 0; start < call.queries; start += call.block) {
    transpose(call.block, call.width, head.k + start * head.k_row, head.k_row, turned);
    for (int64_t t = start; t < start + call.block; t += TILE) {
      const int64_t tokens = fewer(TILE, start + call.block - t);
      weigh_block(head, t, tokens, turned, weight);
      product(tokens, values, call.block, {weight, call.block, 1}, head.v + start * head.v_row,
              head.v_row, out + t * values, values, 1 - mix, true);
    }
  }
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
  for (int64_t d = 0; d < width; ++d) {
    const float share = 1.0f / head.mass[d];
    lanes middle = {};
    float* own = of_centroid + d * values;
    for (int64_t e = 0; e < values; e += LANES) {
      middle += load(own + e) * load(head.centroid + d * values + e);
      store(own + e, load(own + e) * share);
    }
    row[d] = head.beta * (row[d] - sum_of(middle)) * share;
  }
  transpose(width, values, of_centroid, values, turned);
  for (int64_t t = 0; t < call.keys; t += TILE) {
    const int64_t tokens = fewer(TILE, call.keys - t);
    float* to_key = to.to_key + t * width;
    weigh_keys(tokens, width, head.k + t * head.k_row, head.k_row, head.beta, head.peak, weight);
    product(tokens, values, width, {weight, width, 1}, of_centroid, values,
            to.to_value + t * values, values, 1.0f, false);
    product(tokens, width, values, {head.v + t * head.v_row, head.v_row, 1}, turned, width, to_key,
            width, head.beta, false);
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t d = 0; d < width; d += LANES) {
        float* own = to_key + i * width + d;
        store(own, (load(own) + load(row + d)) * load(weight + i * width + d));
      }
  }
}

// Adds the gradients that come from the blocks.
void differentiate_blocks(const Head& head, const Gradients& to, Room& room) {
  const Call& call = head.call;
  const int64_t block = call.block, width = call.width, values = call.value_width;
  room.used = 0;
  float* keys = room.take(width * block);
  float* turned = room.take(values * block);
  float* weight = room.take(TILE * block);
  float* of_scores = room.take(TILE * block);
  for (int64_t start = 0; start < call.queries; start += block) {
    const float *k = head.k + start * head.k_row, *v = head.v + start * head.v_row;
    transpose(block, width, k, head.k_row, keys);
    transpose(block, values, v, head.v_row, turned);
    for (int64_t t = start; t < start + block; t += TILE) {
      const int64_t tokens = fewer(TILE, start + block - t);
      const float *q = head.q + t * head.q_row, *g = to.g + t * to.g_row;
      weigh_block(head, t, tokens, keys, weight);
      product(tokens, block, values, {g, to.g_row, 1}, turned, block, of_scores, block,
              1 - call.mix, false);
      softmax_gradient(tokens, block, weight, of_scores);
      product(tokens, width, block, {of_scores, block, 1}, k, head.k_row, to.to_query + t * width,
              width, call.scale, true);
      product(block, width, tokens, {of_scores, 1, block}, q, head.q_row,
              to.to_key + start * width, width, call.scale, true);
      product(block, values, tokens, {weight, 1, block}, g, to.g_row,
              to.to_value + start * values, values, 1 - call.mix, true);
    }
  }
}

}  // namespace
