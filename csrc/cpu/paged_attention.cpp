// Attention of one new token of each sequence to all tokens of it, whose keys and values are in pages.
//
// A pair of a sequence and a head of keys is one piece of work: scores of all its tokens, their softmax, and the sum of
// the values, for all heads of queries that share these keys. Nothing is gathered, and no sequence is padded. All heads
// of a few tokens come before other tokens, which is the order that memory has them in. Sums are in float32, of float64
// in float64. Vectors are those of the compiler, which makes them of what the processor has: it is compiled for any
// processor, for AVX2 and for AVX-512, and the processor chooses.

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is returned: what does is inlined

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../numbers.h"
#include "number_vectors.h"
#include "threads.h"
#include "vectors.h"

using namespace colossal;

namespace {

enum Type : int64_t { kFloat32 = 1, kBFloat16 = 2, kFloat64 = 3 };

constexpr int64_t kLeastOfThread = 1 << 18;  // products
constexpr int64_t kTokens = 8;               // together: the sums of one would wait for each other

// A slot is the place of a token in the pages, and a stride the elements from one to the next.
struct Batch {
  const void *query, *keys, *values;  // (rows, heads, width), (slots, stride), (slots, stride)
  void* out;                          // (rows, heads, value_width)
  const int64_t* slots;               // (sequences, slots_stride): of all tokens of a sequence, in order
  const int64_t *sequences, *ends;    // of each row: its sequence, and how many tokens that has
  int64_t slots_stride, num_rows, num_heads, num_kv_heads, width, value_width, key_stride, value_stride;
  int64_t window;  // the last tokens that count; 0 for all
  double scale;
};

// Products of a query and the keys of some tokens.
template <int64_t kCount, int64_t kBytes, typename Sum, typename Value>
COLOSSAL_INLINE void score(const Sum* query, const Value* keys, const int64_t* slots, int64_t stride, int64_t width,
                           Sum* scores) {
  using Of = Vectors<Sum, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(Sum);
  typename Of::Type sums[kCount] = {};
  const Value* key[kCount];
  for (int64_t token = 0; token < kCount; ++token) key[token] = keys + slots[token] * stride;
  int64_t at = 0;
  for (; at + 2 * lanes <= width; at += 2 * lanes) {
    typename Of::Type parts[2], of_key[2];
    load_two<Of>(query + at, parts);
#pragma GCC unroll 8
    for (int64_t token = 0; token < kCount; ++token) {
      load_two<Of>(key[token] + at, of_key);
      sums[token] += parts[0] * of_key[0];
      sums[token] += parts[1] * of_key[1];
    }
  }
  for (; at + lanes <= width; at += lanes)
    for (int64_t token = 0; token < kCount; ++token) sums[token] += load<Of>(query + at) * load<Of>(key[token] + at);
#pragma GCC unroll 8
  for (int64_t token = 0; token < kCount; ++token) scores[token] = sum_of_lanes<Sum, kBytes>(sums[token]);
  for (; at < width; ++at)
    for (int64_t token = 0; token < kCount; ++token) scores[token] += query[at] * widen(key[token][at]);
}

// Make scores their softmax but for its denominator, which is returned; there is room for a vector behind them.
template <int64_t kBytes, typename Sum>
COLOSSAL_INLINE Sum weigh(Sum* scores, int64_t length) {
  using Of = Vectors<Sum, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(Sum);
  // whose exponential adds nothing to that of the largest one, which is 1
  std::fill_n(scores + length, lanes, -std::numeric_limits<Sum>::infinity());
  typename Of::Type most = load<Of>(scores), total = {};
  for (int64_t at = lanes; at < length; at += lanes) {
    const typename Of::Type next = load<Of>(scores + at);
    most = most < next ? next : most;
  }
  Sum largest = most[0];
  for (int64_t lane = 1; lane < lanes; ++lane) largest = std::max(largest, most[lane]);
  for (int64_t at = 0; at < length; at += lanes) {
    const typename Of::Type weights = Of::exp(load<Of>(scores + at) - largest);
    store<Of>(weights, scores + at);
    total += weights;
  }
  return sum_of_lanes<Sum, kBytes>(total);
}

// Add values to sums that stay in registers while some tokens go by.
template <int64_t kPairs, int64_t kBytes, typename Sum, typename Value>
COLOSSAL_INLINE void add_pairs(const Value* values, const int64_t* slots, int64_t stride, const Sum* weights,
                               int64_t count, Sum* to) {
  using Of = Vectors<Sum, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(Sum);
  typename Of::Type sums[kPairs][2], two[2];
  std::memcpy(sums, to, sizeof sums);
  for (int64_t token = 0; token < count; ++token) {
    const Value* from = values + slots[token] * stride;
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      load_two<Of>(from + 2 * pair * lanes, two);
      sums[pair][0] += weights[token] * two[0];
      sums[pair][1] += weights[token] * two[1];
    }
  }
  std::memcpy(to, sums, sizeof sums);
}

template <int64_t kBytes, typename Sum, typename Value>
COLOSSAL_INLINE void add_values(const Value* values, const int64_t* slots, int64_t stride, const Sum* weights,
                                int64_t count, int64_t width, Sum* to) {
  using Of = Vectors<Sum, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(Sum);
  int64_t at = 0;
  for (; at + 4 * lanes <= width; at += 4 * lanes)
    add_pairs<2, kBytes>(values + at, slots, stride, weights, count, to + at);
  for (; at + 2 * lanes <= width; at += 2 * lanes)
    add_pairs<1, kBytes>(values + at, slots, stride, weights, count, to + at);
  for (; at + lanes <= width; at += lanes) {
    typename Of::Type sum = load<Of>(to + at);
    for (int64_t token = 0; token < count; ++token)
      sum += weights[token] * load<Of>(values + slots[token] * stride + at);
    store<Of>(sum, to + at);
  }
  for (; at < width; ++at)
    for (int64_t token = 0; token < count; ++token)
      to[at] += weights[token] * widen(values[slots[token] * stride + at]);
}

// Read rows of numbers, multiplied by a factor, in the order in which products take them; or write them.
template <int64_t kBytes, typename Sum, typename Value>
COLOSSAL_INLINE void read_row(const Value* from, Sum factor, int64_t width, Sum* to) {
  using Of = Vectors<Sum, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(Sum);
  int64_t at = 0;
  for (; at + 2 * lanes <= width; at += 2 * lanes) {
    typename Of::Type two[2];
    load_two<Of>(from + at, two);
    store<Of>(two[0] * factor, to + at);
    store<Of>(two[1] * factor, to + at + lanes);
  }
  for (; at < width; ++at) to[at] = widen(from[at]) * factor;
}

template <int64_t kBytes, typename Sum, typename Value>
COLOSSAL_INLINE void write_row(const Sum* from, Sum total, int64_t width, Value* to) {
  using Of = Vectors<Sum, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(Sum);
  int64_t at = 0;
  for (; at + 2 * lanes <= width; at += 2 * lanes) {
    const typename Of::Type two[2] = {load<Of>(from + at) / total, load<Of>(from + at + lanes) / total};
    store_two<Of>(two, to + at);
  }
  for (; at < width; ++at) narrow(from[at] / total, to + at);
}

// From one row, by the heads of queries that share those heads of keys from `first` to `last`.
template <int64_t kBytes, typename Sum, typename Value>
COLOSSAL_INLINE void attend(const Batch& given, int64_t row, int64_t first, int64_t last, std::vector<Sum>& buffer) {
  const int64_t group = given.num_heads / given.num_kv_heads, heads = (last - first) * group, end = given.ends[row];
  const int64_t begin = given.window && end > given.window ? end - given.window : 0, length = end - begin;
  const int64_t width = given.width, value_width = given.value_width, room = length + kBytes / sizeof(Sum);
  const int64_t* slots = given.slots + given.sequences[row] * given.slots_stride + begin;
  const Value* keys = static_cast<const Value*>(given.keys) + first * width;
  const Value* values = static_cast<const Value*>(given.values) + first * value_width;
  const int64_t first_head = row * given.num_heads + first * group;
  const Value* query = static_cast<const Value*>(given.query) + first_head * width;
  Value* out = static_cast<Value*>(given.out) + first_head * value_width;
  buffer.assign(heads * (width + room + value_width + 1), 0);
  Sum *queries = buffer.data(), *scores = queries + heads * width, *sums = scores + heads * room;
  Sum* totals = sums + heads * value_width;
  for (int64_t head = 0; head < heads; ++head)
    read_row<kBytes>(query + head * width, static_cast<Sum>(given.scale), width, queries + head * width);
  for (int64_t token = 0; token < length; token += kTokens)
    for (int64_t head = 0; head < heads; ++head) {
      const Value* key = keys + head / group * width;
      const Sum* from = queries + head * width;
      Sum* to = scores + head * room;
      if (token + kTokens <= length) {
        score<kTokens, kBytes>(from, key, slots + token, given.key_stride, width, to + token);
      } else {
        for (int64_t each = token; each < length; ++each)
          score<1, kBytes>(from, key, slots + each, given.key_stride, width, to + each);
      }
    }
  for (int64_t head = 0; head < heads; ++head) totals[head] = weigh<kBytes>(scores + head * room, length);
  for (int64_t token = 0; token < length; token += kTokens)
    for (int64_t head = 0; head < heads; ++head)
      add_values<kBytes>(values + head / group * value_width, slots + token, given.value_stride,
                         scores + head * room + token, std::min(kTokens, length - token), value_width,
                         sums + head * value_width);
  for (int64_t head = 0; head < heads; ++head)
    write_row<kBytes>(sums + head * value_width, totals[head], value_width, out + head * value_width);
}

template <int64_t kBytes, typename Sum, typename Value>
COLOSSAL_INLINE void attend_all(const Batch& given, int64_t begin, int64_t end) {
  std::vector<Sum> buffer;
  for (int64_t at = begin, next; at < end; at = next) {
    const int64_t row = at / given.num_kv_heads, first_of_row = row * given.num_kv_heads;
    next = std::min(end, first_of_row + given.num_kv_heads);
    attend<kBytes, Sum, Value>(given, row, at - first_of_row, next - first_of_row, buffer);
  }
}

template <int64_t kBytes>
COLOSSAL_INLINE void attend_typed(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  if (type == kFloat32) attend_all<kBytes, float, float>(given, begin, end);
  if (type == kBFloat16) attend_all<kBytes, float, uint16_t>(given, begin, end);
  if (type == kFloat64) attend_all<kBytes, double, double>(given, begin, end);
}

using Run = void (*)(const Batch&, int64_t, int64_t, int64_t);

void run_portable(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  attend_typed<16>(given, type, begin, end);
}

COLOSSAL_AVX2 void run_avx2(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  attend_typed<32>(given, type, begin, end);
}

COLOSSAL_AVX512 void run_avx512(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  attend_typed<64>(given, type, begin, end);
}

constexpr Run kRuns[] = {run_portable, run_avx2, run_avx512};

}  // namespace

// level: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code.
extern "C" void colossal_paged_attention(const Batch* given, int64_t type, int64_t max_threads, int64_t level) {
  const Run run = kRuns[vectors_up_to(level)];
  const int64_t pieces = given->num_rows * given->num_kv_heads;
  int64_t tokens = 0;
  for (int64_t row = 0; row < given->num_rows; ++row) tokens += given->ends[row];
  const int64_t products = tokens * given->num_heads * (given->width + given->value_width);
  const int64_t wanted = std::min(pieces, products / kLeastOfThread + 1);
  const int64_t num_threads = std::max<int64_t>(1, std::min(max_threads, wanted));
  run_in_parts(num_threads, pieces, [&](int64_t begin, int64_t end) { run(*given, type, begin, end); });
}
