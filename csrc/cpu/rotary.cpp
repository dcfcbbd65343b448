// Rotary position embeddings of the heads of queries and keys, whose numbers are pairs of one half and the other.
//
// A number is multiplied by a cosine and its partner by a sine, both products are rounded to their type, and added.

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is returned: what does is inlined

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../numbers.h"
#include "number_vectors.h"
#include "threads.h"
#include "vectors.h"

using namespace colossal;

namespace {

enum Type : int64_t { kFloat32 = 1, kBFloat16 = 2 };

constexpr int64_t kLeastOfThread = 1 << 16;  // numbers

// Strides are elements from one to the next.
struct Heads {
  const void* x;  // (rows, heads, length, width)
  void* out;      // (rows, length, heads, width), contiguous
  int64_t num_heads, row_stride, head_stride, token_stride;
};

struct Batch {
  Heads queries, keys;
  const void *cos, *sin;  // (rows, length, width)
  int64_t num_rows, length, width, row_stride, token_stride;
};

// One of two products; the sum of which is rounded once more where it is stored.
template <typename Of, typename Value>
COLOSSAL_INLINE typename Of::Type product(typename Of::Type x, typename Of::Type factor) {
  return as_stored<Of, Value>(x * factor);
}

template <int64_t kBytes, typename Value>
COLOSSAL_INLINE void rotate_head(const Value* x, const Value* cos, const Value* sin, int64_t half, Value* out) {
  using Of = Vectors<float, kBytes>;
  using Vector = typename Of::Type;
  constexpr int64_t lanes = kBytes / sizeof(float);
  int64_t at = 0;
  for (; at + 2 * lanes <= half; at += 2 * lanes) {
    Vector low[2], high[2], cosines[2], sines[2], sums[2];
    load_two<Of>(x + at, low);
    load_two<Of>(x + half + at, high);
    load_two<Of>(cos + at, cosines);
    load_two<Of>(sin + at, sines);
    for (int each = 0; each < 2; ++each)
      sums[each] = product<Of, Value>(low[each], cosines[each]) - product<Of, Value>(high[each], sines[each]);
    store_two<Of>(sums, out + at);
    load_two<Of>(cos + half + at, cosines);
    load_two<Of>(sin + half + at, sines);
    for (int each = 0; each < 2; ++each)
      sums[each] = product<Of, Value>(high[each], cosines[each]) + product<Of, Value>(low[each], sines[each]);
    store_two<Of>(sums, out + half + at);
  }
  for (; at < half; ++at) {
    const float low = widen(x[at]), high = widen(x[half + at]);
    narrow(as_stored<Value>(low * widen(cos[at])) - as_stored<Value>(high * widen(sin[at])), out + at);
    narrow(as_stored<Value>(high * widen(cos[half + at])) + as_stored<Value>(low * widen(sin[half + at])),
           out + half + at);
  }
}

template <int64_t kBytes, typename Value>
COLOSSAL_INLINE void rotate(const Batch& given, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = token / given.length, column = token % given.length;
    const int64_t angle = row * given.row_stride + column * given.token_stride;
    for (const Heads* heads : {&given.queries, &given.keys}) {
      const Value* x = static_cast<const Value*>(heads->x) + row * heads->row_stride + column * heads->token_stride;
      Value* out = static_cast<Value*>(heads->out) + token * heads->num_heads * given.width;
      for (int64_t head = 0; head < heads->num_heads; ++head)
        rotate_head<kBytes>(x + head * heads->head_stride, static_cast<const Value*>(given.cos) + angle,
                            static_cast<const Value*>(given.sin) + angle, given.width / 2, out + head * given.width);
    }
  }
}

template <int64_t kBytes>
COLOSSAL_INLINE void rotate_typed(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  if (type == kFloat32) rotate<kBytes, float>(given, begin, end);
  if (type == kBFloat16) rotate<kBytes, uint16_t>(given, begin, end);
}

using Run = void (*)(const Batch&, int64_t, int64_t, int64_t);

void run_portable(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  rotate_typed<16>(given, type, begin, end);
}

COLOSSAL_AVX2 void run_avx2(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  rotate_typed<32>(given, type, begin, end);
}

COLOSSAL_AVX512 void run_avx512(const Batch& given, int64_t type, int64_t begin, int64_t end) {
  rotate_typed<64>(given, type, begin, end);
}

constexpr Run kRuns[] = {run_portable, run_avx2, run_avx512};

}  // namespace

// level: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code.
extern "C" void colossal_rotary(const Batch* given, int64_t type, int64_t max_threads, int64_t level) {
  const Run run = kRuns[vectors_up_to(level)];
  const int64_t tokens = given->num_rows * given->length;
  const int64_t numbers = tokens * (given->queries.num_heads + given->keys.num_heads) * given->width;
  const int64_t num_threads = std::max<int64_t>(1, std::min({max_threads, tokens, numbers / kLeastOfThread + 1}));
  run_in_parts(num_threads, tokens, [&](int64_t begin, int64_t end) { run(*given, type, begin, end); });
}
