// Copies of memory that nobody reads soon.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>

namespace {

constexpr size_t kLine = 64, kPage = 4096, kPages = 4;

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

}  // namespace

extern "C" void colossal_stream_copy(void* target, const void* source, size_t num_bytes) {
  auto* to = static_cast<char*>(target);
  auto* from = static_cast<const char*>(source);
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
  if (num_bytes < head + kLine) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  // Four pages at a time keep more of the memory's banks busy than one.
  for (; at + kPages * kPage <= num_bytes; at += kPages * kPage)
    for (size_t line = 0; line < kPage; line += kLine)
      for (size_t page = 0; page < kPages; ++page)
        stream_line(to + at + page * kPage + line, from + at + page * kPage + line);
  for (; at + kLine <= num_bytes; at += kLine) stream_line(to + at, from + at);
  std::memcpy(to + at, from + at, num_bytes - at);
  _mm_sfence();
}

#else

extern "C" void colossal_stream_copy(void* target, const void* source, size_t num_bytes) {
  std::memcpy(target, source, num_bytes);
}

#endif
