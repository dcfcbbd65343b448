// Copies of memory that nobody reads soon.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace colossal {

#if defined(__SSE2__)

// Streaming stores send a whole line to memory, and do not read it before, as ordinary stores must.
inline void stream_line(char* target, const char* source) {
  auto* to = reinterpret_cast<__m128i*>(target);
  auto* from = reinterpret_cast<const __m128i*>(source);
  const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

inline void stream_copy(char* to, const char* from, size_t num_bytes) {
  constexpr size_t line = 64, page = 4096, pages = 4;
  const size_t head = -reinterpret_cast<uintptr_t>(to) % line;
  if (num_bytes < head + line) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  // Four pages at a time keep more of the memory's banks busy than one.
  for (; at + pages * page <= num_bytes; at += pages * page)
    for (size_t inside = 0; inside < page; inside += line)
      for (size_t begin = 0; begin < pages * page; begin += page)
        stream_line(to + at + begin + inside, from + at + begin + inside);
  for (; at + line <= num_bytes; at += line) stream_line(to + at, from + at);
  std::memcpy(to + at, from + at, num_bytes - at);
  _mm_sfence();
}

#else

inline void stream_copy(char* to, const char* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }

#endif

}  // namespace colossal
