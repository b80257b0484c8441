// LLN attention on a CPU in float32, one head after the other from cache.
//
// PyTorch takes a pass over memory for each operation. Here a tile of 64 tokens goes through all of
// them while it is in the cache; the backward pass computes weights again instead of keeping them.
// Every head is computed by one thread, so the result does not depend on the number of threads.
// Threads wait for each other only once, at the end: beside other programs each wait is long.
// Every function returns whether it got the memory for
// its own work; if it did not, what it has written is not to be used.

#include "bidirectional.h"
#include "causal.h"
#include "exact_keys.h"
#include "matching.h"
#include "pages.h"

// The library has each function once per instruction set, `lln_forward_avx2` and so on.
#define JOINED(name, set) name##_##set
#define NAMED(name, set) JOINED(name, set)
#define EXPORTED(name) __attribute__((visibility("default"))) bool NAMED(name, LLN_SET)

extern "C" {

// Output ``[B, H, T, E]`` and summaries ``[B · H, D, E + 2]``, both contiguous; blocks alone have no
// summary. With a curve temperatures are matched on the way, where queries and keys have to come
// into the cache anyway.
EXPORTED(lln_forward)(const Call* call, const Side* query, const Side* key, const Side* value,
                      const Curve* curve, float* out, float* summary) {
  const int64_t all_heads = call->batch * call->heads;
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    const int64_t block = most_columns(*call);
    Room room(call->width + TILE * larger_of(call->width, block) + call->width * block +
              Block::floats(*call) + 64);
    float* level = room.take(call->width);
    float* weight = room.take(TILE * larger_of(call->width, block));
    float* turned = room.take(call->width * block);
    float* block_room = room.take(Block::floats(*call));
    Room seen_room(larger_of(call->mask ? SeenKeys::floats(*call) : 0,
                             curve ? floats_to_match(*call) : 0));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t index = 0; index < all_heads; ++index) {
      if (is_short(shortage, room, seen_room)) continue;
      if (curve) match_head(*call, index, *query, *key, curve, seen_room);
      const Head head = head_of(*call, index, *query, *key, *value, summary);
      bool has_summary = !call->has_blocks_alone;
      if (has_summary && call->mask) {
        const SeenKeys seen(head, seen_room);
        has_summary = seen.call.keys > 0;
        if (has_summary) summarise(seen.of(head), weight);
      } else if (has_summary) {
        summarise(head, weight);
      }
      read(head, has_summary, out + index * call->queries * call->value_width, level,
           weight, turned, block_room);
    }
  }
  return !shortage;
}

// Gradients of query, key and value, contiguous, from that of the output and the summaries. Those of
// keys and values are one for every query head.
EXPORTED(lln_backward)(const Call* call, const Side* query, const Side* key, const Side* value,
                       const Side* gradient, float* summary, float* to_query, float* to_key,
                       float* to_value) {
  const int64_t all_heads = call->batch * call->heads;
  const int64_t width = call->width, values = call->value_width;
  const int64_t lln = width * (2 + 3 * TILE + 3 * values);
  const int64_t near = most_columns(*call) * 2 * (width + values + TILE) + Block::floats(*call);
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    Room room(larger_of(lln, near) + 128);
    Room seen_room(call->mask ? 2 * SeenKeys::floats(*call) : 0);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t index = 0; index < all_heads; ++index) {
      if (is_short(shortage, room, seen_room)) continue;
      const Head head = head_of(*call, index, *query, *key, *value, summary);
      const int64_t b = index / call->heads, h = index % call->heads;
      const Gradients to{gradient->data + b * gradient->batch + h * gradient->head,
                         gradient->token,
                         to_query + index * call->queries * width,
                         to_key + index * call->keys * width,
                         to_value + index * call->keys * values};
      if (call->has_blocks_alone) {
        differentiate_nothing(*call, to);
      } else if (call->mask) {
        const SeenKeys seen(head, seen_room);
        float* of_key = seen_room.take(call->keys * width);
        float* of_value = seen_room.take(call->keys * values);
        if (seen.call.keys) {
          differentiate(seen.of(head), {to.g, to.g_row, to.to_query, of_key, of_value}, room);
          SeenKeys::spread(head, width, of_key, to.to_key);
          SeenKeys::spread(head, values, of_value, to.to_value);
        } else {
          differentiate_nothing(*call, to);
        }
      } else {
        differentiate(head, to, room);
      }
      if (call->block) differentiate_blocks(head, to, room);
    }
  }
  return !shortage;
}

// Causal LLN: output, then the normaliser and the shift of every row, ``[B · H, T]`` each, and the
// smallest normaliser of every head: with a small one, or NaN, its output is not to be used.
EXPORTED(lln_causal_forward)(const Call* call, const Side* query, const Side* key,
                             const Side* value, float* out, float* norm, float* shift,
                             float* least) {
  const int64_t all_heads = call->batch * call->heads, tokens = call->queries;
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    Room room(Walk::floats(*call));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t index = 0; index < all_heads; ++index) {
      if (is_short(shortage, room, room)) continue;
      const Head head = head_of(*call, index, *query, *key, *value, nullptr);
      least[index] = walk_forward(head, out + index * tokens * call->value_width,
                                  norm + index * tokens, shift + index * tokens, room);
    }
  }
  return !shortage;
}

// Its gradients, contiguous.
EXPORTED(lln_causal_backward)(const Call* call, const Side* query, const Side* key,
                              const Side* value, const Side* gradient, const float* out,
                              const float* norm, float* shift, float* to_query, float* to_key,
                              float* to_value) {
  const int64_t all_heads = call->batch * call->heads, tokens = call->queries;
  const int64_t width = call->width, values = call->value_width;
  const int64_t tiles = (tokens + TILE - 1) / TILE;
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    Room room(Walk::floats(*call) + values * (4 * TILE + width) + TILE * (TILE + width + 1) +
              256);
    Room peaks(tiles * width);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t index = 0; index < all_heads; ++index) {
      if (is_short(shortage, room, peaks)) continue;
      const Head head = head_of(*call, index, *query, *key, *value, nullptr);
      const int64_t b = index / call->heads, h = index % call->heads;
      const Gradients to{gradient->data + b * gradient->batch + h * gradient->head,
                         gradient->token, to_query + index * tokens * width,
                         to_key + index * tokens * width, to_value + index * tokens * values};
      walk_backward(head, to, out + index * tokens * values, norm + index * tokens,
                    shift + index * tokens, peaks.data, room);
    }
  }
  return !shortage;
}

// Attention with exact keys, choice included: the output, wherever its rows lie, and the tokens that
// are chosen, ``[B · H, G, K]`` without gaps, -1 = none. The call may give them instead. Without an
// output nothing attends; without memory for them they are not told.
EXPORTED(lln_keys_forward)(const Call* call, const Side* query, const Side* key, const Side* value,
                   const Side* out, int64_t* indices) {
  const int64_t all_heads = call->batch * call->heads;
  // Of fewer heads than threads parts are computed side by side, each with what it needs of the head.
  const int64_t wanted = (call->threads + all_heads - 1) / all_heads;
  const int64_t parts = larger_of(fewer(wanted, call->groups / KeyHead::CHOOSERS), 1);
  const int64_t in_part = (call->groups + parts - 1) / parts;
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    Room room(KeyHead::floats(*call)), seen_room(SeenKeys::floats(*call));
    Room summary(call->width * (call->value_width + 2));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < all_heads * parts; ++item) {
      if (is_short(shortage, room, seen_room) || is_short(shortage, summary, room)) continue;
      const int64_t index = item / parts, first = item % parts * in_part;
      Head head = head_of(*call, index, *query, *key, *value, nullptr);
      head.centroid = summary.data;
      head.peak = summary.data + call->width * call->value_width;
      head.mass = head.peak + call->width;
      const SeenKeys seen(head, seen_room);
      room.used = 0;
      KeyHead own(head, seen, room);
      const int64_t b = index / call->heads, h = index % call->heads;
      own.run(first, fewer(first + in_part, call->groups),
              call->offsets ? call->offsets[index] : call->offset,
              indices ? indices + index * call->groups * call->chosen : nullptr,
              out ? out->data + b * out->batch + h * out->head : nullptr, out ? out->token : 0);
    }
  }
  return !shortage;
}

// Its gradients, contiguous, from that of the output and the keys that were chosen; also those of α, β
// and the offset, ``[3, B · H]``. Those of keys and values are one for every query head.
EXPORTED(lln_keys_backward)(const Call* call, const Side* query, const Side* key,
                            const Side* value, const Side* gradient, int64_t* indices,
                            float* to_numbers, float* to_query, float* to_key, float* to_value) {
  const int64_t all_heads = call->batch * call->heads;
  const int64_t width = call->width, values = call->value_width;
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    Room room(KeyHead::floats(*call) + KeyGradients::floats(*call) + width * (values + 2));
    Room seen_room((call->mask ? 2 : 1) * SeenKeys::floats(*call));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t index = 0; index < all_heads; ++index) {
      if (is_short(shortage, room, seen_room)) continue;
      Head head = head_of(*call, index, *query, *key, *value, nullptr);
      const int64_t b = index / call->heads, h = index % call->heads;
      const Gradients all{gradient->data + b * gradient->batch + h * gradient->head,
                          gradient->token, to_query + index * call->queries * width,
                          to_key + index * call->keys * width,
                          to_value + index * call->keys * values};
      differentiate_nothing(*call, all);
      room.used = 0;
      head.centroid = room.take(width * (values + 2));
      head.peak = head.centroid + width * values, head.mass = head.peak + width;
      const SeenKeys seen(head, seen_room);
      Gradients to = all;
      if (call->mask) {
        to.to_key = seen_room.take(call->keys * width);
        to.to_value = seen_room.take(call->keys * values);
        std::memset(to.to_key, 0, 4 * call->keys * width);
        std::memset(to.to_value, 0, 4 * call->keys * values);
      }
      KeyHead own(head, seen, room);
      KeyGradients found(to, *call, room);
      own.gradients = &found;
      const float offset = call->offsets ? call->offsets[index] : call->offset;
      own.run(0, call->groups, offset, indices + index * call->groups * call->chosen, nullptr, 0);
      float* numbers = to_numbers + index;
      own.differentiate_slots(room, numbers, numbers + all_heads, numbers + 2 * all_heads);
      if (!call->mask) continue;
      SeenKeys::spread(head, width, to.to_key, all.to_key);
      SeenKeys::spread(head, values, to.to_value, all.to_value);
    }
  }
  return !shortage;
}

// Attention to a window, sinks and pages, choice included: the output, wherever its rows lie, and the
// numbers of the pages, ``[B, Hk, T, P]``, -1 = none. The call may give them instead. Without an output
// nothing attends; without memory for them they are not told.
EXPORTED(lln_pages_forward)(const Call* call, const Side* query, const Side* key, const Side* value,
                            const Side* choice_query, const Side* choice_key, const Side* out,
                            int64_t* pages) {
  const int64_t heads = call->batch * call->key_heads, tile = PageHead::queries_in_tile(*call);
  const int64_t tiles = (call->queries + tile - 1) / tile;
  // Parts of heads, so that no thread has nothing to do for long; each puts together what it reads.
  const int64_t wanted = (4 * call->threads + heads - 1) / heads;
  const int64_t parts = call->threads > 1 ? fewer(wanted, tiles) : 1;
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    Room room(PageHead::floats(*call));
    PageHead own(*call, query, key, value, choice_query, choice_key, room);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < heads * parts; ++item) {
      if (is_short(shortage, room, room)) continue;
      const int64_t index = item / parts, part = item % parts;
      own.open(index);
      const int64_t h = index % call->key_heads * (call->heads / call->key_heads);
      own.run(tiles * part / parts, tiles * (part + 1) / parts,
              pages ? pages + index * call->queries * call->chosen : nullptr,
              out ? out->data + index / call->key_heads * out->batch + h * out->head : nullptr, out);
    }
  }
  return !shortage;
}

// α and β of every head by moment matching, as `lln.matching.moments` defines it.
EXPORTED(lln_match)(const Call* call, const Side* query, const Side* key, const Curve* curve) {
  const int64_t all_heads = call->batch * call->heads;
  Shortage shortage{false};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
  {
    const WithoutTinyNumbers without_tiny_numbers;
    Room room(floats_to_match(*call));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t index = 0; index < all_heads; ++index)
      if (!is_short(shortage, room, room)) match_head(*call, index, *query, *key, curve, room);
  }
  return !shortage;
}

}  // extern "C"
