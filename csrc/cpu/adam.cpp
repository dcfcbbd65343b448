// A step of Adam over many tensors, in one pass over memory: unscale the gradient, decay, update the moments and the
// parameter, and write a copy of it in another precision.
//
// The work is done in blocks that fit into the first cache. Those of low precision are widened into a buffer before and
// narrowed behind, so there is one update, in float32. It is compiled three times, and the processor chooses.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

enum Type : int32_t { kNone = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

struct Tensor {
  void* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  void* copy;  // none where its type is kNone
  int64_t numel;
  int32_t param_type, grad_type, copy_type, padding;
};

struct Step {
  float step_size, beta1, beta2, rest1, rest2, eps, decay, bias2_sqrt, grad_scale;  // rest: what is left to 1
  int32_t is_decoupled;
};

constexpr int64_t kBlock = 1024;
constexpr int64_t kLeastOfThread = 1 << 15;

INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE uint16_t narrow_bfloat16(float value) {  // to the nearest, ties to even; a NaN stays one
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

INLINE float widen_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return bits_to_float(sign | ((rest + 0x1c000u) << 13));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return bits_to_float(sign | float_to_bits(small));
}

INLINE uint16_t narrow_float16(float value) {
  const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (rest < 0x38800000u)  // adding a half brings the bits of a subnormal number to where they belong, rounded
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

// The plain loops of each conversion; compilers make vectors of all but the branches of float16.
struct Portable {
  static INLINE void widen16(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = widen_float16(from[i]);
  }
  static INLINE void narrow16(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = narrow_float16(from[i]);
  }
};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

struct F16c {
  AVX2 static void widen16(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    Portable::widen16(from + i, to + i, n - i);
  }
  AVX2 static void narrow16(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    Portable::narrow16(from + i, to + i, n - i);
  }
};
#endif

template <typename Half>
INLINE const float* widened(const void* from, int32_t type, int64_t at, int64_t n, float* buffer) {
  if (type == kFloat32) return static_cast<const float*>(from) + at;
  const uint16_t* values = static_cast<const uint16_t*>(from) + at;
  if (type == kBFloat16) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = bits_to_float(static_cast<uint32_t>(values[i]) << 16);
  } else {
    Half::widen16(values, buffer, n);
  }
  return buffer;
}

template <typename Half>
INLINE void narrow(const float* from, void* to, int32_t type, int64_t at, int64_t n) {
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
INLINE void update(float* __restrict__ param, const float* __restrict__ grad, float* __restrict__ exp_avg,
                   float* __restrict__ exp_avg_sq, int64_t n, const Step& step) {
  const float beta1 = step.beta1, beta2 = step.beta2, rest1 = step.rest1, rest2 = step.rest2;
  const float scale = step.grad_scale, eps = step.eps, step_size = step.step_size, bias2 = step.bias2_sqrt;
  const float decay = step.decay, kept = 1.0f - decay;
  for (int64_t i = 0; i < n; ++i) {
    const float p = kIsDecoupled ? param[i] * kept : param[i];
    const float g = kIsDecoupled ? grad[i] * scale : grad[i] * scale + decay * p;
    const float m = beta1 * exp_avg[i] + rest1 * g, v = beta2 * exp_avg_sq[i] + rest2 * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = p - step_size * m / (std::sqrt(v) / bias2 + eps);
  }
}

template <typename Half>
INLINE void run(const Tensor& tensor, int64_t begin, int64_t end, const Step& step) {
  alignas(64) float params[kBlock], grads[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    const float* grad = widened<Half>(tensor.grad, tensor.grad_type, at, n, grads);
    float* param = const_cast<float*>(widened<Half>(tensor.param, tensor.param_type, at, n, params));
    float *exp_avg = tensor.exp_avg + at, *exp_avg_sq = tensor.exp_avg_sq + at;
    if (step.is_decoupled)
      update<true>(param, grad, exp_avg, exp_avg_sq, n, step);
    else
      update<false>(param, grad, exp_avg, exp_avg_sq, n, step);
    if (tensor.param_type != kFloat32) narrow<Half>(param, tensor.param, tensor.param_type, at, n);
    if (tensor.copy_type != kNone) narrow<Half>(param, tensor.copy, tensor.copy_type, at, n);
  }
}

using Run = void (*)(const Tensor&, int64_t, int64_t, const Step&);

void run_portable(const Tensor& tensor, int64_t begin, int64_t end, const Step& step) {
  run<Portable>(tensor, begin, end, step);
}

#if defined(__x86_64__)
AVX2 void run_avx2(const Tensor& tensor, int64_t begin, int64_t end, const Step& step) {
  run<F16c>(tensor, begin, end, step);
}

AVX512 void run_avx512(const Tensor& tensor, int64_t begin, int64_t end, const Step& step) {
  run<F16c>(tensor, begin, end, step);
}
#endif

Run run_of(int32_t level) {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level >= 2 && has_avx512) return run_avx512;
  if (level >= 1 && has_avx2) return run_avx2;
#endif
  (void)level;
  return run_portable;
}

}  // namespace

// level: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code.
extern "C" void colossal_adam(const Tensor* tensors, int64_t count, const Step* step, int32_t threads, int32_t level) {
  const Run run_part = run_of(level);
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
  std::vector<std::thread> others;
  for (int64_t worker = 1; worker < workers; ++worker) others.emplace_back(work, worker);
  work(0);
  for (auto& other : others) other.join();
}
