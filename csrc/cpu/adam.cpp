// A step of Adam over many tensors, in one pass over memory: unscale the gradient, decay, update the moments and the
// parameter, and write a copy of it in another precision.
//
// The work is done in blocks that fit into the first cache. Those of low precision are widened into a buffer before and
// narrowed behind, so there is one update, in float32. It is compiled twice, for any processor and for AVX2. AVX-512
// has masks for what is left at the end, and converts while loading and storing: its update is written out. The
// processor chooses. Stores past the caches would take twice as long here, as what is written was read just before.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../adam.h"
#include "threads.h"
#include "vectors.h"

using namespace colossal;

namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kLeastOfThread = 1 << 15;
constexpr int64_t kAhead = 256;

// The plain loops of each conversion; compilers make vectors of all but the branches of float16.
struct Portable {
  static COLOSSAL_INLINE void widen16(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = widen_float16(from[i]);
  }
  static COLOSSAL_INLINE void narrow16(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = narrow_float16(from[i]);
  }
};

#if defined(__x86_64__)

struct F16c {
  COLOSSAL_AVX2 static void widen16(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    Portable::widen16(from + i, to + i, n - i);
  }
  COLOSSAL_AVX2 static void narrow16(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    Portable::narrow16(from + i, to + i, n - i);
  }
};
#endif

template <typename Half>
COLOSSAL_INLINE const float* widened(const void* from, uint8_t type, int64_t at, int64_t n, float* buffer) {
  if (type == kFloat32) return static_cast<const float*>(from) + at;
  const uint16_t* values = static_cast<const uint16_t*>(from) + at;
  if (type == kBFloat16) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = widen_bfloat16(values[i]);
  } else {
    Half::widen16(values, buffer, n);
  }
  return buffer;
}

template <typename Half>
COLOSSAL_INLINE void narrow(const float* from, void* to, uint8_t type, int64_t at, int64_t n) {
  if (type == kFloat32) {
    std::memcpy(static_cast<float*>(to) + at, from, n * sizeof(float));
    return;
  }
  uint16_t* values = static_cast<uint16_t*>(to) + at;
  if (type == kBFloat16) {
    for (int64_t i = 0; i < n; ++i) values[i] = narrow_bfloat16(from[i]);
  } else {
    Half::narrow16(from, values, n);
  }
}

template <bool kIsDecoupled>
COLOSSAL_INLINE void update(float* __restrict__ param, const float* __restrict__ grad, float* __restrict__ exp_avg,
                            float* __restrict__ exp_avg_sq, int64_t n, const Step& step) {
  const float beta1 = step.beta1, beta2 = step.beta2, rest1 = step.rest1, rest2 = step.rest2;
  const float scale = step.grad_scale, eps = step.eps, step_size = step.step_size, root_scale = step.root_scale;
  const float decay = step.decay, kept = 1.0f - decay;
  for (int64_t i = 0; i < n; ++i) {
    const float p = kIsDecoupled ? param[i] * kept : param[i];
    const float g = kIsDecoupled ? grad[i] * scale : grad[i] * scale + decay * p;
    const float m = beta1 * exp_avg[i] + rest1 * g, v = beta2 * exp_avg_sq[i] + rest2 * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = p - step_size * m / (std::sqrt(v) * root_scale + eps);
  }
}

template <typename Half>
COLOSSAL_INLINE void run(const Tensor& tensor, int64_t begin, int64_t end, const Step& step) {
  alignas(64) float params[kBlock], grads[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    const float* grad = widened<Half>(tensor.grad, tensor.grad_type, at, n, grads);
    float* param = const_cast<float*>(widened<Half>(tensor.param, tensor.param_type, at, n, params));
    float *exp_avg = tensor.exp_avg + at, *exp_avg_sq = tensor.exp_avg_sq + at;
    if (step.is_decoupled) update<true>(param, grad, exp_avg, exp_avg_sq, n, step);
    else update<false>(param, grad, exp_avg, exp_avg_sq, n, step);
    if (tensor.param_type != kFloat32) narrow<Half>(param, tensor.param, tensor.param_type, at, n);
    if (tensor.copy_type != kNone) narrow<Half>(param, tensor.copy, tensor.copy_type, at, n);
  }
}

using Run = void (*)(const Tensor&, int64_t, int64_t, const Step&);

void run_portable(const Tensor& tensor, int64_t begin, int64_t end, const Step& step) {
  run<Portable>(tensor, begin, end, step);
}

#if defined(__x86_64__)
COLOSSAL_AVX2 void run_avx2(const Tensor& tensor, int64_t begin, int64_t end, const Step& step) {
  run<F16c>(tensor, begin, end, step);
}

COLOSSAL_AVX512 COLOSSAL_INLINE __m512 load(const void* from, uint8_t type, int64_t at, __mmask16 mask) {
  if (type == kFloat32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + at);
  const __m256i halves = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + at);
  if (type == kFloat16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

COLOSSAL_AVX512 COLOSSAL_INLINE void store(__m512 values, void* to, uint8_t type, int64_t at, __mmask16 mask) {
  if (type == kFloat32) return _mm512_mask_storeu_ps(static_cast<float*>(to) + at, mask, values);
  uint16_t* halves = static_cast<uint16_t*>(to) + at;
  if (type == kFloat16) {
    const __m256i narrow = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_mask_storeu_epi16(halves, mask, narrow);
  }
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_mask_storeu_epi16(halves, mask, _mm512_cvtepi32_epi16(high));
}

// The processor fetches ahead by itself, but not over the end of a page, and too late where others use the memory too.
COLOSSAL_AVX512 COLOSSAL_INLINE void fetch(const void* from, uint8_t type, int64_t at) {
  _mm_prefetch(static_cast<const char*>(from) + (at + kAhead) * (type == kFloat32 ? 4 : 2), _MM_HINT_T0);
}

// The unit that divides also takes roots, and would be what everything waits for; so roots are estimated to 14 bits and
// refined once, which leaves an error of a unit in the last place. Not for numbers whose squares leave the range.
COLOSSAL_AVX512 COLOSSAL_INLINE __m512 root(__m512 value) {
  const __mmask16 is_usual = _mm512_cmp_ps_mask(value, _mm512_set1_ps(1e-25f), _CMP_GE_OQ) &
                             _mm512_cmp_ps_mask(value, _mm512_set1_ps(1e38f), _CMP_LE_OQ);
  if (__builtin_expect(is_usual != 0xffff, 0)) return _mm512_sqrt_ps(value);
  const __m512 inverse = _mm512_rsqrt14_ps(value), near = _mm512_mul_ps(value, inverse);
  const __m512 half = _mm512_mul_ps(inverse, _mm512_set1_ps(0.5f));
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(near, near, value), half, near);
}

COLOSSAL_AVX512 void run_avx512(const Tensor& given, int64_t begin, int64_t end, const Step& step) {
  const Tensor tensor = given;  // in registers, which no store can change
  const __m512 beta1 = _mm512_set1_ps(step.beta1), beta2 = _mm512_set1_ps(step.beta2);
  const __m512 rest1 = _mm512_set1_ps(step.rest1), rest2 = _mm512_set1_ps(step.rest2);
  const __m512 scale = _mm512_set1_ps(step.grad_scale), root_scale = _mm512_set1_ps(step.root_scale);
  const __m512 eps = _mm512_set1_ps(step.eps), step_size = _mm512_set1_ps(step.step_size);
  const __m512 kept = _mm512_set1_ps(step.is_decoupled ? 1.0f - step.decay : 1.0f);
  const __m512 added = _mm512_set1_ps(step.decay);
  const bool is_decoupled = step.is_decoupled;
  for (int64_t at = begin; at < end; at += 16) {
    const __mmask16 mask = end - at < 16 ? (1u << (end - at)) - 1 : 0xffff;
    fetch(tensor.param, tensor.param_type, at);
    fetch(tensor.grad, tensor.grad_type, at);
    fetch(tensor.exp_avg, kFloat32, at);
    fetch(tensor.exp_avg_sq, kFloat32, at);
    const __m512 p = _mm512_mul_ps(load(tensor.param, tensor.param_type, at, mask), kept);
    const __m512 scaled = _mm512_mul_ps(load(tensor.grad, tensor.grad_type, at, mask), scale);
    const __m512 g = is_decoupled ? scaled : _mm512_fmadd_ps(added, p, scaled);
    const __m512 old_m = load(tensor.exp_avg, kFloat32, at, mask), old_v = load(tensor.exp_avg_sq, kFloat32, at, mask);
    const __m512 m = _mm512_fmadd_ps(beta1, old_m, _mm512_mul_ps(rest1, g));
    const __m512 v = _mm512_fmadd_ps(beta2, old_v, _mm512_mul_ps(_mm512_mul_ps(rest2, g), g));
    const __m512 denominator = _mm512_fmadd_ps(root(v), root_scale, eps);
    const __m512 updated = _mm512_sub_ps(p, _mm512_div_ps(_mm512_mul_ps(step_size, m), denominator));
    store(m, tensor.exp_avg, kFloat32, at, mask);
    store(v, tensor.exp_avg_sq, kFloat32, at, mask);
    store(updated, tensor.param, tensor.param_type, at, mask);
    if (tensor.copy_type != kNone) store(updated, tensor.copy, tensor.copy_type, at, mask);
  }
}
#endif

constexpr Run kRuns[] = {
    run_portable,
#if defined(__x86_64__)
    run_avx2,
    run_avx512,
#endif
};

}  // namespace

// level: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code.
extern "C" void colossal_adam(const Tensor* tensors, int64_t count, const Step* step, int32_t threads, int32_t level) {
  const Run run_part = kRuns[vectors_up_to(level)];
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += tensors[i].numel;
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, total / kLeastOfThread));
  const int64_t share = ((total + workers - 1) / workers + kBlock - 1) / kBlock * kBlock;
  auto work = [&](int64_t worker) {  // a part of all elements, as if the tensors lay behind each other
    int64_t first = worker * share, last = std::min(total, first + share), begin = 0;
    for (int64_t i = 0; i < count && begin < last; begin += tensors[i++].numel) {
      const int64_t from = std::max(first, begin), to = std::min(last, begin + tensors[i].numel);
      if (from < to) run_part(tensors[i], from - begin, to - begin, *step);
    }
  };
  run_on_threads(workers, work);
}
