// Causal attention by tiles. With the levels P of the slots, the largest βk_j up to the end of a
// row's tile,
//
//     φ_i = exp(αq_i + P − shift_i)      ψ_j = exp(βk_j − P)      a_ij = φ_i · ψ_j  for j ≤ i
//     out_i = Σ_j a_ij v_j / n_i         n_i = Σ_j a_ij
//
// and keys of earlier tiles are in the state, Σ_j ψ_j and Σ_j ψ_j v_jᵀ. A later key of the tile may
// raise P so much that a row loses its digits: then n_i is small. Of a masked call the keys that are
// seen are gathered tile by tile; a row that sees none yet has the output 0.
#pragma once

#include <cmath>
#include "call.h"
#include "tiles.h"

namespace {

struct Walk {
  const Head& head;
  // ``peak`` is that of the keys, ``level`` β times it.
  float *peak, *level, *mass, *state, *query_weight, *key_weight, *turned, *pairs;
  // The keys of a tile: how many, where they lie, and which tokens they are if some are left out.
  int64_t count;
  const float *k, *v;
  int64_t k_row, v_row;
  float *own_k, *own_v;
  int64_t places[TILE];
  // Whether this tile or an earlier one has a key.
  bool has_keys;

  Walk(const Head& of, Room& room) : head(of), has_keys(false) {
    const int64_t width = of.call.width;
    peak = room.take(width);
    level = room.take(width);
    mass = room.take(width);
    state = room.take(width * of.call.value_width);
    query_weight = room.take(TILE * width);
    key_weight = room.take(TILE * width);
    turned = room.take(TILE * width);
    pairs = room.take(TILE * TILE);
    own_k = room.take(TILE * width);
    own_v = room.take(TILE * of.call.value_width);
    std::memset(peak, 0, sizeof(float) * width);
    std::memset(level, 0, sizeof(float) * width);
    std::memset(mass, 0, sizeof(float) * width);
    std::memset(state, 0, sizeof(float) * width * of.call.value_width);
  }

  static int64_t floats(const Call& call) {
    return call.width * (3 + call.value_width + 4 * TILE) + TILE * (TILE + call.value_width) + 192;
  }

  // The keys of a tile.
  void find_keys(int64_t t, int64_t tokens) {
    const int64_t width = head.call.width, values = head.call.value_width;
    count = tokens;
    k = head.k + t * head.k_row, v = head.v + t * head.v_row;
    k_row = head.k_row, v_row = head.v_row;
    if (!head.mask) return;
    count = 0;
    for (int64_t i = 0; i < tokens; ++i) {
      if (!head.mask[t + i]) continue;
      std::memcpy(own_k + count * width, k + i * k_row, 4 * width);
      std::memcpy(own_v + count * values, v + i * v_row, 4 * values);
      places[count++] = i;
    }
    k = own_k, v = own_v, k_row = width, v_row = values;
  }

  // How many keys of the tile its i-th row sees.
  int64_t seen_from(int64_t i) const {
    if (!head.mask) return i + 1;
    int64_t seen = 0;
    while (seen < count && places[seen] <= i) ++seen;
    return seen;
  }

  // β times a peak; a channel that is not the caller's weighs nothing.
  float level_of(int64_t d) const { return d < head.call.channels ? head.beta * peak[d] : NEVER; }

  // Peaks with those of the tile, and the state for them.
  void raise_peaks() {
    const int64_t width = head.call.width, values = head.call.value_width;
    if (!count) return;
    const bool is_first = !has_keys;
    has_keys = true;
    by_strips(width, [&](auto vectors, int64_t d) {
      lanes found[vectors];
      find_peaks(k + d, k_row, count, found);
      for (int n = 0; n < vectors; ++n) {
        const int64_t at = d + n * LANES;
        lanes top = found[n];
        if (!is_first) top = larger(top, load(peak + at));
        for (int lane = 0; !is_first && lane < LANES; ++lane) {
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
    for (int64_t d = head.call.channels; d < width; ++d) level[d] = level_of(d);
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
  void weigh_tile() {
    const int64_t width = head.call.width;
    weigh_keys(count, width, k, k_row, head.beta, peak, key_weight);
    if (count < TILE) std::memset(key_weight + count * width, 0, 4 * (TILE - count) * width);
    transpose(TILE, width, key_weight, width, turned);
  }

  // a_ij inside the tile, 0 for j > i.
  void pair_up(int64_t tokens) {
    product(tokens, TILE, head.call.width, {query_weight, head.call.width, 1}, turned, TILE, pairs,
            TILE, 1.0f, false);
    clear_later(tokens);
  }

  void clear_later(int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t seen = seen_from(i);
      std::memset(pairs + i * TILE + seen, 0, 4 * (TILE - seen));
    }
  }

  void add_tile() {
    const int64_t width = head.call.width, values = head.call.value_width;
    add_tile_sums(count, width, key_weight, mass);
    product(width, values, count, {key_weight, 1, width}, v, v_row, state, values, 1.0f, true);
  }

  // Gradients of the tile's keys or values to their places; 0 for those that are left out.
  void spread(int64_t tokens, int64_t width, const float* rows, float* to) const {
    for (int64_t i = 0, own = 0; i < tokens; ++i, to += width) {
      if (own < count && places[own] == i)
        std::memcpy(to, rows + own++ * width, 4 * width);
      else
        std::memset(to, 0, 4 * width);
    }
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
    const bool had_keys = walk.has_keys;
    walk.find_keys(t, tokens);
    walk.raise_peaks();
    walk.weigh_rows(t, tokens, shift + t, false);
    walk.weigh_tile();
    walk.pair_up(tokens);
    float* rows = out + t * values;
    product(tokens, values, width, {walk.query_weight, width, 1}, walk.state, values, rows, values,
            1.0f, false);
    product(tokens, values, walk.count, {walk.pairs, TILE, 1}, walk.v, walk.v_row, rows, values,
            1.0f, true);
    for (int64_t i = 0; i < tokens; ++i) {
      lanes sum = {};
      for (int64_t d = 0; d < width; d += LANES)
        sum += load(walk.query_weight + i * width + d) * load(walk.mass + d);
      for (int64_t j = 0; j < TILE; j += LANES) sum += load(walk.pairs + i * TILE + j);
      const bool is_blind = !had_keys && !walk.seen_from(i);
      const float total = is_blind ? 1.0f : sum_of(sum);
      norm[t + i] = total;
      const lanes share = all(1.0f / total);
      for (int64_t e = 0; e < values; e += LANES)
        store(rows + i * values + e, load(rows + i * values + e) * share);
      least = smaller_of(total, least);
    }
    walk.add_tile();
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
  float* of_keys = room.take(TILE * width);
  float* of_values = room.take(TILE * values);
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
  auto differentiate_pairs = [&](int64_t tokens) {
    const float* v = walk.v;
    int64_t v_row = walk.v_row;
    if (walk.count < TILE) {
      for (int64_t j = 0; j < walk.count; ++j)
        std::memcpy(last_values + j * values, v + j * v_row, 4 * values);
      std::memset(last_values + walk.count * values, 0, 4 * (TILE - walk.count) * values);
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
    walk.find_keys(t, tokens);
    walk.raise_peaks();
    std::memcpy(peaks + t / TILE * width, walk.peak, sizeof(float) * width);
    walk.weigh_rows(t, tokens, shift + t, true);
    walk.weigh_tile();
    scale_gradient(t, tokens);
    differentiate_pairs(tokens);
    transpose(width, values, walk.state, values, turned);
    float* to_query = to.to_query + t * width;
    product(tokens, width, values, {upstream, values, 1}, turned, width, to_query, width, 1.0f,
            false);
    product(tokens, width, walk.count, {walk.pairs, TILE, 1}, walk.key_weight, width, to_query,
            width, 1.0f, true);
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t d = 0; d < width; d += LANES) {
        float* own = to_query + i * width + d;
        const lanes all_of = load(own) - load(walk.mass + d) * delta[i];
        store(own, all_of * load(walk.query_weight + i * width + d) * head.alpha);
      }
    walk.add_tile();
  }
  // Keys and values, from the last tile to the first: the state holds Σ_i φ_i ĝ_iᵀ and Σ_i φ_i δ_i
  // of later tiles.
  std::memset(walk.mass, 0, sizeof(float) * width);
  std::memset(walk.state, 0, sizeof(float) * width * values);
  for (int64_t t = (call.queries - 1) / TILE * TILE; t >= 0; t -= TILE) {
    const int64_t tokens = fewer(TILE, call.queries - t);
    walk.find_keys(t, tokens);
    // A tile without keys has no gradients to write, and what its rows read belongs to earlier keys.
    const float* own_peak = peaks + t / TILE * width;
    for (int64_t d = 0; d < width; ++d) {
      const float share = std::exp(head.beta * (own_peak[d] - walk.peak[d]));
      if (share == 1.0f) continue;
      walk.mass[d] *= share;
      float* row = walk.state + d * values;
      for (int64_t e = 0; e < values; e += LANES) store(row + e, load(row + e) * share);
    }
    std::memcpy(walk.peak, own_peak, sizeof(float) * width);
    for (int64_t d = 0; d < width; ++d) walk.level[d] = walk.level_of(d);
    walk.weigh_rows(t, tokens, shift + t, true);
    walk.weigh_tile();
    walk.pair_up(tokens);
    std::memcpy(weights_of, walk.pairs, sizeof(float) * TILE * TILE);
    scale_gradient(t, tokens);
    differentiate_pairs(tokens);
    const int64_t count = walk.count;
    float* to_key = head.mask ? of_keys : to.to_key + t * width;
    float* to_value = head.mask ? of_values : to.to_value + t * values;
    product(count, values, width, {walk.key_weight, width, 1}, walk.state, values, to_value, values,
            1.0f, false);
    product(count, values, tokens, {weights_of, 1, TILE}, upstream, values, to_value, values, 1.0f,
            true);
    transpose(width, values, walk.state, values, turned);
    product(count, width, values, {walk.v, walk.v_row, 1}, turned, width, to_key, width, 1.0f,
            false);
    product(count, width, tokens, {walk.pairs, 1, TILE}, walk.query_weight, width, to_key, width,
            1.0f, true);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < width; d += LANES) {
        float* own = to_key + i * width + d;
        const lanes all_of = load(own) - load(walk.mass + d);
        store(own, all_of * load(walk.key_weight + i * width + d) * head.beta);
      }
    if (head.mask) {
      walk.spread(tokens, width, of_keys, to.to_key + t * width);
      walk.spread(tokens, values, of_values, to.to_value + t * values);
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
