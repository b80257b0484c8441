// What the library is asked for, and what a head of it needs.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

extern "C" {

// A tensor [B, H, tokens, channels]; its last stride is 1.
struct Side {
  float* data;
  int64_t batch, head, token;
};

// What to compute. Temperatures are one number each, or one for every head; matching writes them.
// Query heads of a group share a key head. Widths are multiples of 16: of queries and keys only the
// first channels are the caller's, the others are 0.
struct Call {
  int64_t batch, heads, key_heads, queries, keys, width, channels, value_width, threads;
  float *alphas, *betas;
  float alpha, beta;
  // Tokens of a block, 0 = LLN alone; factor of the scores; share of LLN.
  int64_t block;
  float scale, mix;
  // Which keys are seen, ``[B, S]``; null = all.
  const uint8_t* mask;
  // Whether there are blocks alone, whether a token of one sees earlier ones only, and how many tokens
  // its queries see on either side of their own: then blocks are as many rows; -1 = their own block.
  int64_t has_blocks_alone, is_causal, window;
  // Exact keys: how many a group of queries chooses outside its block, how many queries are a group,
  // the number of groups, whether the choice is given, and how many of a float's last bits the
  // queries' type lacks.
  int64_t chosen, group, groups, is_given, dropped_bits;
  // What is added to the slots' logits, like temperatures.
  float* offsets;
  float offset;
  // Pages: how many first tokens every query sees, how many tokens a page has, and how many numbers
  // of a token it is chosen by. The window is above; a query chooses so many pages.
  int64_t sinks, page_size, choice_width;
};

// log s as a polynomial in log p, where p is within the two limits; smaller spreads than the floor
// are rounding noise.
struct Curve {
  double coefficients[5];
  double least, most, floor;
};

}  // extern "C"

namespace {

inline int64_t fewer(int64_t one, int64_t other) { return one < other ? one : other; }
inline int64_t larger_of(int64_t one, int64_t other) { return one > other ? one : other; }

// Keys that the queries of a block meet at most, and some columns more for one that is not whole.
inline int64_t most_columns(const Call& call) {
  const int64_t around = call.window < 0 ? 0 : (call.is_causal ? 1 : 2) * call.window;
  return call.block ? fewer(call.block + around, call.keys) + 16 : 0;
}

inline int64_t key_head_of(const Call& call, int64_t head) {
  return head / (call.heads / call.key_heads);
}

// One head: its temperatures, tensors and summary.
struct Head {
  const Call& call;
  float alpha, beta;
  const float *q, *k, *v;
  int64_t q_row, k_row, v_row;
  // C, then peaks, then masses.
  float *centroid, *peak, *mass;
  // Which of its keys are seen; null = all.
  const uint8_t* mask;
};

Head head_of(const Call& call, int64_t index, const Side& query, const Side& key,
             const Side& value, float* summary) {
  const int64_t b = index / call.heads, h = index % call.heads, of_key = key_head_of(call, h);
  // Causal calls and blocks alone have none.
  float* own = summary ? summary + index * call.width * (call.value_width + 2) : nullptr;
  return {call,
          call.alphas ? call.alphas[index] : call.alpha,
          call.betas ? call.betas[index] : call.beta,
          query.data + b * query.batch + h * query.head,
          key.data + b * key.batch + of_key * key.head,
          value.data + b * value.batch + of_key * value.head,
          query.token,
          key.token,
          value.token,
          own,
          own ? own + call.width * call.value_width : nullptr,
          own ? own + call.width * (call.value_width + 1) : nullptr,
          call.mask ? call.mask + b * call.keys : nullptr};
}

// The gradient of a head's output, and where those of its inputs go.
struct Gradients {
  const float* g;
  int64_t g_row;
  float *to_query, *to_key, *to_value;
};

// Memory of one thread; null where there was none to get.
struct Room {
  float* data;
  int64_t used = 0;
  explicit Room(int64_t floats)
      : data(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 64) / 64 * 64))) {}
  ~Room() { std::free(data); }
  float* take(int64_t floats) {
    float* found = data + used;
    used += (floats + 15) / 16 * 16;
    return found;
  }
};

// Whether a thread got no memory: then the others stop, too.
using Shortage = std::atomic<bool>;

inline bool is_short(Shortage& shortage, const Room& room, const Room& other) {
  if (!room.data || !other.data) shortage = true;
  return shortage;
}

}  // namespace
