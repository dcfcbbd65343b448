// What the ranks of a group share: one piece of memory, laid out the same way by all.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace colossal {

constexpr uint32_t kMaxRanks = 64;  // a set of ranks is one word
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;
constexpr size_t kSlotBytes = 1 << 20, kPartBytes = 256 << 10;  // at most, of a slot and its part for one rank
constexpr size_t kMailBytes = 16 << 20, kMinRingBytes = 16 << 10, kMaxRingBytes = 1 << 19;

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "processes that share memory share no locks");

// A number that one rank raises and others wait for. Who raises it from the very core that waits gets no further before
// the other sleeps, so spinning is in vain; hence the core.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> core;

  void raised_from(uint32_t here) { core.store(here, std::memory_order_relaxed); }
  bool is_raised_here(uint32_t here) const { return core.load(std::memory_order_relaxed) == here; }
};

// What a rank says it is about to do.
struct alignas(kLine) Call {
  uint32_t kind, dtype, reduction;
  int32_t root;
  uint64_t count;  // of elements; of those that come from or go to each rank where there is a part for each
  uint32_t is_uneven, is_elsewhere;  // the latter: another library does it once all have agreed

  bool equals(const Call& other) const {
    return kind == other.kind && dtype == other.dtype && reduction == other.reduction && root == other.root &&
           count == other.count && is_uneven == other.is_uneven && is_elsewhere == other.is_elsewhere;
  }
};

enum Kind : uint32_t {
  kBarrier,
  kAllReduce,
  kReduceScatter,
  kReduce,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kScatter,
  kGather
};

// Why a group is broken.
enum FaultKind : uint32_t { kNoFault, kTimeout, kDead, kLeft, kMismatch, kSplits, kMessage, kClosed };

// Told by the rank that found the fault, before the word that says so is set.
struct alignas(kLine) Detail {
  uint64_t ranks;   // the guilty ones, a bit for each
  uint32_t parity;  // of the step in which calls differed
  uint32_t from, to, tag, sent_dtype, expected_dtype;
  uint64_t sent_bytes, expected_bytes;
};

struct alignas(kLine) Member {
  Counter posted;  // steps that this rank has finished
  Counter bell;    // rung when its messages may have moved
  std::atomic<uint32_t> has_left;
  Detail detail;
  Call calls[2];
};

struct alignas(kLine) Header {
  std::atomic<uint64_t> fault;  // kind in the lowest byte, who found it in the next
};

// A ring of bytes from one rank to another.
struct alignas(kLine) Mail {
  alignas(kLine) std::atomic<uint64_t> written;
  alignas(kLine) std::atomic<uint64_t> read;
};

struct Envelope {  // goes before each message in a ring; as long as a line
  uint64_t bytes;
  uint32_t tag, dtype;
  uint64_t unused[6];
};
static_assert(sizeof(Envelope) == kLine, "messages start at lines");

inline size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Where things are.
struct Layout {
  uint32_t size;
  size_t ring_bytes, slot_bytes, splits, mails, rings, slots, end;

  explicit Layout(uint32_t ranks) : size(ranks) {
    const size_t pairs = size_t{ranks} * ranks;
    ring_bytes = kMaxRingBytes;
    while (ring_bytes > kMinRingBytes && ring_bytes * pairs > kMailBytes) ring_bytes /= 2;
    slot_bytes = std::min(kSlotBytes, ranks * kPartBytes);
    splits = round_up(sizeof(Header) + ranks * sizeof(Member), kPage);
    mails = round_up(splits + 2 * 2 * pairs * sizeof(uint64_t), kPage);
    rings = round_up(mails + pairs * sizeof(Mail), kPage);
    slots = round_up(rings + pairs * ring_bytes, kHugePage);
    end = round_up(slots + 2 * ranks * slot_bytes, kHugePage);
  }
};

}  // namespace colossal
