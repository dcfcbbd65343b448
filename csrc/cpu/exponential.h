// e^x, of numbers or of vectors of the compiler.

#pragma once

#include <cstdint>
#include <cstring>

#include "../numbers.h"

namespace colossal {

// Of float32, as 2^n * e^r with r in [-ln 2 / 2, ln 2 / 2]; relative error below 3e-7. Numbers below -87 or above 87
// count as these. Of::Type is float, and Of::Bits uint32_t, or both are vectors of as many.
template <typename Of>
COLOSSAL_INLINE typename Of::Type exp_of_float(typename Of::Type x) {
  using Value = typename Of::Type;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
  const Value least = Value{} - 87.0f, most = Value{} + 87.0f;
  x = x < least ? least : x;
  x = x > most ? most : x;
  const Value shifted = x * 1.44269504f + kShift, n = shifted - kShift;
  const Value r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Value sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * r * r + r + 1.0f;
  typename Of::Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127u) << 23;
  Value power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

// Of float64, by the series of e^r; relative error below 1e-15. From -708 to 708; Of::Bits is uint64_t.
template <typename Of>
COLOSSAL_INLINE typename Of::Type exp_of_double(typename Of::Type x) {
  using Value = typename Of::Type;
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  const Value least = Value{} - 708.0, most = Value{} + 708.0;
  x = x < least ? least : x;
  x = x > most ? most : x;
  const Value shifted = x * 1.4426950408889634 + kShift, n = shifted - kShift;
  const Value r = (x - n * 0.693145751953125) - n * 1.42860682030941723e-6;
  Value sum = r * (1.0 / 6227020800) + 1.0 / 479001600;
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
  typename Of::Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023u) << 52;
  Value power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

template <typename Number, typename BitsOfNumber>
struct OneNumber {
  using Type = Number;
  using Bits = BitsOfNumber;
};

COLOSSAL_INLINE float exp_of(float x) { return exp_of_float<OneNumber<float, uint32_t>>(x); }
COLOSSAL_INLINE double exp_of(double x) { return exp_of_double<OneNumber<double, uint64_t>>(x); }

}  // namespace colossal
