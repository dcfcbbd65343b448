// e^x of many numbers, in code that a compiler turns into vectors.

#pragma once

#include <cstdint>
#include <cstring>

#include "../numbers.h"

namespace colossal {

// As 2^n * e^r with r in [-ln 2 / 2, ln 2 / 2]; relative error below 3e-7. Other numbers count as the nearest of
// -87 to 87.
COLOSSAL_INLINE float exp_of(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
  x = x < -87.0f ? -87.0f : x;
  x = x > 87.0f ? 87.0f : x;
  const float shifted = x * 1.44269504f + kShift;
  const float n = shifted - kShift;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * r * r + r + 1.0f;
  return sum * bits_to_float((float_to_bits(shifted) + 127) << 23);
}

// The same by the series of e^r, for -708 to 708; relative error below 1e-15.
COLOSSAL_INLINE double exp_of(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  x = x < -708.0 ? -708.0 : x;
  x = x > 708.0 ? 708.0 : x;
  const double shifted = x * 1.4426950408889634 + kShift;
  const double n = shifted - kShift;
  const double r = (x - n * 0.693145751953125) - n * 1.42860682030941723e-6;
  double sum = 1.0 / 6227020800;
  sum = sum * r + 1.0 / 479001600;
  sum = sum * r + 1.0 / 39916800;
  sum = sum * r + 1.0 / 3628800;
  sum = sum * r + 1.0 / 362880;
  sum = sum * r + 1.0 / 40320;
  sum = sum * r + 1.0 / 5040;
  sum = sum * r + 1.0 / 720;
  sum = sum * r + 1.0 / 120;
  sum = sum * r + 1.0 / 24;
  sum = sum * r + 1.0 / 6;
  sum = sum * r + 0.5;
  sum = sum * r * r + r + 1.0;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

}  // namespace colossal
