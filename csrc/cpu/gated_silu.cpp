// The SiLU of one row times another, and the gradients of both; times a factor of the row. They are the halves of a
// row, or rows of two tensors.
//
// Each number is read once and written once; operations one after the other would go through memory for each of them.
// It is computed in float32, of float64 in float64. Vectors are those of the compiler, which makes them of what the
// processor has: it is compiled for any processor, for AVX2 and for AVX-512, and the processor chooses.

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

enum Type : int64_t { kFloat32 = 1, kBFloat16 = 2, kFloat64 = 3 };

constexpr int64_t kLeastOfThread = 1 << 16;  // numbers
constexpr int64_t kAhead = 4096;             // bytes between what is computed and what is asked for

struct Rows {
  const void *gate, *up;  // rows of `width`, with as many numbers from one to the next as the stride says
  void* values;           // (rows, width); null for none, next to gradients
  const void* grad;       // that of the values, (rows, width), unless it is null; in the same memory as they, or not
  void *of_gate, *of_up;  // then those of both, with their stride, in the same memory or not
  const void* factors;    // by which values and gradients of a row are multiplied, unless it is null; in the sum's type
  void* of_factors;       // then their gradients, next to those of both, unless it is null
  int64_t num_rows, width, stride;
};

// Where a row is, and what its numbers are multiplied by.
template <typename Sum, typename Value>
struct Row {
  const Value *gate, *up, *grad;
  Value *values, *of_gate, *of_up;
  Sum factor;
};

// One vector of a row; returns the products of its gradients and its values.
template <typename Of, typename Sum, typename Value>
COLOSSAL_INLINE typename Of::Type compute(const Row<Sum, Value>& row, int64_t at) {
  constexpr int64_t ahead = kAhead / sizeof(Value);
  // the product before has left it outside of the near caches, and rows end before the processor foresees what is read
  __builtin_prefetch(row.gate + at + ahead);
  __builtin_prefetch(row.up + at + ahead);
  if (row.grad != nullptr) __builtin_prefetch(row.grad + at + ahead);
  const typename Of::Type x = load<Of>(row.gate + at), up = load<Of>(row.up + at), part = 1 / (1 + Of::exp(-x));
  const typename Of::Type silu = x * part, value = silu * up;
  if (row.grad == nullptr) {
    store<Of>(value * row.factor, row.values + at);
    return value;
  }
  const typename Of::Type grad = load<Of>(row.grad + at), slope = grad * row.factor;
  if (row.values != nullptr) store<Of>(value * row.factor, row.values + at);
  store<Of>(slope * up * (part + silu * (1 - part)), row.of_gate + at);
  store<Of>(slope * silu, row.of_up + at);
  return grad * value;
}

template <typename Sum, typename Value, int64_t kBytes>
COLOSSAL_INLINE void compute_rows(const Rows& given, int64_t begin, int64_t end) {
  using Of = Vectors<Sum, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(Sum);
  const int64_t width = given.width, full = width / lanes * lanes, rest = (width - full) * sizeof(Value);
  for (int64_t at = begin; at < end; ++at) {
    const int64_t first = at * given.stride;
    const Row<Sum, Value> row = {static_cast<const Value*>(given.gate) + first,
                                 static_cast<const Value*>(given.up) + first,
                                 given.grad ? static_cast<const Value*>(given.grad) + at * width : nullptr,
                                 given.values ? static_cast<Value*>(given.values) + at * width : nullptr,
                                 given.grad ? static_cast<Value*>(given.of_gate) + first : nullptr,
                                 given.grad ? static_cast<Value*>(given.of_up) + first : nullptr,
                                 given.factors ? static_cast<const Sum*>(given.factors)[at] : 1};
    typename Of::Type sums = {};
    for (int64_t column = 0; column < full; column += lanes) sums += compute<Of>(row, column);
    if (rest) {  // what fills no vector
      Value from[3][lanes] = {}, to[3][lanes] = {};
      std::memcpy(from[0], row.gate + full, rest);
      std::memcpy(from[1], row.up + full, rest);
      if (row.grad) std::memcpy(from[2], row.grad + full, rest);
      const Row<Sum, Value> last = {from[0], from[1], row.grad ? from[2] : nullptr, to[0], to[1], to[2], row.factor};
      sums += compute<Of>(last, 0);
      if (row.values) std::memcpy(row.values + full, to[0], rest);
      if (row.grad) std::memcpy(row.of_gate + full, to[1], rest);
      if (row.grad) std::memcpy(row.of_up + full, to[2], rest);
    }
    if (given.of_factors) {
      Sum total = 0;
      for (int64_t lane = 0; lane < lanes; ++lane) total += sums[lane];
      static_cast<Sum*>(given.of_factors)[at] = total;
    }
  }
}

template <int64_t kBytes>
COLOSSAL_INLINE void compute_typed(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  if (type == kFloat32) compute_rows<float, float, kBytes>(given, begin, end);
  if (type == kBFloat16) compute_rows<float, uint16_t, kBytes>(given, begin, end);
  if (type == kFloat64) compute_rows<double, double, kBytes>(given, begin, end);
}

using Run = void (*)(const Rows&, int64_t, int64_t, int64_t);

void run_portable(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  compute_typed<16>(given, type, begin, end);
}

COLOSSAL_AVX2 void run_avx2(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  compute_typed<32>(given, type, begin, end);
}

COLOSSAL_AVX512 void run_avx512(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  compute_typed<64>(given, type, begin, end);
}

constexpr Run kRuns[] = {run_portable, run_avx2, run_avx512};

}  // namespace

// level: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code.
extern "C" void colossal_gated_silu(const Rows* given, int64_t type, int64_t max_threads, int64_t level) {
  const Run run = kRuns[vectors_up_to(level)];
  const int64_t rows = given->num_rows, wanted = std::min(rows, rows * given->width / kLeastOfThread + 1);
  const int64_t num_threads = std::max<int64_t>(1, std::min(max_threads, wanted));
  run_in_parts(num_threads, rows, [&](int64_t begin, int64_t end) { run(*given, type, begin, end); });
}
