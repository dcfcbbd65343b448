// Attention of one new token of each sequence to all tokens of it, whose keys and values are in pages.
//
// A pair of a sequence and a head of keys is one piece of work: scores of all its tokens, their softmax, and the sum of
// the values, for all heads of queries that share these keys. Nothing is gathered, and no sequence is padded. Sums are
// in float32, of float64 in float64. Vectors are those of the compiler, which makes them of what the processor has: it
// is compiled for any processor, for AVX2 and for AVX-512, and the processor chooses.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../numbers.h"
#include "exponential.h"
#include "threads.h"
#include "vectors.h"

using namespace colossal;

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is returned: what does is inlined

namespace {

enum Type : int64_t { kFloat32 = 1, kBFloat16 = 2, kFloat64 = 3 };

constexpr int64_t kLeastOfThread = 1 << 18;  // products

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

template <typename Sum>
struct Vector {
  static constexpr int64_t kLanes = 64 / sizeof(Sum);
  typedef Sum Type __attribute__((vector_size(64)));
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
};

template <typename Sum>
COLOSSAL_INLINE typename Vector<Sum>::Type load(const Sum* from) {
  typename Vector<Sum>::Type found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

template <typename Sum>
COLOSSAL_INLINE typename Vector<Sum>::Type load(const uint16_t* from) {  // bfloat16: the upper half of float32
  typename Vector<Sum>::Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const typename Vector<Sum>::Words words = __builtin_convertvector(halves, typename Vector<Sum>::Words) << 16;
  typename Vector<Sum>::Type found;
  std::memcpy(&found, &words, sizeof found);
  return found;
}

COLOSSAL_INLINE float widen(uint16_t half) { return widen_bfloat16(half); }
COLOSSAL_INLINE float widen(float value) { return value; }
COLOSSAL_INLINE double widen(double value) { return value; }

COLOSSAL_INLINE void narrow(float value, float* to) { *to = value; }
COLOSSAL_INLINE void narrow(double value, double* to) { *to = value; }
COLOSSAL_INLINE void narrow(float value, uint16_t* to) { *to = narrow_bfloat16(value); }

template <typename Sum, typename Value>
COLOSSAL_INLINE Sum dot(const Sum* query, const Value* key, int64_t width) {
  constexpr int64_t lanes = Vector<Sum>::kLanes;
  typename Vector<Sum>::Type sums = {};
  int64_t at = 0;
  for (; at + lanes <= width; at += lanes) sums += load<Sum>(query + at) * load<Sum>(key + at);
  Sum total = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) total += sums[lane];
  for (; at < width; ++at) total += query[at] * widen(key[at]);
  return total;
}

// The sum of values, in vectors that stay in registers while all tokens go by.
template <int64_t kVectors, typename Sum, typename Value>
COLOSSAL_INLINE void add_values(const Value* values, const int64_t* slots, int64_t stride, const Sum* weights,
                                int64_t length, Sum* to) {
  constexpr int64_t lanes = Vector<Sum>::kLanes;
  typename Vector<Sum>::Type sums[kVectors] = {};
  for (int64_t token = 0; token < length; ++token) {
    const Value* from = values + slots[token] * stride;
    for (int64_t each = 0; each < kVectors; ++each) sums[each] += weights[token] * load<Sum>(from + each * lanes);
  }
  std::memcpy(to, sums, sizeof sums);
}

template <typename Sum, typename Value>
COLOSSAL_INLINE void attend(const Batch& given, int64_t row, int64_t kv_head, std::vector<Sum>& buffer) {
  constexpr int64_t lanes = Vector<Sum>::kLanes, together = 4;
  const int64_t group = given.num_heads / given.num_kv_heads, end = given.ends[row];
  const int64_t begin = given.window && end > given.window ? end - given.window : 0, length = end - begin;
  const int64_t* slots = given.slots + given.sequences[row] * given.slots_stride + begin;
  const Value* keys = static_cast<const Value*>(given.keys) + kv_head * given.width;
  const Value* values = static_cast<const Value*>(given.values) + kv_head * given.value_width;
  const int64_t first = (row * given.num_heads + kv_head * group);
  const Value* query = static_cast<const Value*>(given.query) + first * given.width;
  Value* out = static_cast<Value*>(given.out) + first * given.value_width;
  buffer.resize(group * (given.width + length) + given.value_width);
  Sum *queries = buffer.data(), *scores = queries + group * given.width, *sums = scores + group * length;
  for (int64_t at = 0; at < group * given.width; ++at) queries[at] = widen(query[at]) * static_cast<Sum>(given.scale);
  for (int64_t token = 0; token < length; ++token) {
    const Value* key = keys + slots[token] * given.key_stride;
    for (int64_t head = 0; head < group; ++head)
      scores[head * length + token] = dot<Sum>(queries + head * given.width, key, given.width);
  }
  for (int64_t head = 0; head < group; ++head) {
    Sum* weights = scores + head * length;
    Sum largest = weights[0], total = 0;
    for (int64_t token = 1; token < length; ++token) largest = std::max(largest, weights[token]);
    for (int64_t token = 0; token < length; ++token) weights[token] = exp_of(weights[token] - largest);
    for (int64_t token = 0; token < length; ++token) total += weights[token];
    int64_t at = 0;
    for (; at + together * lanes <= given.value_width; at += together * lanes)
      add_values<together>(values + at, slots, given.value_stride, weights, length, sums + at);
    for (; at + lanes <= given.value_width; at += lanes)
      add_values<1>(values + at, slots, given.value_stride, weights, length, sums + at);
    for (; at < given.value_width; ++at) {
      sums[at] = 0;
      for (int64_t token = 0; token < length; ++token)
        sums[at] += weights[token] * widen(values[slots[token] * given.value_stride + at]);
    }
    for (at = 0; at < given.value_width; ++at) narrow(sums[at] / total, out + head * given.value_width + at);
  }
}

template <typename Sum, typename Value>
COLOSSAL_INLINE void attend_all(const Batch& given, int64_t begin, int64_t end) {
  std::vector<Sum> buffer;
  for (int64_t at = begin; at < end; ++at)
    attend<Sum, Value>(given, at / given.num_kv_heads, at % given.num_kv_heads, buffer);
}

COLOSSAL_INLINE void attend_typed(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  if (type == kFloat32) attend_all<float, float>(given, begin, end);
  if (type == kBFloat16) attend_all<float, uint16_t>(given, begin, end);
  if (type == kFloat64) attend_all<double, double>(given, begin, end);
}

using Run = void (*)(const Batch&, int64_t, int64_t, int64_t);

void run_portable(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  attend_typed(given, type, begin, end);
}

COLOSSAL_AVX2 void run_avx2(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  attend_typed(given, type, begin, end);
}

COLOSSAL_AVX512 void run_avx512(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  attend_typed(given, type, begin, end);
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
