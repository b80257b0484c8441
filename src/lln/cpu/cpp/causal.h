// Causal attention by tiles. With the levels P of the slots, the largest βk_j up to the end of a
// row's tile,
//
//     φ_i = exp(αq_i + P − shift_i)      ψ_j = exp(βk_j − P)      a_ij = φ_i · ψ_j  for j ≤ i
//     out_i = Σ_j a_ij v_j / n_i         n_i = Σ_j a_ij
//
// and keys of earlier tiles are in the state, Σ_j ψ_j and Σ_j ψ_j v_jᵀ. A later key of the tile may
// raise P so much that a row loses its digits: then n_i is small.
#pragma once

#include <cmath>
#include "call.h"
#include "tiles.h"

namespace {

struct Walk {
  const Head& head;
  // ``peak`` is that of the keys, ``level`` β times it.
  float *peak, *level, *mass, *state, *query_weight, *key_weight, *turned, *pairs;

  Walk(const Head& of, Room& room) : head(of) {
    const int64_t width = of.call.width;
    peak = room.take(width);
    level = room.take(width);
    mass = room.take(width);
    state = room.take(width * of.call.value_width);
    query_weight = room.take(TILE * width);
    key_weight = room.take(TILE * width);
    turned = room.take(TILE * width);
    pairs = room.take(TILE * TILE);
    std::memset(mass, 0, sizeof(float) * width);
    std::memset(state, 0, sizeof(float) * width * of.call.value_width);
  }

  static int64_t floats(const Call& call) {
    return call.width * (3 + call.value_width + 3 * TILE) + TILE * TILE + 128;
  }

  // Peaks with those of a tile, and the state for them.
  void raise_peaks(int64_t t, int64_t tokens) {
    const int64_t width = head.call.width, values = head.call.value_width;
    by_strips(width, [&](auto vectors, int64_t d) {
      lanes found[vectors];
      find_peaks(head.k + t * head.k_row + d, head.k_row, tokens, found);
      for (int n = 0; n < vectors; ++n) {
        const int64_t at = d + n * LANES;
        lanes top = found[n];
        if (t > 0) top = larger(top, load(peak + at));
        for (int lane = 0; t > 0 && lane < LANES; ++lane) {
          const float share = std::exp(head.beta * (peak[at + lane] - top[lane]));
          if (share == 1.0f) continue;
          mass[at + lane] *= share;
          float* row = state + (at + lane) * values;
          for (int64_t e = 0; e < values; e += LANES) store(row + e, load(row + e) * share);
        }
        store(peak + at, top);
        store(level + at, top * head.beta);
      }
    });
  }

  // φ; writes the shifts, or uses those of the forward pass.
  void weigh_rows(int64_t t, int64_t tokens, float* shift, bool is_known) {
    const int64_t width = head.call.width;
    for (int64_t i = 0; i < tokens; ++i) {
      const float* q = head.q + (t + i) * head.q_row;
      float* weight = query_weight + i * width;
      lanes top = load(q) * head.alpha + load(level);
      for (int64_t d = 0; d < width; d += LANES) {
        const lanes own = load(q + d), x = own * head.alpha + load(level + d) + unless_finite(own);
        store(weight + d, x);
        top = larger(x, top);
      }
      if (!is_known) shift[i] = largest_of(top);
      for (int64_t d = 0; d < width; d += 16) {
        lanes power[GROUP];
        for (int g = 0; g < GROUP; ++g) {
          power[g] = lesser(all(1.0f), load(weight + d + g * LANES) - shift[i]);
        }
        exponential(power);
        for (int g = 0; g < GROUP; ++g) store(weight + d + g * LANES, power[g]);
      }
    }
  }

  // ψ and ψᵀ.
  void weigh_tile(int64_t t, int64_t tokens) {
    const int64_t width = head.call.width;
    weigh_keys(tokens, width, head.k + t * head.k_row, head.k_row, head.beta, peak, key_weight);
    if (tokens < TILE) std::memset(key_weight + tokens * width, 0, 4 * (TILE - tokens) * width);
    transpose(TILE, width, key_weight, width, turned);
  }

  // a_ij inside the tile, 0 for j > i.
  void pair_up(int64_t tokens) {
    product(tokens, TILE, head.call.width, {query_weight, head.call.width, 1}, turned, TILE, pairs,
            TILE, 1.0f, false);
    clear_later(tokens);
  }

  void clear_later(int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i)
      std::memset(pairs + i * TILE + i + 1, 0, 4 * (TILE - i - 1));
  }

  void add_tile(int64_t t, int64_t tokens) {
    const int64_t width = head.call.width, values = head.call.value_width;
    add_tile_sums(tokens, width, key_weight, mass);
    product(width, values, tokens, {key_weight, 1, width}, head.v + t * head.v_row, head.v_row,
            state, values, 1.0f, true);
  }
};

// The smaller of two numbers; NaN if one of them is.
inline float smaller_of(float one, float other) {
  return one != one || one < other ? one : other;
}

// The smallest n_i, or NaN. Writes n_i and shift_i of every row.
float walk_forward(const Head& head, float* out, float* norm, float* shift, Room& room) {
  const Call& call = head.call;
  const int64_t width = call.width, values = call.value_width;
  room.used = 0;
  Walk walk(head, room);
  float least = 1.0f;
  for (int64_t t = 0; t < call.queries; t += TILE) {
    const int64_t tokens = fewer(TILE, call.queries - t);
    walk.raise_peaks(t, tokens);
    walk.weigh_rows(t, tokens, shift + t, false);
    walk.weigh_tile(t, tokens);
    walk.pair_up(tokens);
    float* rows = out + t * values;
    product(tokens, values, width, {walk.query_weight, width, 1}, walk.state, values, rows, values,
            1.0f, false);
    product(tokens, values, tokens, {walk.pairs, TILE, 1}, head.v + t * head.v_row, head.v_row,
            rows, values, 1.0f, true);
    for (int64_t i = 0; i < tokens; ++i) {
      lanes sum = {};
      for (int64_t d = 0; d < width; d += LANES)
        sum += load(walk.query_weight + i * width + d) * load(walk.mass + d);
      for (int64_t j = 0; j < TILE; j += LANES) sum += load(walk.pairs + i * TILE + j);
      const float total = sum_of(sum);
      norm[t + i] = total;
      const lanes share = all(1.0f / total);
      for (int64_t e = 0; e < values; e += LANES)
        store(rows + i * values + e, load(rows + i * values + e) * share);
      least = smaller_of(total, least);
    }
    walk.add_tile(t, tokens);
  }
  return least;
}

// With ĝ_i = g_i / n_i and δ_i = g_i · out_i / n_i, the gradient of a_ij is ĝ_i · v_j − δ_i.
void walk_backward(const Head& head, const Gradients& to, const float* out, const float* norm,
                   float* shift, float* peaks, Room& room) {
  const Call& call = head.call;
  const int64_t width = call.width, values = call.value_width;
  room.used = 0;
  Walk walk(head, room);
  float* upstream = room.take(TILE * values);
  float* delta = room.take(TILE);
  float* turned = room.take(width * values);
  float* values_turned = room.take(TILE * values);
  float* last_values = room.take(TILE * values);
  float* weights_of = room.take(TILE * TILE);

  auto scale_gradient = [&](int64_t t, int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i) {
      const float* g = to.g + (t + i) * to.g_row;
      const lanes share = all(1.0f / norm[t + i]);
      lanes sum = {};
      for (int64_t e = 0; e < values; e += LANES) {
        const lanes own = load(g + e) * share;
        store(upstream + i * values + e, own);
        sum += own * load(out + (t + i) * values + e);
      }
      delta[i] = sum_of(sum);
    }
  };
  // ĝ_i · v_j − δ_i for j ≤ i, else 0, in `walk.pairs`.
  auto differentiate_pairs = [&](int64_t t, int64_t tokens) {
    const float* v = head.v + t * head.v_row;
    int64_t v_row = head.v_row;
    if (tokens < TILE) {
      for (int64_t j = 0; j < tokens; ++j)
        std::memcpy(last_values + j * values, v + j * v_row, 4 * values);
      std::memset(last_values + tokens * values, 0, 4 * (TILE - tokens) * values);
      v = last_values, v_row = values;
    }
    transpose(TILE, values, v, v_row, values_turned);
    product(tokens, TILE, values, {upstream, values, 1}, values_turned, TILE, walk.pairs, TILE,
            1.0f, false);
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t j = 0; j < TILE; j += LANES) {
        float* own = walk.pairs + i * TILE + j;
        store(own, load(own) - delta[i]);
      }
    walk.clear_later(tokens);
  };

  // Queries, from the first tile to the last: dφ_i = (state ĝ_i − mass δ_i) + Σ_j da_ij ψ_j.
  for (int64_t t = 0; t < call.queries; t += TILE) {
    const int64_t tokens = fewer(TILE, call.queries - t);
    walk.raise_peaks(t, tokens);
    std::memcpy(peaks + t / TILE * width, walk.peak, sizeof(float) * width);
    walk.weigh_rows(t, tokens, shift + t, true);
    walk.weigh_tile(t, tokens);
    scale_gradient(t, tokens);
    differentiate_pairs(t, tokens);
    transpose(width, values, walk.state, values, turned);
    float* to_query = to.to_query + t * width;
    product(tokens, width, values, {upstream, values, 1}, turned, width, to_query, width, 1.0f,
            false);
    product(tokens, width, tokens, {walk.pairs, TILE, 1}, walk.key_weight, width, to_query, width,
            1.0f, true);
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t d = 0; d < width; d += LANES) {
        float* own = to_query + i * width + d;
        const lanes all_of = load(own) - load(walk.mass + d) * delta[i];
        store(own, all_of * load(walk.query_weight + i * width + d) * head.alpha);
      }
    walk.add_tile(t, tokens);
  }
  // Keys and values, from the last tile to the first: the state holds Σ_i φ_i ĝ_iᵀ and Σ_i φ_i δ_i
  // of later tiles.
  std::memset(walk.mass, 0, sizeof(float) * width);
  std::memset(walk.state, 0, sizeof(float) * width * values);
  for (int64_t t = (call.queries - 1) / TILE * TILE; t >= 0; t -= TILE) {
    const int64_t tokens = fewer(TILE, call.queries - t);
    const float* own_peak = peaks + t / TILE * width;
    for (int64_t d = 0; d < width; ++d) {
      const float share = std::exp(head.beta * (own_peak[d] - walk.peak[d]));
      walk.level[d] = head.beta * own_peak[d];
      if (share == 1.0f) continue;
      walk.mass[d] *= share;
      float* row = walk.state + d * values;
      for (int64_t e = 0; e < values; e += LANES) store(row + e, load(row + e) * share);
    }
    std::memcpy(walk.peak, own_peak, sizeof(float) * width);
    walk.weigh_rows(t, tokens, shift + t, true);
    walk.weigh_tile(t, tokens);
    walk.pair_up(tokens);
    std::memcpy(weights_of, walk.pairs, sizeof(float) * TILE * TILE);
    scale_gradient(t, tokens);
    differentiate_pairs(t, tokens);
    float *to_key = to.to_key + t * width, *to_value = to.to_value + t * values;
    product(tokens, values, width, {walk.key_weight, width, 1}, walk.state, values, to_value,
            values, 1.0f, false);
    product(tokens, values, tokens, {weights_of, 1, TILE}, upstream, values, to_value, values, 1.0f,
            true);
    transpose(width, values, walk.state, values, turned);
    product(tokens, width, values, {head.v + t * head.v_row, head.v_row, 1}, turned, width, to_key,
            width, 1.0f, false);
    product(tokens, width, tokens, {walk.pairs, 1, TILE}, walk.query_weight, width, to_key, width,
            1.0f, true);
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t d = 0; d < width; d += LANES) {
        float* own = to_key + i * width + d;
        const lanes all_of = load(own) - load(walk.mass + d);
        store(own, all_of * load(walk.key_weight + i * width + d) * head.beta);
      }
    product(width, values, tokens, {walk.query_weight, 1, width}, upstream, values, walk.state,
            values, 1.0f, true);
    for (int64_t d = 0; d < width; d += LANES) {
      lanes sum = {};
      for (int64_t i = 0; i < tokens; ++i)
        sum += load(walk.query_weight + i * width + d) * delta[i];
      store(walk.mass + d, load(walk.mass + d) + sum);
    }
  }
}

}  // namespace
