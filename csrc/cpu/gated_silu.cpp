// The SiLU of the first half of each row, times its second half, and the gradients of both.
//
// Each number is read once and written once; operations one after the other would go through memory for each of them.
// It is computed in float32, of float64 in float64. Vectors are those that the compiler makes of the loops: it is
// compiled for any processor, for AVX2 and for AVX-512, and the processor chooses.

// A comparison may then be computed for all lanes of a vector, without which there is none below AVX-512.
#pragma GCC optimize("no-trapping-math")

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "../numbers.h"
#include "exponential.h"
#include "vectors.h"

using namespace colossal;

namespace {

enum Type : int64_t { kFloat32 = 1, kBFloat16 = 2, kFloat64 = 3 };

constexpr int64_t kLeastOfThread = 1 << 16;  // numbers

struct Rows {
  const void *gate_up, *grad;  // (rows, 2 * width), (rows, width); without gradients, the values are computed
  void* out;                   // (rows, width), or the gradients of gate_up, (rows, 2 * width)
  int64_t num_rows, width;
};

COLOSSAL_INLINE float widen(uint16_t half) { return widen_bfloat16(half); }
COLOSSAL_INLINE float widen(float value) { return value; }
COLOSSAL_INLINE double widen(double value) { return value; }

COLOSSAL_INLINE void narrow(float value, float* to) { *to = value; }
COLOSSAL_INLINE void narrow(double value, double* to) { *to = value; }
COLOSSAL_INLINE void narrow(float value, uint16_t* to) { *to = narrow_bfloat16(value); }

template <typename Sum>
COLOSSAL_INLINE Sum sigmoid(Sum x) {
  return Sum(1) / (Sum(1) + exp_of(-x));
}

template <typename Sum, typename Value>
COLOSSAL_INLINE void compute_values(const Value* __restrict gate, const Value* __restrict up, Value* __restrict out,
                                    int64_t width) {
  for (int64_t at = 0; at < width; ++at) {
    const Sum x = widen(gate[at]);
    narrow(x * sigmoid<Sum>(x) * widen(up[at]), out + at);
  }
}

template <typename Sum, typename Value>
COLOSSAL_INLINE void compute_grads(const Value* __restrict gate, const Value* __restrict up,
                                   const Value* __restrict grad, Value* __restrict of_gate, Value* __restrict of_up,
                                   int64_t width) {
  for (int64_t at = 0; at < width; ++at) {
    const Sum x = widen(gate[at]), slope = widen(grad[at]), part = sigmoid<Sum>(x), silu = x * part;
    narrow(slope * widen(up[at]) * (part + silu * (Sum(1) - part)), of_gate + at);
    narrow(slope * silu, of_up + at);
  }
}

template <typename Sum, typename Value>
COLOSSAL_INLINE void compute_rows(const Rows& given, int64_t begin, int64_t end) {
  const int64_t width = given.width;
  for (int64_t row = begin; row < end; ++row) {
    const Value* gate = static_cast<const Value*>(given.gate_up) + 2 * row * width;
    Value* out = static_cast<Value*>(given.out);
    if (given.grad == nullptr) {
      compute_values<Sum>(gate, gate + width, out + row * width, width);
    } else {
      const Value* grad = static_cast<const Value*>(given.grad) + row * width;
      out += 2 * row * width;
      compute_grads<Sum>(gate, gate + width, grad, out, out + width, width);
    }
  }
}

COLOSSAL_INLINE void compute_typed(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  if (type == kFloat32) compute_rows<float, float>(given, begin, end);
  if (type == kBFloat16) compute_rows<float, uint16_t>(given, begin, end);
  if (type == kFloat64) compute_rows<double, double>(given, begin, end);
}

using Run = void (*)(const Rows&, int64_t, int64_t, int64_t);

void run_portable(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  compute_typed(given, type, begin, end);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void run_avx2(const Rows& given, int64_t type, int64_t begin, int64_t end) {
  compute_typed(given, type, begin, end);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) void run_avx512(const Rows& given, int64_t type,
                                                                                     int64_t begin, int64_t end) {
  compute_typed(given, type, begin, end);
}
#endif

Run run_of(int64_t level) {
#if defined(__x86_64__)
  constexpr Run runs[] = {run_portable, run_avx2, run_avx512};
  return runs[vectors_up_to(level)];
#else
  (void)level;
  return run_portable;
#endif
}

}  // namespace

// level: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code.
extern "C" void colossal_gated_silu(const Rows* given, int64_t type, int64_t max_threads, int64_t level) {
  const Run run = run_of(level);
  const int64_t rows = given->num_rows, wanted = std::min(rows, rows * given->width / kLeastOfThread + 1);
  const int64_t num_threads = std::max<int64_t>(1, std::min(max_threads, wanted));
  std::vector<std::thread> threads;
  for (int64_t each = 1; each < num_threads; ++each)
    threads.emplace_back(run, std::cref(*given), type, rows * each / num_threads, rows * (each + 1) / num_threads);
  run(*given, type, 0, rows / num_threads);
  for (std::thread& thread : threads) thread.join();
}
