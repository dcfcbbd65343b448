// Collectives and messages between processes of one host, through memory that they share.

#include <sched.h>
#include <sys/mman.h>

#include <new>

#include "shm/collectives.h"
#include "shm/messages.h"

using namespace colossal;

namespace {

struct Handle {
  Group group;
  Post post;
  Handle(char* base, uint32_t rank, uint32_t size, const int* pids, int spins, uint32_t isa)
      : group(base, rank, size, pids, spins, isa), post(group) {}
};

// What the interpreter passes: one for all collectives.
struct Order {
  Call call;
  const void* const* in;
  void* const* out;
  const uint64_t* splits;  // what goes to each rank, then what comes from each, in bytes; null where all are equal
  uint64_t item;           // bytes of an element
  int64_t timeout_ns;
};

bool carry_out(Group& g, const Order& order) {
  const Call& call = order.call;
  if (call.is_elsewhere) return barrier(g);
  const uint64_t bytes = call.count * order.item;
  const Reducer reducer(g.isa, call.dtype, call.reduction, g.size);
  uint64_t parts[kMaxRanks];
  for (uint32_t peer = 0; peer < g.size; ++peer)
    parts[peer] = call.kind == kReduceScatter || peer == static_cast<uint32_t>(call.root) ? bytes : 0;
  switch (call.kind) {
    case kAllReduce: return all_reduce(g, reducer, order.out[0], call.count, order.item);
    case kReduceScatter:
    case kReduce: return reduce_parts(g, reducer, order.in, order.out, parts, false);
    case kAllGather:
    case kBroadcast: return share(g, order.in[0], order.out, bytes, call.root);
    case kAllToAll:
    case kScatter:
    case kGather: return exchange(g, call, order.in, order.out, order.splits, order.item);
    default: return barrier(g);
  }
}

// Map a descriptor to where huge pages can begin, and ask for some.
char* map_aligned(int descriptor, size_t bytes) {
  void* room = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(room);
  char* base = begin + (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (base != begin) munmap(begin, base - begin);
  if (base + bytes != begin + bytes + kHugePage) munmap(base + bytes, begin + kHugePage - base);
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
    munmap(base, bytes);
    return nullptr;
  }
  madvise(base, bytes, MADV_HUGEPAGE);
  return base;
}

}  // namespace

extern "C" {

uint64_t colossal_shm_bytes(uint32_t size) { return Layout(size).end; }
uint32_t colossal_shm_max_ranks() { return kMaxRanks; }
uint32_t colossal_shm_best_isa() { return best_isa(); }

// Map the memory behind a descriptor, which is all zeros when the first rank comes. Null, with errno, if that fails.
void* colossal_shm_open(int descriptor, uint32_t rank, uint32_t size, const int* pids, int spins, uint32_t isa) {
  const Layout layout(size);
  char* base = map_aligned(descriptor, layout.end);
  return base ? new (std::nothrow) Handle(base, rank, size, pids, spins, isa) : nullptr;
}

// Tell the others that this rank takes no part any more, and end the waits of its own threads.
void colossal_shm_leave(void* handle) { static_cast<Handle*>(handle)->group.leave(); }

// Once no thread of this process is in a call.
void colossal_shm_close(void* handle) {
  auto* whole = static_cast<Handle*>(handle);
  whole->group.leave();
  char* base = whole->group.base;
  const size_t bytes = whole->group.layout.end;
  delete whole;
  munmap(base, bytes);
}

int colossal_shm_run(void* handle, const Order* order) {
  Group& g = static_cast<Handle*>(handle)->group;
  if (g.is_broken()) return 0;
  g.deadline = now_ns() + order->timeout_ns;
  g.announce(order->call);
  return carry_out(g, *order);
}

// The fault's kind, who found it, and the details of that rank.
uint32_t colossal_shm_fault(void* handle, uint32_t* finder, Detail* detail) {
  Group& g = static_cast<Handle*>(handle)->group;
  const uint64_t word = g.header().fault.load();
  if (!word) return g.is_closed.load() ? kClosed : kNoFault;
  *finder = word >> 8 & 0xff;
  *detail = g.member(*finder).detail;
  return word & 0xff;
}

// What a rank said in the step of a mismatch.
void colossal_shm_call(void* handle, uint32_t rank, uint32_t parity, Call* call) {
  *call = static_cast<Handle*>(handle)->group.member(rank).calls[parity];
}

void* colossal_shm_send(void* handle, uint32_t to, uint32_t tag, uint32_t dtype, const void* data, uint64_t bytes) {
  return static_cast<Handle*>(handle)->post.send(to, tag, dtype, data, bytes);
}

void* colossal_shm_receive(void* handle, int32_t from, uint32_t tag, uint32_t dtype, void* data, uint64_t bytes) {
  return static_cast<Handle*>(handle)->post.receive(from, tag, dtype, data, bytes);
}

// Move what can be moved, and tell a message's state.
int colossal_shm_look(void* handle, void* message) {
  return static_cast<Handle*>(handle)->post.look(*static_cast<Message*>(message));
}

int colossal_shm_state(void* message) { return static_cast<Message*>(message)->state.load(); }

int colossal_shm_wait(void* handle, void* message, int64_t timeout_ns) {
  return static_cast<Handle*>(handle)->post.wait(*static_cast<Message*>(message), now_ns() + timeout_ns);
}

int32_t colossal_shm_source(void* message) { return static_cast<Message*>(message)->peer.load(); }

void colossal_shm_release(void* handle, void* message) {
  static_cast<Handle*>(handle)->post.release(static_cast<Message*>(message));
}

}  // extern "C"
