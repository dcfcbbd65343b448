// One rank's place in a group: what it has finished, how it waits for others, and what it does when they fail.
//
// [Note: steps]
// Collectives advance in steps. At the end of a step a rank posts that it has finished, and begins the next one when
// all have. What is written to shared memory in one step is read by others in the next, and buffers alternate: who
// writes a buffer in step t knows that everybody has finished step t-1, in which it was read last. So there is one
// wait a step, and no other. The last step of a collective is not posted: it is also the first of the next one.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "futex.h"
#include "layout.h"

namespace colossal {

struct Group {
  Layout layout;
  char* base;
  uint32_t rank, size, isa;
  uint32_t step = 0;
  int spins;
  int64_t deadline = 0;  // of the collective that runs
  int pids[kMaxRanks], handles[kMaxRanks];
  std::atomic<bool> is_closed{false};
  std::mutex fault_mutex;  // among this rank's threads

  Group(char* base, uint32_t rank, uint32_t size, const int* processes, int spins, uint32_t isa)
      : layout(size), base(base), rank(rank), size(size), isa(isa), spins(spins) {
    for (uint32_t peer = 0; peer < size; ++peer) {
      pids[peer] = processes[peer];
      handles[peer] = peer == rank ? -1 : open_process(processes[peer]);
    }
  }

  ~Group() {
    for (uint32_t peer = 0; peer < size; ++peer)
      if (handles[peer] >= 0) close(handles[peer]);
  }

  Header& header() { return *reinterpret_cast<Header*>(base); }
  Member& member(uint32_t peer) { return reinterpret_cast<Member*>(base + sizeof(Header))[peer]; }
  char* slot(uint32_t peer, uint32_t at_step) {
    return base + layout.slots + ((at_step & 1) * size_t{size} + peer) * layout.slot_bytes;
  }
  // How much a rank sends to each other one, and expects from it, where the parts differ.
  uint64_t* splits(uint32_t peer, uint32_t at_step) {
    return reinterpret_cast<uint64_t*>(base + layout.splits) + ((at_step & 1) * size_t{size} + peer) * 2 * size;
  }
  Mail& mail(uint32_t from, uint32_t to) {
    return reinterpret_cast<Mail*>(base + layout.mails)[size_t{from} * size + to];
  }
  char* ring(uint32_t from, uint32_t to) {
    return base + layout.rings + (size_t{from} * size + to) * layout.ring_bytes;
  }

  bool is_broken() {
    return is_closed.load(std::memory_order_relaxed) || header().fault.load(std::memory_order_acquire);
  }
  bool lives(uint32_t peer) { return peer == rank || process_lives(handles[peer], pids[peer]); }

  // Say that the group is broken, unless somebody said so before, and wake everybody up to see it. False.
  bool break_off(FaultKind kind, uint64_t guilty) {
    Detail detail{};
    detail.ranks = guilty;
    return break_off(kind, detail);
  }
  bool break_off(FaultKind kind, const Detail& detail) {
    std::lock_guard<std::mutex> lock(fault_mutex);
    if (is_broken()) return false;
    member(rank).detail = detail;
    uint64_t none = 0;
    header().fault.compare_exchange_strong(none, kind | uint64_t{rank} << 8);
    wake_all();
    return false;
  }
  void wake_all() {
    for (uint32_t peer = 0; peer < size; ++peer) {
      futex_wake(member(peer).posted.value);
      ring_bell(peer);
    }
  }

  void ring_bell(uint32_t peer) {
    member(peer).bell.raised_from(this_core());
    member(peer).bell.value.fetch_add(1);
    wake(member(peer).bell);
  }

  static void wake(Counter& counter) {
    if (counter.sleepers.load()) futex_wake(counter.value);
  }

  bool has_posted(uint32_t peer) {
    return static_cast<int32_t>(member(peer).posted.value.load(std::memory_order_acquire) - step) >= 0;
  }

  // Finish this step and wait until all have; false if the group is broken.
  bool advance() {
    Counter& own = member(rank).posted;
    own.raised_from(this_core());
    own.value.store(++step);
    wake(own);
    for (uint32_t peer = 0; peer < size; ++peer)
      if (!has_posted(peer) && !wait_for_post(peer)) return false;
    return true;
  }

  bool wait_for_post(uint32_t peer) {
    Counter& counter = member(peer).posted;
    if (spin(counter.is_raised_here(this_core()) ? 0 : spins, [&] { return has_posted(peer); })) return true;
    while (true) {
      counter.sleepers.fetch_add(1);
      const uint32_t seen = counter.value.load();
      const bool waits = static_cast<int32_t>(seen - step) < 0 && !is_broken();
      if (waits) futex_wait(counter.value, seen, kSliceNs);
      counter.sleepers.fetch_sub(1);
      if (has_posted(peer)) return true;
      if (is_broken()) return has_posted(peer);
      if (!still_hopes(peer) && !has_posted(peer) && !blame()) return false;
      if (has_posted(peer)) return true;
    }
  }

  static constexpr int64_t kSliceNs = 20000000;

  bool still_hopes(uint32_t peer) { return !member(peer).has_left.load() && lives(peer) && now_ns() < deadline; }

  // Break off because of those that have not posted: the dead if there are any, else those that left, else all. True if
  // all have posted by now.
  bool blame() {
    uint64_t late = 0, dead = 0, left = 0;
    for (uint32_t peer = 0; peer < size; ++peer) {
      if (has_posted(peer)) continue;
      const uint64_t bit = uint64_t{1} << peer;
      late |= bit;
      if (member(peer).has_left.load()) left |= bit;
      else if (!lives(peer)) dead |= bit;
    }
    if (!late) return true;
    if (dead) return break_off(kDead, dead);
    if (left) return break_off(kLeft, left);
    return break_off(kTimeout, late);
  }

  // Say what this rank is about to do; the others compare in the next step.
  void announce(const Call& call) { member(rank).calls[step & 1] = call; }

  bool agrees() {
    const uint32_t said = step - 1;
    const Call& own = member(rank).calls[said & 1];
    for (uint32_t peer = 0; peer < size; ++peer)
      if (!own.equals(member(peer).calls[said & 1])) {
        Detail detail{};
        detail.parity = said & 1;
        return break_off(kMismatch, detail);
      }
    return true;
  }

  void leave() {
    if (is_closed.exchange(true)) return;
    member(rank).has_left.store(1);
    futex_wake(member(rank).posted.value);
    for (uint32_t peer = 0; peer < size; ++peer) ring_bell(peer);
  }
};

}  // namespace colossal
