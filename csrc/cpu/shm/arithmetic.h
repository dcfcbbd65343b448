// Reductions over the ranks' numbers, in the order of the ranks, so that everybody who computes one gets the same bits.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace colossal {

enum Dtype : uint32_t { kF32, kF64, kBF16, kF16, kI8, kU8, kI16, kI32, kI64, kOther };
enum Reduction : uint32_t { kSum, kAvg, kMax, kMin };

#define COLOSSAL_INLINE inline __attribute__((always_inline))

constexpr size_t kBlock = 512;  // elements that are reduced at a time; their sums stay in the nearest cache
constexpr size_t kLevels = 8;   // of sums of sums, for 64 ranks

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

COLOSSAL_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
COLOSSAL_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

COLOSSAL_INLINE float widen(BFloat16 x) { return float_of(uint32_t{x.bits} << 16); }

// To the nearest, ties to even; not-a-number stays that.
COLOSSAL_INLINE void narrow(float value, BFloat16* to) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

COLOSSAL_INLINE float widen(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = uint32_t{x.bits & 0x7fffu} << 13;
  const float scaled = float_of(rest) * float_of(0x77800000);  // 2^112 moves the exponent, subnormals too
  const float special = float_of(rest | 0x7f800000);
  return float_of(sign | bits_of(rest >= 0x0f800000 ? special : scaled));
}

COLOSSAL_INLINE void narrow(float value, Float16* to) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  const uint32_t normal = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
  const uint32_t tiny = bits_of(float_of(rest) + 0.5f) - 0x3f000000;  // adding a half rounds at the 24th place
  uint32_t result = rest < 0x38800000 ? tiny : normal;
  result = rest >= 0x477ff000 ? 0x7c00 : result;  // what rounds to infinity
  result = rest > 0x7f800000 ? 0x7e00 : result;
  to->bits = static_cast<uint16_t>(sign | result);
}

template <uint32_t R, class A> COLOSSAL_INLINE A combine(A a, A b) {
  if constexpr (R == kMax) return a > b || a != a ? a : b;
  if constexpr (R == kMin) return a < b || a != a ? a : b;
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) + static_cast<std::make_unsigned_t<A>>(b));
  } else {
    return a + b;
  }
}

// The loops, each compiled for several instruction sets.
template <uint32_t R, class A> COLOSSAL_INLINE void combine_all(void* to, const void* a, const void* b, size_t count) {
  auto* result = static_cast<A*>(to);
  auto *left = static_cast<const A*>(a), *right = static_cast<const A*>(b);
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) result[i] = combine<R, A>(left[i], right[i]);
}
template <class A> COLOSSAL_INLINE void divide_all(void* to, const void* from, uint32_t by, size_t count) {
  for (size_t i = 0; i < count; ++i) static_cast<A*>(to)[i] = static_cast<const A*>(from)[i] / static_cast<A>(by);
}
template <class T> COLOSSAL_INLINE void widen_all(float* to, const void* from, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = widen(static_cast<const T*>(from)[i]);
}
template <class T> COLOSSAL_INLINE void narrow_all(void* to, const float* from, size_t count) {
  for (size_t i = 0; i < count; ++i) narrow(from[i], static_cast<T*>(to) + i);
}

// What is known of a dtype on one instruction set.
struct Arithmetic {
  size_t item, summand;  // bytes of an element, and of one while it is summed
  void (*combine[4])(void*, const void*, const void*, size_t);
  void (*divide)(void*, const void*, uint32_t, size_t);
  void (*widen)(float*, const void*, size_t);
  void (*narrow)(void*, const float*, size_t);
};

#define COLOSSAL_VARIANT(NAME, TARGET)                                                                                 \
  template <uint32_t R, class A> TARGET void NAME##_combine(void* to, const void* a, const void* b, size_t n) {        \
    combine_all<R, A>(to, a, b, n);                                                                                    \
  }                                                                                                                    \
  template <class A> TARGET void NAME##_divide(void* to, const void* from, uint32_t by, size_t n) {                    \
    divide_all<A>(to, from, by, n);                                                                                    \
  }                                                                                                                    \
  template <class T> TARGET void NAME##_widen(float* to, const void* from, size_t n) { widen_all<T>(to, from, n); }    \
  template <class T> TARGET void NAME##_narrow(void* to, const float* from, size_t n) { narrow_all<T>(to, from, n); }  \
  template <class A> constexpr Arithmetic NAME##_plain() {                                                             \
    return {sizeof(A),                                                                                                 \
            sizeof(A),                                                                                                 \
            {NAME##_combine<kSum, A>, NAME##_combine<kSum, A>, NAME##_combine<kMax, A>, NAME##_combine<kMin, A>},      \
            NAME##_divide<A>,                                                                                          \
            nullptr,                                                                                                   \
            nullptr};                                                                                                  \
  }                                                                                                                    \
  template <class T> constexpr Arithmetic NAME##_half() {                                                              \
    Arithmetic half = NAME##_plain<float>();                                                                           \
    half.item = sizeof(T), half.widen = NAME##_widen<T>, half.narrow = NAME##_narrow<T>;                               \
    return half;                                                                                                       \
  }                                                                                                                    \
  inline const Arithmetic* NAME##_table() {                                                                            \
    static constexpr Arithmetic table[] = {NAME##_plain<float>(),   NAME##_plain<double>(),  NAME##_half<BFloat16>(),  \
                                           NAME##_half<Float16>(),  NAME##_plain<int8_t>(),  NAME##_plain<uint8_t>(),  \
                                           NAME##_plain<int16_t>(), NAME##_plain<int32_t>(), NAME##_plain<int64_t>()}; \
    return table;                                                                                                      \
  }

COLOSSAL_VARIANT(portable, )
#if defined(__x86_64__)
#define COLOSSAL_AVX2 __attribute__((target("avx2,fma,f16c")))
#define COLOSSAL_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
COLOSSAL_VARIANT(avx2, COLOSSAL_AVX2)
COLOSSAL_VARIANT(avx512, COLOSSAL_AVX512)

// Both know half precision themselves.
COLOSSAL_AVX2 inline void f16c_widen(float* to, const void* from, size_t count) {
  auto* half = static_cast<const Float16*>(from);
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i))));
  for (; i < count; ++i) to[i] = widen(half[i]);
}
COLOSSAL_AVX2 inline void f16c_narrow(void* to, const float* from, size_t count) {
  auto* half = static_cast<Float16*>(to);
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  for (; i < count; ++i) narrow(from[i], &half[i]);
}
#endif

enum Isa : uint32_t { kPortable, kAvx2, kAvx512 };

inline uint32_t best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return kAvx512;
  if (has_avx2) return kAvx2;
#endif
  return kPortable;
}

inline Arithmetic arithmetic_of(uint32_t isa, uint32_t dtype) {
  const uint32_t row = dtype < kOther ? dtype : kU8;
#if defined(__x86_64__)
  if (isa != kPortable) {
    Arithmetic found = isa == kAvx512 ? avx512_table()[row] : avx2_table()[row];
    if (dtype == kF16) found.widen = f16c_widen, found.narrow = f16c_narrow;
    return found;
  }
#else
  (void)isa;
#endif
  return portable_table()[row];
}

// One reduction of one dtype.
struct Reducer {
  Arithmetic arithmetic;
  uint32_t reduction, size;

  Reducer(uint32_t isa, uint32_t dtype, uint32_t reduction, uint32_t size)
      : arithmetic(arithmetic_of(isa, dtype)), reduction(reduction & 3), size(size) {}

  // Reduce the sources, one of each rank, to `first`, which may be one of them, and copy that to `second` if given.
  void operator()(void* first, void* second, const void* const* sources, size_t bytes) const {
    const size_t item = arithmetic.item;
    for (size_t at = 0; at < bytes; at += kBlock * item) {
      const size_t count = bytes - at < kBlock * item ? (bytes - at) / item : kBlock;
      reduce_block(static_cast<char*>(first) + at, sources, at, count);
      if (second) std::memcpy(static_cast<char*>(second) + at, static_cast<char*>(first) + at, count * item);
    }
  }

 private:
  void reduce_block(void* to, const void* const* sources, size_t at, size_t count) const {
    alignas(64) char rooms[kLevels][kBlock * 8];
    const bool ends_elsewhere = arithmetic.narrow || reduction == kAvg || size == 1;
    const void* left = reduce_ranks(0, size, ends_elsewhere ? rooms[0] : to, rooms, sources, at, count);
    if (!ends_elsewhere) return;
    if (reduction == kAvg) {
      void* result = arithmetic.narrow ? rooms[0] : to;
      arithmetic.divide(result, left, size, count);
      left = result;
    }
    if (arithmetic.narrow) arithmetic.narrow(to, static_cast<const float*>(left), count);
    else if (left != to) std::memmove(to, left, count * arithmetic.item);
  }

  // Halves first: n summands are rounded log2(n) times instead of n-1. Each level has a room of its own.
  const void* reduce_ranks(uint32_t begin, uint32_t end, void* to, char (*rooms)[kBlock * 8],
                           const void* const* sources, size_t at, size_t count) const {
    if (end - begin == 1) return source(sources[begin], at, rooms[0], count);
    const uint32_t middle = begin + (end - begin + 1) / 2;
    const void* left = reduce_ranks(begin, middle, rooms[0], rooms, sources, at, count);
    const void* right = reduce_ranks(middle, end, rooms[1], rooms + 1, sources, at, count);
    arithmetic.combine[reduction](to, left, right, count);
    return to;
  }

  const void* source(const void* from, size_t at, char* room, size_t count) const {
    const char* begin = static_cast<const char*>(from) + at;
    if (!arithmetic.widen) return begin;
    arithmetic.widen(reinterpret_cast<float*>(room), begin, count);
    return room;
  }
};

}  // namespace colossal
