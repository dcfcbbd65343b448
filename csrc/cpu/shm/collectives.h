// Collectives, cut into chunks that pass through the slots: each rank has two, written in alternate steps.

#pragma once

#include <algorithm>
#include <cstring>

#include "../stream.h"
#include "arithmetic.h"
#include "group.h"

namespace colossal {

constexpr size_t kDirectBytes = 32 << 10;  // up to here every rank reduces everything, which takes one wait less

constexpr uint64_t kStreamBytes = 4 << 20;

inline size_t chunk_at(uint64_t bytes, uint64_t index, size_t chunk) {
  const uint64_t begin = index * chunk;
  return begin >= bytes ? 0 : std::min<uint64_t>(chunk, bytes - begin);
}

inline uint64_t chunks_of(uint64_t bytes, size_t chunk) { return std::max<uint64_t>(1, (bytes + chunk - 1) / chunk); }

inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

// To the caller's memory. What is larger than the nearer caches would only push itself out of them.
inline void copy_out(void* to, const void* from, size_t bytes, uint64_t whole) {
  if (bytes && whole >= kStreamBytes) stream_copy(static_cast<char*>(to), static_cast<const char*>(from), bytes);
  else copy(to, from, bytes);
}

inline const char* offset(const void* pointer, uint64_t bytes) { return static_cast<const char*>(pointer) + bytes; }
inline char* offset(void* pointer, uint64_t bytes) { return static_cast<char*>(pointer) + bytes; }

inline bool advance_first(Group& group, uint64_t chunk) { return group.advance() && (chunk || group.agrees()); }

inline bool barrier(Group& group) { return advance_first(group, 0); }

// Every rank reads what the root, or without a root each rank, wrote to its slot.
inline bool share(Group& g, const void* own, void* const* out, uint64_t bytes, int32_t root) {
  const bool writes = root < 0 || static_cast<uint32_t>(root) == g.rank;
  const size_t room = g.layout.slot_bytes;
  const uint64_t chunks = chunks_of(bytes, room);
  if (root < 0 && out[g.rank] != own) copy_out(out[g.rank], own, bytes, bytes);
  for (uint64_t i = 0; i <= chunks; ++i) {
    if (i < chunks && writes) copy(g.slot(g.rank, g.step), offset(own, i * room), chunk_at(bytes, i, room));
    for (uint32_t k = 1; i && k < g.size; ++k) {
      const uint32_t peer = (g.rank + k) % g.size;
      if (root >= 0 && peer != static_cast<uint32_t>(root)) continue;
      const size_t part = chunk_at(bytes, i - 1, room);
      copy_out(offset(out[peer], part ? (i - 1) * room : 0), g.slot(peer, g.step - 1), part, bytes);
    }
    if (i < chunks && !advance_first(g, i)) return false;
  }
  return true;
}

// Bytes from one rank to another.
struct Parts {
  const Call& call;
  const uint64_t* splits;  // this rank's, if they are uneven
  uint64_t item;           // bytes of an element
  uint32_t rank, size;

  // One of the two is this rank.
  uint64_t bytes(uint32_t from, uint32_t to) const {
    if (call.is_uneven) return from == rank ? splits[to] : splits[size + from];
    if (call.root < 0) return call.count * item;
    const uint32_t fixed = call.kind == kScatter ? from : to;
    return fixed == static_cast<uint32_t>(call.root) ? call.count * item : 0;
  }
};

// Compare what all ranks said in the step before; returns the longest part, or nothing where they contradict others.
inline bool compare_splits(Group& g, uint64_t* longest) {
  for (uint32_t from = 0; from < g.size; ++from)
    for (uint32_t to = 0; to < g.size; ++to) {
      const uint64_t sent = g.splits(from, g.step - 1)[to], expected = g.splits(to, g.step - 1)[g.size + from];
      *longest = std::max(*longest, sent);
      if (sent == expected) continue;
      Detail detail{};
      detail.from = from, detail.to = to, detail.sent_bytes = sent, detail.expected_bytes = expected;
      return g.break_off(kSplits, detail);
    }
  return true;
}

// Every rank has a part for every other one. Splits: what is sent to each rank, then what each one sends here.
inline bool exchange(Group& g, const Call& call, const void* const* in, void* const* out, const uint64_t* splits,
                     uint64_t item) {
  const Parts parts{call, splits, item, g.rank, g.size};
  uint64_t longest = call.count * item;
  if (call.is_uneven) {
    std::memcpy(g.splits(g.rank, g.step), splits, 2 * g.size * sizeof(uint64_t));
    if (!advance_first(g, 0) || !compare_splits(g, &longest)) return false;
  }
  const size_t room = g.layout.slot_bytes / g.size / kLine * kLine;
  const uint64_t chunks = chunks_of(longest, room);
  copy(out[g.rank], in[g.rank], parts.bytes(g.rank, g.rank));
  for (uint64_t i = 0; i <= chunks; ++i) {
    for (uint32_t k = 1; i < chunks && k < g.size; ++k) {
      const uint32_t peer = (g.rank + k) % g.size;
      const size_t bytes = chunk_at(parts.bytes(g.rank, peer), i, room);
      copy(g.slot(g.rank, g.step) + peer * room, offset(in[peer], bytes ? i * room : 0), bytes);
    }
    for (uint32_t k = 1; i && k < g.size; ++k) {
      const uint32_t peer = (g.rank + g.size - k) % g.size;
      const size_t bytes = chunk_at(parts.bytes(peer, g.rank), i - 1, room);
      const char* from = g.slot(peer, g.step - 1) + g.rank * room;
      copy_out(offset(out[peer], bytes ? (i - 1) * room : 0), from, bytes, longest);
    }
    if (i < chunks && !advance_first(g, i + call.is_uneven)) return false;
  }
  return true;
}

// Small: everybody writes everything and reduces everything.
inline bool reduce_directly(Group& g, const Reducer& reducer, const void* in, void* out, uint64_t count,
                            uint64_t item) {
  copy(g.slot(g.rank, g.step), in, count * item);
  if (!advance_first(g, 0)) return false;
  const void* sources[kMaxRanks];
  for (uint32_t peer = 0; peer < g.size; ++peer) sources[peer] = g.slot(peer, g.step - 1);
  reducer(out, nullptr, sources, count * item);
  return true;
}

// Part j of everybody's numbers is reduced by rank j, who writes it to its own `out[j]`, and where the result is shared
// to its slot, from which the others take it.
inline bool reduce_parts(Group& g, const Reducer& reducer, const void* const* in, void* const* out,
                         const uint64_t* bytes, bool is_shared) {
  const size_t room = g.layout.slot_bytes / g.size / kLine * kLine;
  uint64_t chunks = 1;
  for (uint32_t peer = 0; peer < g.size; ++peer) chunks = std::max(chunks, chunks_of(bytes[peer], room));
  const uint64_t steps = chunks + is_shared;
  for (uint64_t i = 0; i <= steps; ++i) {
    for (uint32_t k = 1; i < chunks && k < g.size; ++k) {
      const uint32_t peer = (g.rank + k) % g.size;
      const size_t part = chunk_at(bytes[peer], i, room);
      copy(g.slot(g.rank, g.step) + peer * room, offset(in[peer], part ? i * room : 0), part);
    }
    const size_t own = i && i <= chunks ? chunk_at(bytes[g.rank], i - 1, room) : 0;
    if (own) {
      const void* sources[kMaxRanks];
      for (uint32_t peer = 0; peer < g.size; ++peer)
        sources[peer] = peer == g.rank ? offset(in[peer], (i - 1) * room) : g.slot(peer, g.step - 1) + g.rank * room;
      void* shared = is_shared ? g.slot(g.rank, g.step) + g.rank * room : nullptr;
      reducer(offset(out[g.rank], (i - 1) * room), shared, sources, own);
    }
    for (uint32_t k = 1; is_shared && i > 1 && k < g.size; ++k) {
      const uint32_t peer = (g.rank + k) % g.size;
      const size_t part = chunk_at(bytes[peer], i - 2, room);
      copy_out(offset(out[peer], part ? (i - 2) * room : 0), g.slot(peer, g.step - 1) + peer * room, part,
               chunks * room * g.size);
    }
    if (i < steps && !advance_first(g, i)) return false;
  }
  return true;
}

// The same numbers for everybody: part j is the j-th of as many as there are ranks.
inline bool all_reduce(Group& g, const Reducer& reducer, void* data, uint64_t count, uint64_t item) {
  if (count * item <= kDirectBytes) return reduce_directly(g, reducer, data, data, count, item);
  const uint64_t total = count * item, part = round_up((total + g.size - 1) / g.size, kLine);
  const void* in[kMaxRanks];
  void* out[kMaxRanks];
  uint64_t bytes[kMaxRanks];
  for (uint32_t peer = 0; peer < g.size; ++peer) {
    const uint64_t begin = std::min(total, peer * part);
    in[peer] = out[peer] = offset(data, begin);
    bytes[peer] = std::min(part, total - begin);
  }
  return reduce_parts(g, reducer, in, out, bytes, true);
}

}  // namespace colossal
