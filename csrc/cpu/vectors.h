// Which vectors the processor has, and functions that are compiled for them.

#pragma once

#include <cstdint>

// What is compiled for one kind of vectors; as any other function where there are none of that kind.
#if defined(__x86_64__)
#define COLOSSAL_AVX2 __attribute__((target("avx2,fma,f16c")))
#define COLOSSAL_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#else
#define COLOSSAL_AVX2
#define COLOSSAL_AVX512
#endif

namespace colossal {

// 2 for AVX-512, 1 for AVX2, 0 for none of them; at most what is asked for.
inline int64_t vectors_up_to(int64_t level) {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level >= 2 && has_avx512) return 2;
  if (level >= 1 && has_avx2) return 1;
#endif
  (void)level;
  return 0;
}

}  // namespace colossal
