// The copy of stream.h, for those who call it from outside.

#include "stream.h"

extern "C" void colossal_stream_copy(void* target, const void* source, size_t num_bytes) {
  colossal::stream_copy(static_cast<char*>(target), static_cast<const char*>(source), num_bytes);
}
