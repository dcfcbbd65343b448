// Rows divided by the root of the mean of their squares, times a weight: two passes over a row that stays in the cache.
//
// It is computed in float32 as models do: what was divided is rounded to the type of the rows before it is multiplied.

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is returned: what does is inlined

#include <algorithm>
#include <cmath>
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

struct Rows {
  const void *x, *weight;  // (rows, width), (width)
  void* out;               // (rows, width)
  int64_t num_rows, width;
  double eps;
};

template <int64_t kBytes, typename Value>
COLOSSAL_INLINE void normalize(const Rows& given, int64_t begin, int64_t end) {
  using Of = Vectors<float, kBytes>;
  using Vector = typename Of::Type;
  constexpr int64_t lanes = kBytes / sizeof(float);
  const int64_t width = given.width, full = width / (2 * lanes) * 2 * lanes;
  const Value* weight = static_cast<const Value*>(given.weight);
  for (int64_t row = begin; row < end; ++row) {
    const Value* x = static_cast<const Value*>(given.x) + row * width;
    Value* out = static_cast<Value*>(given.out) + row * width;
    Vector sums[2] = {}, values[2], weights[2];
    for (int64_t at = 0; at < full; at += 2 * lanes) {
      load_two<Of>(x + at, values);
      for (int each = 0; each < 2; ++each) sums[each] += values[each] * values[each];
    }
    float total = sum_of_lanes<float, kBytes>(sums[0] + sums[1]);
    for (int64_t at = full; at < width; ++at) total += widen(x[at]) * widen(x[at]);
    const float factor = 1 / std::sqrt(total / width + static_cast<float>(given.eps));
    for (int64_t at = 0; at < full; at += 2 * lanes) {
      load_two<Of>(x + at, values);
      load_two<Of>(weight + at, weights);
      for (int each = 0; each < 2; ++each) values[each] = weights[each] * as_stored<Of, Value>(values[each] * factor);
      store_two<Of>(values, out + at);
    }
    for (int64_t at = full; at < width; ++at)
      narrow(widen(weight[at]) * as_stored<Value>(widen(x[at]) * factor), out + at);
  }
}

template <int64_t kBytes>
COLOSSAL_INLINE void normalize_typed(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  if (type == kFloat32) normalize<kBytes, float>(given, begin, end);
  if (type == kBFloat16) normalize<kBytes, uint16_t>(given, begin, end);
}

using Run = void (*)(const Rows&, int64_t, int64_t, int64_t);

void run_portable(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  normalize_typed<16>(given, type, begin, end);
}

COLOSSAL_AVX2 void run_avx2(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  normalize_typed<32>(given, type, begin, end);
}

COLOSSAL_AVX512 void run_avx512(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  normalize_typed<64>(given, type, begin, end);
}

constexpr Run kRuns[] = {run_portable, run_avx2, run_avx512};

}  // namespace

// level: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code.
extern "C" void colossal_rms_norm(const Rows* given, int64_t type, int64_t max_threads, int64_t level) {
  const Run run = kRuns[vectors_up_to(level)];
  const int64_t rows = given->num_rows, wanted = std::min(rows, rows * given->width / kLeastOfThread + 1);
  const int64_t num_threads = std::max<int64_t>(1, std::min(max_threads, wanted));
  run_in_parts(num_threads, rows, [&](int64_t begin, int64_t end) { run(*given, type, begin, end); });
}
