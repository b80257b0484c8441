// LLN attention on a CPU, alone or with blocks of softmax, one head after the other from cache.
//
// The formulas are those of `lln.eager.few_passes`, in float32. PyTorch takes a pass over memory for
// each operation; here a tile of 64 tokens goes through all of them while it is in the cache, and
// nothing of the size of a tensor is kept for the backward pass: weights are computed again.
//
// Every head is computed by one thread, so the result does not depend on the number of threads.
// Widths and block sizes are multiples of 16. The summary of a head, ``[D, E + 2]``, holds rows of
// C, the peak of βk and the mass m of each slot.

#include <cmath>
#include <cstdint>
#include <cstdlib>
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

// eˣ for x ≤ 1, within 2 units in the last place; from e^-87 on it gets no smaller. It is 2ⁿ times a
// Taylor polynomial of the rest, |r| ≤ log(2) / 2, whose next term is 5e-9 of the result.
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

// A matrix of one head or of a part of it: entry (i, j) is at data[i * row + j * step].
struct Matrix {
  const float* data;
  int64_t row, step;
};

template <int R, int P>
inline void few_rows(int64_t depth, Matrix left, const float* right, int64_t right_row, float* out,
                     int64_t out_row, float scale, bool adds) {
  lanes sum[R][P] = {};
  for (int64_t k = 0; k < depth; ++k) {
    lanes of_right[P];
    for (int p = 0; p < P; ++p) of_right[p] = load(right + k * right_row + p * LANES);
    for (int r = 0; r < R; ++r) {
      const float of_left = left.data[r * left.row + k * left.step];
      for (int p = 0; p < P; ++p) sum[r][p] += of_left * of_right[p];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) {
      float* to = out + r * out_row + p * LANES;
      store(to, adds ? load(to) + sum[r][p] * scale : sum[r][p] * scale);
    }
}

template <int P>
void column_of_product(int64_t rows, int64_t depth, Matrix left, const float* right,
                       int64_t right_row, float* out, int64_t out_row, float scale, bool adds) {
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS) {
    const Matrix own{left.data + i * left.row, left.row, left.step};
    few_rows<ROWS, P>(depth, own, right, right_row, out + i * out_row, out_row, scale, adds);
  }
  for (; i < rows; ++i) {
    const Matrix own{left.data + i * left.row, left.row, left.step};
    few_rows<1, P>(depth, own, right, right_row, out + i * out_row, out_row, scale, adds);
  }
}

// out = scale · left · right, or added to what is there. Rows of right and out are contiguous.
void product(int64_t rows, int64_t columns, int64_t depth, Matrix left, const float* right,
             int64_t right_row, float* out, int64_t out_row, float scale, bool adds) {
  int64_t j = 0;
  for (; j + PACKS * LANES <= columns; j += PACKS * LANES)
    column_of_product<PACKS>(rows, depth, left, right + j, right_row, out + j, out_row, scale, adds);
  for (; j < columns; j += LANES)
    column_of_product<1>(rows, depth, left, right + j, right_row, out + j, out_row, scale, adds);
}

void transpose(int64_t rows, int64_t columns, const float* from, int64_t from_row, float* to) {
  for (int64_t j0 = 0; j0 < columns; j0 += 16)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = j0; j < j0 + 16; ++j) to[j * rows + i] = from[i * from_row + j];
}

void softmax(int64_t rows, int64_t columns, float* weight) {
  for (int64_t i = 0; i < rows; ++i, weight += columns) {
    lanes top = load(weight);
    for (int64_t j = LANES; j < columns; j += LANES) top = larger(load(weight + j), top);
    const lanes peak = all(largest_of(top));
    lanes sum = {};
    for (int64_t j = 0; j < columns; j += 16) {
      lanes power[GROUP];
      for (int g = 0; g < GROUP; ++g) power[g] = load(weight + j + g * LANES) - peak;
      exponential(power);
      for (int g = 0; g < GROUP; ++g) {
        store(weight + j + g * LANES, power[g]);
        sum += power[g];
      }
    }
    const lanes share = all(1.0f / sum_of(sum));
    for (int64_t j = 0; j < columns; j += LANES) store(weight + j, load(weight + j) * share);
  }
}

// Replaces the gradient of softmax's results by that of what it took: w ∘ (dw − rowsum(w ∘ dw)).
void softmax_gradient(int64_t rows, int64_t columns, const float* weight, float* gradient) {
  for (int64_t i = 0; i < rows; ++i, weight += columns, gradient += columns) {
    lanes sum = {};
    for (int64_t j = 0; j < columns; j += LANES) sum += load(weight + j) * load(gradient + j);
    const lanes middle = all(sum_of(sum));
    for (int64_t j = 0; j < columns; j += LANES)
      store(gradient + j, load(weight + j) * (load(gradient + j) - middle));
  }
}

// e = exp(βk − peak), ``[tokens, D]``.
void weigh_keys(int64_t tokens, int64_t width, const float* key, int64_t row, float beta,
                const float* peak, float* weight) {
  for (int64_t t = 0; t < tokens; ++t, key += row, weight += width)
    for (int64_t d = 0; d < width; d += 16) {
      lanes power[GROUP];
      for (int g = 0; g < GROUP; ++g) {
        const int64_t at = d + g * LANES;
        const lanes x = load(key + at) * beta - load(peak + at);
        // The product is not rounded as that of the peak was: with keys of 10⁹ it may be larger.
        power[g] = x > 1.0f ? all(1.0f) : x;
      }
      exponential(power);
      for (int g = 0; g < GROUP; ++g) store(weight + d + g * LANES, power[g]);
    }
}

// w = softmax(αq + L), ``[tokens, D]``.
void weigh_queries(int64_t tokens, int64_t width, const float* query, int64_t row, float alpha,
                   const float* level, float* weight) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t d = 0; d < width; d += LANES)
      store(weight + t * width + d, load(query + t * row + d) * alpha + load(level + d));
  softmax(tokens, width, weight);
}

// Adds the sums of a tile's columns. Adding token by token would round more.
void add_tile_sums(int64_t tokens, int64_t width, const float* weight, float* total) {
  for (int64_t d = 0; d < width; d += 16) {
    lanes sum[GROUP] = {};
    add_rows(weight + d, width, tokens, sum);
    for (int g = 0; g < GROUP; ++g) {
      float* to = total + d + g * LANES;
      store(to, load(to) + sum[g]);
    }
  }
}

inline int64_t fewer(int64_t one, int64_t other) { return one < other ? one : other; }

}  // namespace

extern "C" {

// A tensor [B, H, tokens, channels]; its last stride is 1.
struct Side {
  float* data;
  int64_t batch, head, token;
};

// What to compute. Temperatures are one number each, or one for every head.
struct Call {
  int64_t batch, heads, queries, keys, width, value_width, threads;
  const float *alphas, *betas;
  float alpha, beta;
  // Tokens of a block, 0 = LLN alone; factor of the scores; share of LLN.
  int64_t block;
  float scale, mix;
};

// log s as a polynomial in log p, where p is within the two limits; smaller spreads than the floor
// are rounding noise.
struct Curve {
  double coefficients[5];
  double least, most, floor;
};

}  // extern "C"

namespace {

struct Head {
  const Call& call;
  float alpha, beta;
  const float *q, *k, *v;
  int64_t q_row, k_row, v_row;
  // C, then peaks, then masses.
  float *centroid, *peak, *mass;
};

Head head_of(const Call& call, int64_t index, const Side& query, const Side& key,
             const Side& value, float* summary) {
  const int64_t b = index / call.heads, h = index % call.heads;
  float* own = summary + index * call.width * (call.value_width + 2);
  return {call,
          call.alphas ? call.alphas[index] : call.alpha,
          call.betas ? call.betas[index] : call.beta,
          query.data + b * query.batch + h * query.head,
          key.data + b * key.batch + h * key.head,
          value.data + b * value.batch + h * value.head,
          query.token,
          key.token,
          value.token,
          own,
          own + call.width * call.value_width,
          own + call.width * (call.value_width + 1)};
}

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

// Memory of one thread.
struct Room {
  float* data;
  int64_t used = 0;
  explicit Room(int64_t floats)
      : data(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64))) {}
  ~Room() { std::free(data); }
  float* take(int64_t floats) {
    float* found = data + used;
    used += (floats + 15) / 16 * 16;
    return found;
  }
};

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

struct Gradients {
  const float* g;
  int64_t g_row;
  float *to_query, *to_key, *to_value;
};

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

// Causal attention by tiles. With the peaks P of the slots up to the end of a row's tile,
//
//     φ_i = exp(αq_i + P − shift_i)      ψ_j = exp(βk_j − P)      a_ij = φ_i · ψ_j  for j ≤ i
//     out_i = Σ_j a_ij v_j / n_i         n_i = Σ_j a_ij
//
// and keys of earlier tiles are in the state, Σ_j ψ_j and Σ_j ψ_j v_jᵀ. A key that comes later in the
// tile may raise P so much that a row loses its digits: then n_i is small.
struct Walk {
  const Head& head;
  float *peak, *mass, *state, *query_weight, *key_weight, *turned, *pairs;

  Walk(const Head& of, Room& room) : head(of) {
    const int64_t width = of.call.width;
    peak = room.take(width);
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
    return call.width * (2 + call.value_width + 3 * TILE) + TILE * TILE + 128;
  }

  // Peaks with those of a tile, and the state for them.
  void raise_peaks(int64_t t, int64_t tokens) {
    const int64_t width = head.call.width, values = head.call.value_width;
    for (int64_t d = 0; d < width; d += 16) {
      lanes found[GROUP];
      find_peaks(head.k + t * head.k_row + d, head.k_row, tokens, found);
      for (int g = 0; g < GROUP; ++g) {
        float* to = peak + d + g * LANES;
        lanes top = found[g] * head.beta;
        if (t > 0) top = larger(top, load(to));
        for (int lane = 0; t > 0 && lane < LANES; ++lane) {
          const float share = std::exp(to[lane] - top[lane]);
          if (share == 1.0f) continue;
          mass[d + g * LANES + lane] *= share;
          float* row = state + (d + g * LANES + lane) * values;
          for (int64_t e = 0; e < values; e += LANES) store(row + e, load(row + e) * share);
        }
        store(to, top);
      }
    }
  }

  // φ; writes the shifts, or uses those of the forward pass.
  void weigh_rows(int64_t t, int64_t tokens, float* shift, bool is_known) {
    const int64_t width = head.call.width;
    for (int64_t i = 0; i < tokens; ++i) {
      const float* q = head.q + (t + i) * head.q_row;
      float* weight = query_weight + i * width;
      lanes top = load(q) * head.alpha + load(peak);
      for (int64_t d = 0; d < width; d += LANES) {
        const lanes x = load(q + d) * head.alpha + load(peak + d);
        store(weight + d, x);
        top = larger(x, top);
      }
      if (!is_known) shift[i] = largest_of(top);
      for (int64_t d = 0; d < width; d += 16) {
        lanes power[GROUP];
        for (int g = 0; g < GROUP; ++g) {
          const lanes x = load(weight + d + g * LANES) - shift[i];
          power[g] = x > 1.0f ? all(1.0f) : x;
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
    for (int64_t j = 0; j < TILE; ++j)
      for (int64_t e = 0; e < values; ++e)
        values_turned[e * TILE + j] = j < tokens ? head.v[(t + j) * head.v_row + e] : 0.0f;
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
      const float share = std::exp(own_peak[d] - walk.peak[d]);
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
      for (int64_t i = 0; i < tokens; ++i) sum += load(walk.query_weight + i * width + d) * delta[i];
      store(walk.mass + d, load(walk.mass + d) + sum);
    }
  }
}

double sum_of_squares(const float* from, int64_t row, int64_t tokens, int64_t width) {
  double total = 0;
  for (int64_t t = 0; t < tokens; t += TILE) {
    lanes sum[GROUP] = {};
    for (int64_t i = t; i < fewer(t + TILE, tokens); ++i)
      for (int64_t d = 0; d < width; d += 16)
        for (int g = 0; g < GROUP; ++g) {
          const lanes own = load(from + i * row + d + g * LANES);
          sum[g] += own * own;
        }
    for (int g = 0; g < GROUP; ++g) total += sum_of(sum[g]);
  }
  return total;
}

// Mean and sum of squares around it of every channel. A tile's are found around its own mean and
// merged with those before (Chan, Golub and LeVeque 1979): Σk² − S·mean² would lose digits.
void gather_moments(const float* from, int64_t row, int64_t tokens, int64_t width, float* mean,
                    float* squares) {
  for (int64_t t = 0; t < tokens; t += TILE) {
    const int64_t own = fewer(TILE, tokens - t);
    const float own_count = static_cast<float>(own), count = static_cast<float>(t + own);
    for (int64_t d = 0; d < width; d += 16) {
      const float* columns = from + t * row + d;
      lanes own_mean[GROUP] = {}, around[GROUP] = {};
      add_rows(columns, row, own, own_mean);
      for (int g = 0; g < GROUP; ++g) own_mean[g] = own_mean[g] / own_count;
      for (int64_t i = 0; i < own; ++i)
        for (int g = 0; g < GROUP; ++g) {
          const lanes away = load(columns + i * row + g * LANES) - own_mean[g];
          around[g] += away * away;
        }
      for (int g = 0; g < GROUP; ++g) {
        float *to_mean = mean + d + g * LANES, *to_squares = squares + d + g * LANES;
        if (t == 0) {
          store(to_mean, own_mean[g]);
          store(to_squares, around[g]);
          continue;
        }
        const lanes moved = own_mean[g] - load(to_mean);
        store(to_mean, load(to_mean) + moved * (own_count / count));
        around[g] += moved * moved * (static_cast<float>(t) * (own_count / count));
        store(to_squares, load(to_squares) + around[g]);
      }
    }
  }
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

inline int64_t larger_of(int64_t one, int64_t other) { return one > other ? one : other; }

}  // namespace

extern "C" {

// Output ``[B, H, T, E]`` and summaries ``[B · H, D, E + 2]``, both contiguous.
__attribute__((visibility("default"))) void lln_forward(const Call* call, const Side* query,
                                                        const Side* key, const Side* value,
                                                        float* out, float* summary) {
  const int64_t all_heads = call->batch * call->heads;
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    Room room(call->width + TILE * larger_of(call->width, call->block) +
              call->width * call->block + 64);
    float* level = room.take(call->width);
    float* weight = room.take(TILE * larger_of(call->width, call->block));
    float* turned = room.take(call->width * call->block);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < all_heads; ++index) {
      const Head head = head_of(*call, index, *query, *key, *value, summary);
      summarise(head, weight);
      read(head, out + index * call->queries * call->value_width, level, weight, turned);
    }
  }
}

// Gradients of query, key and value, contiguous, from that of the output and the summaries.
__attribute__((visibility("default"))) void lln_backward(const Call* call, const Side* query,
                                                         const Side* key, const Side* value,
                                                         const Side* gradient, float* summary,
                                                         float* to_query, float* to_key,
                                                         float* to_value) {
  const int64_t all_heads = call->batch * call->heads;
  const int64_t width = call->width, values = call->value_width, block = call->block;
  const int64_t lln = width * (2 + TILE + 2 * values), near = block * (width + values + 2 * TILE);
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    Room room(larger_of(lln, near) + 128);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < all_heads; ++index) {
      const Head head = head_of(*call, index, *query, *key, *value, summary);
      const int64_t b = index / call->heads, h = index % call->heads;
      const Gradients to{gradient->data + b * gradient->batch + h * gradient->head,
                         gradient->token,
                         to_query + index * call->queries * width,
                         to_key + index * call->keys * width,
                         to_value + index * call->keys * values};
      differentiate(head, to, room);
      if (block) differentiate_blocks(head, to, room);
    }
  }
}

// Causal LLN: output, then the normaliser and the shift of every row, ``[B · H, T]`` each. Returns the
// smallest normaliser: with a small one, or NaN, the output is not to be used.
__attribute__((visibility("default"))) float lln_causal_forward(const Call* call, const Side* query,
                                                                const Side* key, const Side* value,
                                                                float* out, float* norm,
                                                                float* shift) {
  const int64_t all_heads = call->batch * call->heads, tokens = call->queries;
  float least = 1.0f;
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    Room room(Walk::floats(*call));
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < all_heads; ++index) {
      const Head head = head_of(*call, index, *query, *key, *value, nullptr);
      const float found = walk_forward(head, out + index * tokens * call->value_width,
                                       norm + index * tokens, shift + index * tokens, room);
#pragma omp critical
      least = smaller_of(found, least);
    }
  }
  return least;
}

// Its gradients, contiguous.
__attribute__((visibility("default"))) void lln_causal_backward(
    const Call* call, const Side* query, const Side* key, const Side* value, const Side* gradient,
    const float* out, const float* norm, float* shift, float* to_query, float* to_key,
    float* to_value) {
  const int64_t all_heads = call->batch * call->heads, tokens = call->queries;
  const int64_t width = call->width, values = call->value_width;
  const int64_t tiles = (tokens + TILE - 1) / TILE;
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    Room room(Walk::floats(*call) + values * (2 * TILE + width) + TILE * (TILE + 1) + 128);
    Room peaks(tiles * width);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < all_heads; ++index) {
      const Head head = head_of(*call, index, *query, *key, *value, nullptr);
      const int64_t b = index / call->heads, h = index % call->heads;
      const Gradients to{gradient->data + b * gradient->batch + h * gradient->head,
                         gradient->token, to_query + index * tokens * width,
                         to_key + index * tokens * width, to_value + index * tokens * values};
      walk_backward(head, to, out + index * tokens * values, norm + index * tokens,
                    shift + index * tokens, peaks.data, room);
    }
  }
}

// α and β of every head by moment matching, as `lln.matching.moments` defines it.
__attribute__((visibility("default"))) void lln_match(const Call* call, const Side* query,
                                                      const Side* key, const Curve* curve,
                                                      float* alphas, float* betas) {
  const int64_t all_heads = call->batch * call->heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(call->threads))
  for (int64_t index = 0; index < all_heads; ++index) {
    const int64_t b = index / call->heads, h = index % call->heads;
    const float* q = query->data + b * query->batch + h * query->head;
    const float* k = key->data + b * key->batch + h * key->head;
    const double width = static_cast<double>(call->width);
    const double query_variance =
        sum_of_squares(q, query->token, call->queries, call->width) / (width * call->queries);
    double key_variance = 0, of_mean = 0;
    Room room(2 * call->width);
    gather_moments(k, key->token, call->keys, call->width, room.data, room.data + call->width);
    for (int64_t d = 0; d < call->width; d += LANES) {
      const lanes mean = load(room.data + d);
      of_mean += sum_of(mean * mean);
      key_variance += sum_of(load(room.data + call->width + d));
    }
    key_variance /= width * call->keys;
    const double key_size = key_variance + of_mean / width;
    // NaN counts as healthy, so that it shows in the result.
    const bool is_flat = query_variance < curve->floor * at_least(query_variance, 1) ||
                         key_variance < curve->floor * at_least(key_size, 1);
    const double spread = matched_spread(*curve, query_variance * key_variance);
    alphas[index] = is_flat ? 1.0f : static_cast<float>(spread / std::sqrt(query_variance));
    betas[index] = is_flat ? 1.0f : static_cast<float>(spread / std::sqrt(key_variance));
  }
}

}  // extern "C"
