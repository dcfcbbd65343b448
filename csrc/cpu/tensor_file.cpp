// Asynchronous reading and writing of parts of a file.

#include <memory>

#include "tensor_file/pool.h"

#if __has_include(<linux/io_uring.h>)
#include "tensor_file/ring.h"
#define HAS_RING 1
#endif

using colossal::Engine;
using colossal::Order;
using colossal::Request;

extern "C" {

// A ring of so many pieces in flight; null where the kernel, or a sandbox, has none.
void* colossal_file_ring(uint32_t depth) {
#ifdef HAS_RING
  return colossal::Ring::open(depth);
#else
  return nullptr;
#endif
}

// So many threads, or as many as there are to be had; null if that is none.
void* colossal_file_pool(uint32_t threads) {
  std::unique_ptr<colossal::Pool> pool(new colossal::Pool(static_cast<int>(threads)));
  return pool->is_running() ? static_cast<Engine*>(pool.release()) : nullptr;
}

void* colossal_file_submit(void* engine, const Order* order) { return static_cast<Engine*>(engine)->submit(*order); }

int32_t colossal_file_is_done(void* engine, void* request) {
  return static_cast<Engine*>(engine)->is_done(static_cast<Request*>(request));
}

// Wait for a request; returns an errno, -1 at the end of the file, or 0.
int32_t colossal_file_wait(void* engine, void* request) {
  return static_cast<Engine*>(engine)->wait(static_cast<Request*>(request));
}

// A request that was waited for.
void colossal_file_forget(void* request) { delete static_cast<Request*>(request); }

// What is in flight is finished first.
void colossal_file_close(void* engine) { delete static_cast<Engine*>(engine); }

}  // extern "C"
