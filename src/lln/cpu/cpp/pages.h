// Attention to a window, sinks and pages (`lln.eager.page_choice`, `lln.eager.page_attention`).
//
// Tokens are counted from the first one that is seen. The choice looks at pages side by side: keys
// that are as far into their pages lie in one vector, a page per lane, so the best token of each is
// found while scores are in registers, and no score of a far token is ever stored. Only those of
// tokens near the windows' edges are, which some queries of a tile may choose and others see anyway.
//
// What is then read are units of 16 tokens, each with a bit per token that a query sees. A unit is put
// together when it is first needed: keys one column per token, then the rows of values. While it is in
// the cache all queries of the tile that see some of it read it, with all heads of the key head; for
// each query units come in their order, so its output depends on nothing but what it sees.
#pragma once

#include "call.h"
#include "choice.h"
#include "tiles.h"

namespace {

// Numbers that a loop adds up at a time and still finds registers for what it multiplies.
constexpr int SUMS = LANES == 16 ? 24 : 12;

constexpr int power_below(int number) { return number < 2 ? 1 : 2 * power_below(number / 2); }

// Tokens of a head, wherever they lie: floats, or the first halves of floats.
struct TokenRows {
  const char* data;
  int64_t step;
  bool is_short;

  TokenRows(const Side& side, int64_t batch, int64_t head, bool short_numbers)
      : is_short(short_numbers) {
    const int64_t bytes = is_short ? 2 : 4;
    data = reinterpret_cast<const char*>(side.data) + (batch * side.batch + head * side.head) * bytes;
    step = side.token * bytes;
  }

  lanes numbers(const char* from) const {
    if (!is_short) return load(reinterpret_cast<const float*>(from));
    typedef uint16_t short_lanes __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    const auto halves = *reinterpret_cast<const short_lanes*>(from);
    const whole_lanes bits = __builtin_convertvector(halves, whole_lanes) << 16;
    lanes found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
  }

  // One of them as floats, times a factor.
  void read(int64_t row, int64_t width, float factor, float* to) const {
    const char* from = data + row * step;
    for (int64_t d = 0; d < width; d += LANES)
      store(to + d, numbers(from + d * (is_short ? 2 : 4)) * factor);
  }

  // The same with NaN in place of infinity, which a softmax may hide.
  void read_openly(int64_t row, int64_t width, float factor, float* to) const {
    const char* from = data + row * step;
    for (int64_t d = 0; d < width; d += LANES) {
      const lanes own = numbers(from + d * (is_short ? 2 : 4));
      store(to + d, own * factor + unless_finite(own));
    }
  }

  // Asks for one.
  void fetch(int64_t row, int64_t width) const {
    for (int64_t at = 0; at < width * (is_short ? 2 : 4); at += 64)
      __builtin_prefetch(data + row * step + at);
  }
};

// The largest of two, and NaN if one of them is.
inline lanes peak_of(lanes one, lanes other) { return one == one ? larger(one, other) : one; }

// The largest of some numbers, each with what is added to it; NaN if one of them is.
inline float peak_of(const float* numbers, const float* added, int64_t count) {
  if (count >= LANES) {
    lanes top = all(LOWEST);
    for (int64_t j = 0; j < count; j += LANES) {
      // The last ones may come a second time.
      const int64_t at = fewer(j, count - LANES);
      top = peak_of(top, load(numbers + at) + load(added + at));
    }
    const lanes none = top == top ? all(0.0f) : top;
    return largest_of(top) + sum_of(none);
  }
  float top = LOWEST;
  for (int64_t j = 0; j < count; ++j) {
    const float own = numbers[j] + added[j];
    if (!(own <= top) && top == top) top = own;
  }
  return top;
}

// Work on as many rows or columns at a time as a product takes, and on what is left by fewer.
// ``work(number, first)`` gets the number as a type.
template <int MOST, class Work>
inline void by_parts(int64_t count, const Work& work, int64_t first = 0) {
  for (; first + MOST <= count; first += MOST)
    work(std::integral_constant<int, MOST>{}, first);
  if constexpr (MOST > 1) by_parts<power_below(MOST - 1)>(count, work, first);
}

// The scores of R queries with P tokens of as many pages as there are lanes. To the best ones so far
// come these, and to the sums whatever is NaN. The first row of ``right`` is added to the scores.
template <int R, int P>
inline void find_best(int64_t depth, const float* left, const float* right, float* best, float* sums) {
  lanes score[R][P];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) score[r][p] = load(right + p * LANES);
  for (int64_t k = 0; k < depth; ++k) {
    right += P * LANES;
    lanes of_right[P];
    for (int p = 0; p < P; ++p) of_right[p] = load(right + p * LANES);
    for (int r = 0; r < R; ++r) {
      const float of_left = left[r * depth + k];
      for (int p = 0; p < P; ++p) score[r][p] += of_left * of_right[p];
    }
  }
  for (int r = 0; r < R; ++r) {
    lanes top = load(best + r * LANES), sum = load(sums + r * LANES);
    for (int p = 0; p < P; ++p) {
      top = larger(score[r][p], top);
      // Hidden tokens have minus infinity, which is no NaN beside plus infinity.
      sum += larger(all(0.0f), score[r][p]);
    }
    store(best + r * LANES, top);
    store(sums + r * LANES, sum);
  }
}

// The keys of a key head and the queries that share it, of one head after the other.
struct PageHead {
  static constexpr int64_t UNIT = 16, MOST_ROWS = 48, HEADS_AT_ONCE = 4;
  static constexpr uint16_t WHOLE = 0xffff;

  const Call& call;
  const Side *query, *key, *value, *choice_query, *choice_key;
  int64_t shared, tile, size, depth, width, values;
  // Of one head: which, of which sample; where its first seen token is, how many tokens, pages and
  // units there are from there on.
  int64_t head = -1, sample = 0, first = 0, count = 0, pages = 0, units = 0;
  // Whether what is put together is kept for other queries.
  bool keeps;
  // What is added to the scores of a token in the choice, minus infinity if it is not to be chosen, and
  // to those of a sink; pages side by side, units, and which of both are there; their seen tokens.
  float *hides, *hidden_sinks, *panels, *units_read, *rows;
  uint8_t *has_panel, *has_unit;
  uint16_t* seen;
  // Of a tile: the queries that choose, what they see near them and its scores, how large the largest
  // of these is; the best scores of a panel, of all pages; what is chosen.
  float *chooser, *near, *near_scores, *levels, *best, *sums, *scores;
  int64_t* chosen;
  // The rows of some heads, one column per row; weights, what they are divided by, and outputs so far.
  float *asking, *weight, *totals, *found;
  // Which queries read a unit; for each query which of its tokens, how many units in all, how many of
  // these came so far, and where its weights are.
  uint64_t* readers;
  uint16_t* bits;
  int64_t *touched, *passed, *places;
  // The units up to the last that is read.
  int64_t end_unit = 0;
  Choice choice;

  static int64_t queries_in_tile(const Call& call) {
    return fewer(larger_of(MOST_ROWS / (call.heads / call.key_heads), 1), call.queries);
  }
  static int64_t pages_in(const Call& call) {
    return (call.keys + call.page_size - 1) / call.page_size;
  }
  static int64_t panels_in(const Call& call) { return (pages_in(call) + LANES - 1) / LANES; }
  static int64_t units_in(const Call& call) { return (call.keys + UNIT - 1) / UNIT; }
  static int64_t panel_floats(const Call& call) {
    return call.page_size * LANES * (call.choice_width + 1);
  }
  static int64_t unit_floats(const Call& call) { return UNIT * (call.width + call.value_width); }
  // Tokens that the queries of a tile see near them, to the ends of pages, and sinks before them.
  static int64_t near_columns(const Call& call) {
    const int64_t around = 2 * (call.window + call.page_size) + queries_in_tile(call);
    return (fewer(around, call.keys) + fewer(call.sinks, call.keys) + 64) / 16 * 16;
  }
  static bool is_kept(const Call& call) { return queries_in_tile(call) < call.queries; }

  static int64_t floats(const Call& call) {
    const int64_t shared = call.heads / call.key_heads, tile = queries_in_tile(call);
    const int64_t in_tile = tile * shared, all_units = units_in(call), columns = near_columns(call);
    const int64_t all_scores = panels_in(call) * LANES + 16;
    return 2 * call.keys + (is_kept(call) ? panels_in(call) : 1) * panel_floats(call) +
           all_units * unit_floats(call) + 16 * larger_of(call.choice_width, call.width) +
           panels_in(call) + 4 * all_units + tile * all_units +
           in_tile * (call.choice_width + columns + 1 + 2 * LANES) + call.choice_width * columns +
           tile * (all_scores + 2 * call.chosen + 6) + Choice::floats(all_scores) +
           tile * fewer(shared, HEADS_AT_ONCE) * (call.width + all_units * UNIT + 1 + call.value_width) +
           1024;
  }

  PageHead(const Call& asked, const Side* q, const Side* k, const Side* v, const Side* choice_q,
           const Side* choice_k, Room& room)
      : call(asked),
        query(q),
        key(k),
        value(v),
        choice_query(choice_q),
        choice_key(choice_k),
        shared(asked.heads / asked.key_heads),
        tile(queries_in_tile(asked)),
        size(asked.page_size),
        depth(asked.choice_width),
        width(asked.width),
        values(asked.value_width),
        keeps(is_kept(asked)),
        hides(room.take(asked.keys)),
        hidden_sinks(room.take(fewer(asked.sinks, asked.keys))),
        panels(room.take((keeps ? panels_in(asked) : 1) * panel_floats(asked))),
        units_read(room.take(units_in(asked) * unit_floats(asked))),
        rows(room.take(16 * larger_of(depth, width))),
        has_panel(reinterpret_cast<uint8_t*>(room.take(panels_in(asked)))),
        has_unit(reinterpret_cast<uint8_t*>(room.take(units_in(asked)))),
        seen(reinterpret_cast<uint16_t*>(room.take(units_in(asked)))),
        chooser(room.take(tile * shared * depth)),
        near(room.take(near_columns(asked) * depth)),
        near_scores(room.take(near_columns(asked) * tile * shared)),
        levels(room.take(tile * shared)),
        best(room.take(tile * shared * LANES)),
        sums(room.take(tile * shared * LANES)),
        scores(room.take(tile * (panels_in(asked) * LANES + 16))),
        chosen(reinterpret_cast<int64_t*>(room.take(2 * tile * asked.chosen))),
        asking(room.take(rows_at_once() * width)),
        weight(room.take(rows_at_once() * units_in(asked) * UNIT)),
        totals(room.take(rows_at_once())),
        found(room.take(rows_at_once() * values)),
        readers(reinterpret_cast<uint64_t*>(room.take(2 * units_in(asked)))),
        bits(reinterpret_cast<uint16_t*>(room.take((tile * units_in(asked) + 1) / 2))),
        touched(reinterpret_cast<int64_t*>(room.take(2 * tile))),
        passed(reinterpret_cast<int64_t*>(room.take(2 * tile))),
        places(reinterpret_cast<int64_t*>(room.take(2 * tile))),
        choice(fewer(asked.chosen, pages_in(asked)), panels_in(asked) * LANES + 16, room) {}

  // Turn to a key head of all samples.
  void open(int64_t index) {
    if (index == head) return;
    head = index, sample = index / call.key_heads, first = 0;
    std::memset(readers, 0, 8 * units_in(call));
    std::memset(bits, 0, 2 * tile * units_in(call));
    const uint8_t* mask = call.mask ? call.mask + sample * call.keys : nullptr;
    while (mask && first < call.keys && !mask[first]) ++first;
    count = call.keys - first;
    pages = (count + size - 1) / size, units = (count + UNIT - 1) / UNIT;
    std::memset(has_panel, 0, panels_in(call));
    std::memset(has_unit, 0, units);
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t there = fewer(UNIT, count - unit * UNIT);
      seen[unit] = static_cast<uint16_t>((1u << there) - 1);
      for (int64_t n = 0; mask && n < there; ++n)
        if (!mask[first + unit * UNIT + n]) seen[unit] &= ~(1u << n);
    }
    for (int64_t j = 0; j < count; ++j) {
      hides[j] = j < call.sinks || !is_seen(j) ? LOWEST : 0.0f;
      if (j < call.sinks) hidden_sinks[j] = is_seen(j) ? 0.0f : LOWEST;
    }
  }

  bool is_seen(int64_t j) const { return seen[j / UNIT] >> j % UNIT & 1; }
  // Where a query is among the tokens.
  int64_t place_of(int64_t row) const { return call.keys - call.queries + row - first; }
  int64_t key_head() const { return head % call.key_heads; }
  int64_t rows_at_once() const { return tile * fewer(shared, HEADS_AT_ONCE); }
  TokenRows rows_of(const Side* side, int64_t of) const {
    return TokenRows(*side, sample, of, call.dropped_bits == 16);
  }

  // Choice keys, one column per token, of which each is given by its number among the lanes; those that
  // are hidden are zero.
  template <class Token>
  void turn_choice_keys(const Token& token, float* to, int64_t to_row) const {
    const TokenRows from = rows_of(choice_key, key_head());
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t j = token(lane);
      if (j < 0) std::memset(rows + lane * depth, 0, 4 * depth);
      else from.read_openly(first + j, depth, 1.0f, rows + lane * depth);
    }
    for (int64_t d = 0; d < depth; d += LANES)
      transpose_square(rows + d, depth, to + d * to_row, to_row);
  }

  // Pages side by side.
  const float* panel(int64_t number) {
    float* to = panels + (keeps ? number : 0) * panel_floats(call);
    if (has_panel[number]) return to;
    has_panel[number] = keeps;
    const TokenRows from = rows_of(choice_key, key_head());
    by_parts<PACKS>(size, [&](auto pack, int64_t start) {
      float* own = to + start * LANES * (depth + 1);
      for (int p = 0; p < pack; ++p) {
        const auto token = [&](int lane) {
          const int64_t j = (number * LANES + lane) * size + start + p;
          return j < count && hides[j] == 0 ? j : -1;
        };
        for (int lane = 0; lane < LANES; ++lane) {
          own[p * LANES + lane] = token(lane) < 0 ? LOWEST : 0.0f;
          // The next panel comes in the meantime.
          from.fetch(first + ((number + 1) * size + start + p) * LANES + lane, depth);
        }
        turn_choice_keys(token, own + (pack + p) * LANES, pack * LANES);
      }
    });
    return to;
  }

  const float* unit(int64_t number) {
    float* to = units_read + number * unit_floats(call);
    if (has_unit[number]) return to;
    has_unit[number] = 1;
    const TokenRows k = rows_of(key, key_head()), v = rows_of(value, key_head());
    float* to_values = to + UNIT * width;
    for (int64_t n = 0; n < UNIT; ++n) {
      const int64_t j = number * UNIT + n;
      if (seen[number] >> n & 1) {
        k.read_openly(first + j, width, 1.0f, rows + n * width);
        v.read(first + j, values, 1.0f, to_values + n * values);
      } else {
        std::memset(rows + n * width, 0, 4 * width);
      }
    }
    for (int64_t n = 0; n < UNIT; n += LANES)
      for (int64_t d = 0; d < width; d += LANES)
        transpose_square(rows + n * width + d, width, to + d * UNIT + n, UNIT);
    return to;
  }

  // The pages of the queries start … end, ascending, ``[end - start, P]``; -1 = none.
  void choose(int64_t start, int64_t end) {
    const int64_t wanted = call.chosen, queries = end - start, row = panels_in(call) * LANES + 16;
    const int64_t left = place_of(start), right = place_of(end - 1);
    for (int64_t n = 0; n < queries * wanted; ++n) chosen[n] = -1;
    // Tokens from here to there are near one of the queries, to the ends of pages.
    const auto page_from = [&](int64_t j) { return fewer(larger_of(j, 0) / size, pages); };
    const int64_t near_page = page_from(left - call.window);
    const int64_t behind = call.is_causal ? right : right + call.window;
    const int64_t end_page = behind < 0 ? 0 : fewer(behind / size + 1, pages);
    const int64_t all_pages = call.is_causal ? end_page : pages;
    const bool is_far = right - call.window > call.sinks ||
                        (!call.is_causal && left + call.window + 1 < count);
    if (!choice.most || !is_far) return;
    for (int64_t h = 0; h < shared; ++h) {
      const TokenRows from = rows_of(choice_query, key_head() * shared + h);
      for (int64_t i = 0; i < queries; ++i)
        from.read_openly(start + i, depth, call.scale, chooser + (i * shared + h) * depth);
    }
    const Near seen_near(*this, queries, left, near_page, end_page);
    for (int64_t n = 0; n * LANES < all_pages; ++n) {
      const bool is_near = n * LANES >= near_page && fewer((n + 1) * LANES, all_pages) <= end_page;
      if (!is_near) look_at_panel(queries, n, row);
    }
    // The pages near the queries come last: panels hold some of them, too.
    for (int64_t i = 0; i < queries; ++i)
      for (int64_t page = near_page; page < end_page; ++page)
        scores[i * row + page] = seen_near.score_of(i, page);
    for (int64_t i = 0; i < queries; ++i) {
      int64_t* own = chosen + i * wanted;
      for (int64_t n = choice.of(scores + i * row, all_pages, own); n < wanted; ++n) own[n] = -1;
    }
  }

  // What the queries of a tile see anyway, and pages that are partly among that.
  struct Near {
    const PageHead& own;
    int64_t left, begin, stop, sink_columns, columns;

    Near(const PageHead& whole, int64_t queries, int64_t first_place, int64_t page, int64_t end_page)
        : own(whole), left(first_place), begin(page * own.size) {
      const int64_t sinks = fewer(own.call.sinks, own.count);
      stop = larger_of(begin, fewer(end_page * own.size, own.count));
      sink_columns = (sinks + 15) / 16 * 16;
      columns = sink_columns + (stop - begin + 15) / 16 * 16;
      for (int64_t c = 0; c < sink_columns; c += LANES)
        own.turn_choice_keys([&](int n) { return c + n < sinks && own.is_seen(c + n) ? c + n : -1; },
                             own.near + c, columns);
      for (int64_t c = sink_columns; c < columns; c += LANES)
        own.turn_choice_keys(
            [&](int n) {
              const int64_t j = begin + c - sink_columns + n;
              return j < stop && own.hides[j] == 0 ? j : -1;
            },
            own.near + c, columns);
      product(queries * own.shared, columns, own.depth, {own.chooser, own.depth, 1}, own.near, columns,
              own.near_scores, columns, 1.0f, false);
      for (int64_t r = 0; r < queries * own.shared; ++r) {
        const int64_t at = left + r / own.shared;
        const int64_t known = own.call.is_causal ? fewer(larger_of(at + 1, 0), sinks) : sinks;
        float level = peak_of(own.near_scores + r * columns, own.hidden_sinks, known);
        const int64_t from = near_from(at);
        const float other = peak_of(scores_of(r) + from, own.hides + from, near_to(at) - from);
        if (level == level && !(other <= level)) level = other;
        // One head needs no comparison.
        own.levels[r] = own.shared > 1 && level > LOWEST ? level : 0.0f;
      }
    }

    // The tokens from … to are in the window of a place.
    int64_t near_from(int64_t at) const {
      return fewer(larger_of(at - own.call.window, begin), stop);
    }
    int64_t near_to(int64_t at) const {
      const int64_t last = own.call.is_causal ? at : at + own.call.window;
      return fewer(larger_of(last + 1, near_from(at)), stop);
    }

    // Those of a row with the token 0 and so on, of which some are there.
    const float* scores_of(int64_t r) const {
      return own.near_scores + r * columns + sink_columns - begin;
    }

    float score_of(int64_t i, int64_t page) const {
      const int64_t first = page * own.size, end = fewer(first + own.size, own.count);
      const int64_t before = fewer(end, near_from(left + i));
      const int64_t behind = own.call.is_causal ? end : larger_of(first, near_to(left + i));
      if (before <= first && behind >= end) return LOWEST;
      float score = LOWEST;
      for (int64_t r = i * own.shared; r < (i + 1) * own.shared; ++r)
        for (int side = 0; side < 2; ++side) {
          const int64_t from = side ? behind : first, to = side ? end : before;
          const float found = peak_of(scores_of(r) + from, own.hides + from, to - from) - own.levels[r];
          if (score == score && !(found <= score)) score = found;
        }
      return score;
    }
  };

  // The scores of the pages of a panel, where all their tokens are far.
  void look_at_panel(int64_t queries, int64_t number, int64_t row) {
    const float* keys = panel(number);
    const int64_t rows_here = queries * shared;
    for (int64_t r = 0; r < rows_here; ++r)
      store(best + r * LANES, all(LOWEST)), store(sums + r * LANES, all(0.0f));
    by_parts<PACKS>(size, [&](auto pack, int64_t start) {
      const float* own = keys + start * LANES * (depth + 1);
      by_parts<ROWS>(rows_here, [&](auto together, int64_t r) {
        find_best<together, pack>(depth, chooser + r * depth, own, best + r * LANES, sums + r * LANES);
      });
    });
    for (int64_t i = 0; i < queries; ++i) {
      lanes found = all(LOWEST);
      for (int64_t r = i * shared; r < (i + 1) * shared; ++r) {
        const lanes sum = load(sums + r * LANES);
        const lanes own = sum == sum ? load(best + r * LANES) : sum;
        found = peak_of(found, own - levels[r]);
      }
      store(scores + i * row + number * LANES, found);
    }
  }

  // Lets a query of the tile read the tokens from … to of those that it may see.
  void touch(int64_t i, int64_t from, int64_t to, int64_t visible) {
    from = larger_of(from, 0), to = fewer(to, visible);
    for (int64_t next; from < to; from = next) {
      const int64_t number = from / UNIT, begin = number * UNIT;
      next = fewer(begin + UNIT, to);
      const uint32_t own = ((1u << (next - begin)) - (1u << (from - begin))) & seen[number];
      if (!own) continue;
      uint16_t& known = bits[i * units + number];
      if (!known) ++touched[i], readers[number] |= uint64_t{1} << i;
      known |= own;
      end_unit = larger_of(end_unit, number + 1);
    }
  }

  // ``work(unit, queries that read it, how many)`` for all units of the tile, in their order.
  template <class Work>
  void by_units(const Work& work) {
    int64_t who[64];
    for (int64_t number = 0; number < end_unit; ++number) {
      int64_t count_here = 0;
      for (uint64_t left = readers[number]; left; left &= left - 1)
        who[count_here++] = __builtin_ctzll(left);
      if (!count_here) continue;
      work(number, who, count_here);
      for (int64_t n = 0; n < count_here; ++n) passed[who[n]] += UNIT;
    }
  }

  // The queries start … end, which have chosen their pages, into out, which is that of their first head.
  void attend(int64_t start, int64_t end, const int64_t* own_pages, float* out, const Side& of_out) {
    const int64_t queries = end - start;
    end_unit = 0;
    for (int64_t i = 0; i < queries; ++i, own_pages += call.chosen) {
      const int64_t at = place_of(start + i), visible = call.is_causal ? fewer(at + 1, count) : count;
      touched[i] = 0;
      touch(i, 0, call.sinks, visible);
      for (int64_t n = 0; n < call.chosen; ++n)
        if (own_pages[n] >= 0 && own_pages[n] < pages)
          touch(i, own_pages[n] * size, (own_pages[n] + 1) * size, visible);
      touch(i, at - call.window, at + call.window + 1, visible);
    }
    // As many heads each time as there are times for.
    const int64_t times = (shared + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    for (int64_t n = 0; n < times; ++n) {
      const int64_t h = shared * n / times, heads = shared * (n + 1) / times - h;
      if (heads == 1) attend_heads<1>(start, queries, h, out, of_out);
      if (heads == 2) attend_heads<2>(start, queries, h, out, of_out);
      if (heads == 3) attend_heads<3>(start, queries, h, out, of_out);
      if (heads == 4) attend_heads<4>(start, queries, h, out, of_out);
    }
    for (int64_t number = 0; number < end_unit; ++number) {
      for (uint64_t left = readers[number]; left; left &= left - 1)
        bits[__builtin_ctzll(left) * units + number] = 0;
      readers[number] = 0;
    }
  }

  // R heads from h on.
  template <int R>
  void attend_heads(int64_t start, int64_t queries, int64_t h, float* out, const Side& of_out) {
    // Of one head sums would wait for each other.
    constexpr int HALVES = 2 * R * GROUP <= SUMS ? 2 : 1;
    constexpr int TOGETHER = SUMS / (HALVES * R * GROUP);
    constexpr int STRIP = power_below(SUMS / R);
    const int64_t columns = queries * R;
    for (int r = 0; r < R; ++r) {
      const TokenRows from = rows_of(query, key_head() * shared + h + r);
      for (int64_t i = 0; i < queries; ++i) {
        from.read_openly(start + i, width, call.scale, rows);
        for (int64_t d = 0; d < width; ++d) asking[d * columns + i * R + r] = rows[d];
      }
    }
    for (int64_t i = 0; i < queries; ++i) {
      places[i] = i ? places[i - 1] + R * touched[i - 1] * UNIT : 0;
      passed[i] = 0;
    }
    by_units([&](int64_t number, const int64_t* who, int64_t readers_here) {
      const float* keys = unit(number);
      by_parts<power_below(TOGETHER)>(readers_here, [&](auto together, int64_t n) {
        score_unit<R, together, HALVES>(keys, who + n, columns);
      });
      for (int64_t n = 0; n < readers_here; ++n) {
        const int64_t i = who[n], row = touched[i] * UNIT;
        uint32_t hidden = WHOLE ^ bits[i * units + number];
        for (; hidden; hidden &= hidden - 1)
          for (int r = 0; r < R; ++r)
            weight[places[i] + r * row + passed[i] + __builtin_ctz(hidden)] = NEVER;
      }
    });
    for (int64_t i = 0; i < queries; ++i) {
      raise(touched[i] ? R : 0, touched[i] * UNIT, weight + places[i], totals + i * R);
      passed[i] = 0;
    }
    std::memset(found, 0, 4 * columns * values);
    by_units([&](int64_t number, const int64_t* who, int64_t readers_here) {
      const float* own = unit(number) + UNIT * width;
      by_strips<(STRIP < GROUP ? GROUP : STRIP < WIDEST ? STRIP : WIDEST)>(
          values, [&](auto vectors, int64_t e) {
            for (int64_t n = 0; n < readers_here; ++n)
              add_values<R, vectors>(own + e, who[n], bits[who[n] * units + number], e);
          });
    });
    for (int64_t i = 0; i < queries; ++i)
      for (int r = 0; r < R; ++r) {
        float* to = out + (start + i) * of_out.token + (h + r) * of_out.head;
        const lanes share = all(touched[i] ? 1.0f / totals[i * R + r] : 0.0f);
        for (int64_t e = 0; e < values; e += LANES)
          store(to + e, load(found + (i * R + r) * values + e) * share);
      }
  }

  // The scores of R heads of Q queries with the tokens of a unit.
  template <int R, int Q, int HALVES>
  void score_unit(const float* keys, const int64_t* who, int64_t columns) {
    lanes score[HALVES][Q][R][GROUP];
    const float* q[Q];
    for (int n = 0; n < Q; ++n) {
      q[n] = asking + who[n] * R;
      for (int half = 0; half < HALVES; ++half)
        for (int r = 0; r < R; ++r)
          for (int g = 0; g < GROUP; ++g) score[half][n][r][g] = all(0.0f);
    }
    const int64_t depth_here = width;
    int64_t at = 0;
    for (int64_t d = 0; d < depth_here; d += HALVES)
      for (int half = 0; half < HALVES; ++half, keys += UNIT, at += columns)
        for (int g = 0; g < GROUP; ++g) {
          const lanes k = load(keys + g * LANES);
          for (int n = 0; n < Q; ++n)
            for (int r = 0; r < R; ++r) score[half][n][r][g] += q[n][at + r] * k;
        }
    for (int n = 0; n < Q; ++n) {
      const int64_t row = touched[who[n]] * UNIT;
      float* to = weight + places[who[n]] + passed[who[n]];
      for (int r = 0; r < R; ++r)
        for (int g = 0; g < GROUP; ++g) {
          lanes total = score[0][n][r][g];
          if constexpr (HALVES > 1) total += score[1][n][r][g];
          store(to + r * row + g * LANES, total);
        }
    }
  }

  // Adds some channels of a unit's values to what R heads of a query have found. Tokens that are not seen
  // are not read.
  template <int R, int V>
  void add_values(const float* from, int64_t i, uint32_t left, int64_t e) {
    // Few sums would wait for each other.
    constexpr int PARTS = R * V < 8 ? 2 : 1;
    const int64_t row = touched[i] * UNIT, step = values;
    const float* own = weight + places[i] + passed[i];
    float* to = found + i * R * values + e;
    lanes sum[PARTS][R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        sum[0][r][v] = load(to + r * step + v * LANES);
        for (int part = 1; part < PARTS; ++part) sum[part][r][v] = all(0.0f);
      }
    const auto add = [&](int part, int64_t lane) __attribute__((always_inline)) {
      for (int v = 0; v < V; ++v) {
        const lanes numbers = load(from + lane * step + v * LANES);
        for (int r = 0; r < R; ++r) sum[part][r][v] += own[r * row + lane] * numbers;
      }
    };
    if (left == WHOLE) {
      for (int64_t lane = 0; lane < UNIT; lane += PARTS)
        for (int part = 0; part < PARTS; ++part) add(part, lane + part);
    } else {
      for (; left; left &= left - 1) add(0, __builtin_ctz(left));
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        lanes total = sum[0][r][v];
        for (int part = 1; part < PARTS; ++part) total += sum[part][r][v];
        store(to + r * step + v * LANES, total);
      }
  }

  // Tiles of queries: they choose, or take what is given, ``[T, P]``, and attend if there is an out.
  void run(int64_t first_tile, int64_t end_tile, int64_t* told, float* out, const Side* of_out) {
    for (int64_t start = first_tile * tile; start < fewer(end_tile * tile, call.queries);
         start += tile) {
      const int64_t end = fewer(start + tile, call.queries);
      const int64_t* read = told + start * call.chosen;
      if (!call.is_given) {
        choose(start, end);
        if (told)
          std::memcpy(told + start * call.chosen, chosen, 8 * (end - start) * call.chosen);
        read = chosen;
      }
      if (out) attend(start, end, read, out, *of_out);
    }
  }
};

}  // namespace
