// Numbers of low precision, for kernels for the CPU and for CUDA.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define COLOSSAL_BOTH __host__ __device__
#else
#define COLOSSAL_BOTH
#endif
#define COLOSSAL_INLINE COLOSSAL_BOTH inline __attribute__((always_inline))

namespace colossal {

COLOSSAL_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

COLOSSAL_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

COLOSSAL_INLINE float widen_bfloat16(uint16_t half) { return bits_to_float(static_cast<uint32_t>(half) << 16); }

COLOSSAL_INLINE uint16_t narrow_bfloat16(float value) {  // to the nearest, ties to even; a NaN stays one
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

COLOSSAL_INLINE float widen_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return bits_to_float(sign | ((rest + 0x1c000u) << 13));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return bits_to_float(sign | float_to_bits(small));
}

COLOSSAL_INLINE uint16_t narrow_float16(float value) {
  const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (rest < 0x38800000u)  // adding a half brings the bits of a subnormal number to where they belong, rounded
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

}  // namespace colossal
