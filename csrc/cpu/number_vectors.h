// Vectors of the compiler: of float32, in which bfloat16 is computed, and of float64.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../numbers.h"
#include "exponential.h"

namespace colossal {

COLOSSAL_INLINE float widen(uint16_t half) { return widen_bfloat16(half); }
COLOSSAL_INLINE float widen(float value) { return value; }
COLOSSAL_INLINE double widen(double value) { return value; }

COLOSSAL_INLINE void narrow(float value, float* to) { *to = value; }
COLOSSAL_INLINE void narrow(double value, double* to) { *to = value; }
COLOSSAL_INLINE void narrow(float value, uint16_t* to) { *to = narrow_bfloat16(value); }

// Vectors of so many bytes, as the processor has them: of longer ones, compilers compute comparisons one by one.
template <typename Sum, int64_t kBytes>
struct Vectors;

template <int64_t kBytes>
struct Vectors<float, kBytes> {
  typedef float Type __attribute__((vector_size(kBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kBytes)));
  typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));
  static COLOSSAL_INLINE Type exp(Type x) { return exp_of_float<Vectors>(x); }
};

template <int64_t kBytes>
struct Vectors<double, kBytes> {
  typedef double Type __attribute__((vector_size(kBytes)));
  typedef uint64_t Bits __attribute__((vector_size(kBytes)));
  static COLOSSAL_INLINE Type exp(Type x) { return exp_of_double<Vectors>(x); }
};

template <typename Of, typename Value>
COLOSSAL_INLINE typename Of::Type load(const Value* from) {
  typename Of::Type found;
  if constexpr (std::is_same_v<Value, uint16_t>) {  // bfloat16: the upper half of float32
    typename Of::Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const typename Of::Bits bits = __builtin_convertvector(halves, typename Of::Bits) << 16;
    std::memcpy(&found, &bits, sizeof found);
  } else {
    std::memcpy(&found, from, sizeof found);
  }
  return found;
}

// Rounded as by `narrow_bfloat16`, in the upper half of each number; the lower half is of no account.
template <typename Of>
COLOSSAL_INLINE typename Of::Bits round_to_bfloat16(typename Of::Type values) {
  typename Of::Bits bits;
  std::memcpy(&bits, &values, sizeof bits);
  const typename Of::Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u), nan = bits * 0u + 0x7fc00000u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

template <typename Of, typename Value>
COLOSSAL_INLINE void store(typename Of::Type values, Value* to) {
  if constexpr (std::is_same_v<Value, uint16_t>) {
    const auto halves = __builtin_convertvector(round_to_bfloat16<Of>(values) >> 16, typename Of::Halves);
    std::memcpy(to, &halves, sizeof halves);
  } else {
    std::memcpy(to, &values, sizeof values);
  }
}

// What would be read of values after they were stored in their type.
template <typename Of, typename Value>
COLOSSAL_INLINE typename Of::Type as_stored(typename Of::Type values) {
  if constexpr (std::is_same_v<Value, uint16_t>) {
    const typename Of::Bits bits = round_to_bfloat16<Of>(values) & 0xffff0000u;
    std::memcpy(&values, &bits, sizeof values);
  }
  return values;
}

template <typename Value>
COLOSSAL_INLINE auto as_stored(decltype(widen(Value())) value) {
  Value stored;
  narrow(value, &stored);
  return widen(stored);
}

// Two vectors of numbers that follow each other: of bfloat16, those at even places and those at odd ones, for which
// processors need a shift and a mask, and several instructions to have them in order.
template <typename Of, typename Value>
COLOSSAL_INLINE void load_two(const Value* from, typename Of::Type (&to)[2]) {
  if constexpr (std::is_same_v<Value, uint16_t>) {
    typename Of::Bits pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    const typename Of::Bits parts[2] = {pairs << 16, pairs & 0xffff0000u};
    std::memcpy(&to[0], &parts[0], sizeof to[0]);
    std::memcpy(&to[1], &parts[1], sizeof to[1]);
  } else {
    std::memcpy(&to[0], from, sizeof to[0]);
    std::memcpy(&to[1], from + sizeof to[0] / sizeof(Value), sizeof to[1]);
  }
}

template <typename Of, typename Value>
COLOSSAL_INLINE void store_two(const typename Of::Type (&values)[2], Value* to) {
  if constexpr (std::is_same_v<Value, uint16_t>) {
    const typename Of::Bits pairs =
        (round_to_bfloat16<Of>(values[0]) >> 16) | (round_to_bfloat16<Of>(values[1]) & 0xffff0000u);
    std::memcpy(to, &pairs, sizeof pairs);
  } else {
    std::memcpy(to, &values[0], sizeof values[0]);
    std::memcpy(to + sizeof values[0] / sizeof(Value), &values[1], sizeof values[1]);
  }
}

// The sum of the numbers of a vector, by halves.
template <typename Sum, int64_t kBytes>
COLOSSAL_INLINE Sum sum_of_lanes(typename Vectors<Sum, kBytes>::Type values) {
  if constexpr (kBytes == 2 * sizeof(Sum)) {
    return values[0] + values[1];
  } else {
    typename Vectors<Sum, kBytes / 2>::Type halves[2];
    std::memcpy(halves, &values, sizeof halves);
    return sum_of_lanes<Sum, kBytes / 2>(halves[0] + halves[1]);
  }
}

}  // namespace colossal
