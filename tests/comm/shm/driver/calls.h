// Collectives of all kinds and sizes, each compared with what must come out.

#pragma once

#include "world.h"

namespace {

constexpr uint32_t kItems[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 16, 8};  // bytes; the last three are moved, not reduced
constexpr uint32_t kNumDtypes = sizeof kItems / sizeof *kItems;

// What all ranks do next.
struct Step {
  Call call{};
  uint64_t salt = 0;
  bool is_in_place = false;
  std::vector<uint64_t> lengths;  // of uneven parts, in elements: from each rank, to each

  uint64_t item() const { return kItems[call.dtype]; }
  bool has(std::initializer_list<uint32_t> kinds) const {
    return std::find(kinds.begin(), kinds.end(), call.kind) != kinds.end();
  }
  uint64_t bytes(uint32_t from, uint32_t to, uint32_t size) const {
    return (call.is_uneven ? lengths[from * size + to] : call.count) * item();
  }
};

// Often at an edge: of a line, of what is reduced at once, of a part of a slot, of slots.
uint64_t random_count(Random& random, uint32_t size, uint64_t item, uint64_t limit) {
  const uint64_t slot = Layout(size).slot_bytes, room = slot / size / kLine * kLine;
  const uint64_t edges[] = {0,          kLine,          kLine * size, kDirectBytes,   room,
                            room * 2,   room * size,    slot,         slot * 2,       room * size * 2};
  const uint64_t choice = random.below(4);
  uint64_t count = choice == 0 ? random.below(40) : random.below(limit) / item;
  if (choice > 1) {
    const uint64_t edge = edges[random.below(sizeof edges / sizeof *edges)] / item;
    count = edge + random.below(3) - (edge ? 1 : 0);
  }
  return std::min(count, limit / item);
}

Step random_step(Random& random, uint32_t size, uint64_t limit, int64_t kind = -1) {
  Step step;
  Call& call = step.call;
  call.kind = static_cast<uint32_t>(kind < 0 ? random.below(kGather + 1) : kind);
  const bool reduces = step.has({kAllReduce, kReduceScatter, kReduce});
  call.dtype = static_cast<uint32_t>(random.below(reduces ? kOther : kNumDtypes));
  call.is_elsewhere = random.one_in(12);
  if (reduces) call.reduction = static_cast<uint32_t>(random.below(4));
  if (call.reduction == kAvg && call.dtype > kF16) call.reduction = kSum;
  const bool has_root = step.has({kReduce, kBroadcast, kScatter, kGather});
  call.root = has_root ? static_cast<int32_t>(random.below(size)) : -1;
  step.salt = random.next() >> 20;
  step.is_in_place = random.one_in(2);
  if (call.kind == kAllToAll && !random.one_in(3)) {
    call.is_uneven = 1;
    for (uint32_t pair = 0; pair < size * size; ++pair)
      step.lengths.push_back(random.one_in(3) ? 0 : random_count(random, size, step.item(), limit / size));
  } else if (call.kind != kBarrier) {
    call.count = random_count(random, size, step.item(), step.has({kAllReduce, kBroadcast}) ? limit : limit / size);
  }
  return step;
}

template <class Work> void with_type(uint32_t dtype, Work work) {
  switch (dtype) {
    case kF32: return work(float{});
    case kF64: return work(double{});
    case kBF16: return work(BFloat16{});
    case kF16: return work(Float16{});
    case kI8: return work(int8_t{});
    case kU8: return work(uint8_t{});
    case kI16: return work(int16_t{});
    case kI32: return work(int32_t{});
    default: return work(int64_t{});
  }
}

// A rank's number at a place. Those of half precision have sums without rounding.
template <class T> auto number(uint64_t salt, uint32_t rank, uint64_t at) {
  const uint64_t hash = (salt + rank * 0x9e3779b9 + at) * 0xd1342543de82ef95;
  const auto small = static_cast<float>(hash >> 60) - 8;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(hash >> 24);
  else if constexpr (std::is_floating_point_v<T>) return static_cast<T>(static_cast<int32_t>(hash >> 32)) / T{7};
  else return small;
}

void store(float value, BFloat16* to) { narrow(value, to); }
void store(float value, Float16* to) { narrow(value, to); }
template <class T> void store(T value, T* to) { *to = value; }

template <class A> A joined(uint32_t reduction, A a, A b) {
  if (reduction == kMax) return std::max(a, b);
  if (reduction == kMin) return std::min(a, b);
  if constexpr (std::is_integral_v<A>) return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  else return a + b;
}

// One rank's numbers from a place on.
Bytes numbers(const Step& step, uint32_t rank, uint64_t begin, uint64_t count) {
  Bytes content(count * step.item());
  with_type(step.call.dtype, [&](auto type) {
    using T = decltype(type);
    auto* to = reinterpret_cast<T*>(content.data());
    for (uint64_t i = 0; i < count; ++i) store(number<T>(step.salt, rank, begin + i), to + i);
  });
  return content;
}

// Some ranks' numbers at a place, added up by halves.
template <class T> auto total(const Step& step, uint32_t begin, uint32_t end, uint64_t at) {
  if (end - begin == 1) return number<T>(step.salt, begin, at);
  const uint32_t middle = begin + (end - begin + 1) / 2;
  return joined(step.call.reduction, total<T>(step, begin, middle, at), total<T>(step, middle, end, at));
}

// What all ranks' numbers come to.
Bytes reduced(const Step& step, uint32_t size, uint64_t begin, uint64_t count) {
  Bytes content(count * step.item());
  with_type(step.call.dtype, [&](auto type) {
    using T = decltype(type);
    auto* to = reinterpret_cast<T*>(content.data());
    for (uint64_t i = 0; i < count; ++i) {
      auto sum = total<T>(step, 0, size, begin + i);
      if (step.call.reduction == kAvg) sum = sum / static_cast<decltype(sum)>(size);
      store(sum, to + i);
    }
  });
  return content;
}

// Parts that lie one after the other in memory that has no byte to spare.
struct Row {
  std::unique_ptr<char[]> memory;
  std::vector<uint64_t> begins{0};

  explicit Row(const std::vector<uint64_t>& lengths) {
    for (uint64_t length : lengths) begins.push_back(begins.back() + length);
    memory.reset(new char[begins.back()]);
    std::memset(memory.get(), 0xee, begins.back());
  }
  char* part(uint32_t index) const { return memory.get() + begins[index]; }
  void fill(uint32_t index, const Bytes& content) const { std::copy(content.begin(), content.end(), part(index)); }
  void compare(uint32_t index, const Bytes& expected, const Step& step, const char* what) const {
    const Call& call = step.call;
    check(expected.size() == begins[index + 1] - begins[index], "the test itself is wrong about a size");
    if (expected.empty() || !std::memcmp(part(index), expected.data(), expected.size())) return;
    fail("wrong %s: kind %u, dtype %u, reduction %u, root %d, count %lu, uneven %u, part %u", what, call.kind,
         call.dtype, call.reduction, call.root, static_cast<unsigned long>(call.count), call.is_uneven, index);
  }
};

// One rank's side of one collective.
struct Side {
  World& world;
  uint32_t rank, size;
  const Step& step;
  int64_t timeout;
  const void* in[kMaxRanks] = {};
  void* out[kMaxRanks] = {};

  Side(World& world, uint32_t rank, const Step& step, int64_t timeout)
      : world(world), rank(rank), size(world.size), step(step), timeout(timeout) {}

  bool run() {
    if (step.call.is_elsewhere) return call(nullptr);
    switch (step.call.kind) {
      case kAllReduce:
      case kReduce: return reduce();
      case kReduceScatter: return reduce_scatter();
      case kAllGather: return all_gather();
      case kBroadcast: return broadcast();
      case kAllToAll:
      case kScatter:
      case kGather: return exchange_parts();
      default: return call(nullptr);
    }
  }

  bool call(const uint64_t* splits) {
    const Order order{step.call, in, out, splits, step.item(), timeout};
    return colossal_shm_run(world[rank], &order) != 0;
  }

  bool reduce() {
    const uint64_t count = step.call.count;
    const Bytes own = numbers(step, rank, 0, count);
    const Row data({own.size()});
    data.fill(0, own);
    for (uint32_t peer = 0; peer < size; ++peer) in[peer] = out[peer] = data.part(0);
    if (!call(nullptr)) return false;
    const bool has_result = step.call.root < 0 || step.call.root == static_cast<int32_t>(rank);
    data.compare(0, has_result ? reduced(step, size, 0, count) : own, step, "reduction");
    return true;
  }

  bool reduce_scatter() {
    const uint64_t count = step.call.count;
    const Row parts(std::vector<uint64_t>(size, count * step.item())), result({count * step.item()});
    for (uint32_t peer = 0; peer < size; ++peer) {
      parts.fill(peer, numbers(step, rank, peer * count, count));
      in[peer] = parts.part(peer), out[peer] = result.part(0);
    }
    if (!call(nullptr)) return false;
    result.compare(0, reduced(step, size, rank * count, count), step, "reduction");
    return true;
  }

  bool all_gather() {
    const uint64_t bytes = step.bytes(0, 0, size);
    const Row own({bytes}), all(std::vector<uint64_t>(size, bytes));
    const Row& from = step.is_in_place ? all : own;
    const uint32_t index = step.is_in_place ? rank : 0;
    from.fill(index, pattern(step.salt, rank, 0, bytes));
    in[0] = from.part(index);
    for (uint32_t peer = 0; peer < size; ++peer) out[peer] = all.part(peer);
    if (!call(nullptr)) return false;
    for (uint32_t peer = 0; peer < size; ++peer)
      all.compare(peer, pattern(step.salt, peer, 0, bytes), step, "gathered part");
    return true;
  }

  bool broadcast() {
    const Row data({step.bytes(0, 0, size)});
    const auto root = static_cast<uint32_t>(step.call.root);
    const Bytes expected = pattern(step.salt, root, 0, step.bytes(0, 0, size));
    if (rank == root) data.fill(0, expected);
    for (uint32_t peer = 0; peer < size; ++peer) in[peer] = out[peer] = data.part(0);
    if (!call(nullptr)) return false;
    data.compare(0, expected, step, "broadcast");
    return true;
  }

  // Whether a part goes that way.
  bool goes(uint32_t from, uint32_t to) const {
    const auto root = static_cast<uint32_t>(step.call.root);
    return step.call.kind == kAllToAll || (step.call.kind == kScatter ? from : to) == root;
  }

  bool exchange_parts() {
    std::vector<uint64_t> lengths(2 * size), to_each(size), from_each(size);
    for (uint32_t peer = 0; peer < size; ++peer) {
      lengths[peer] = to_each[peer] = goes(rank, peer) ? step.bytes(rank, peer, size) : 0;
      lengths[size + peer] = from_each[peer] = goes(peer, rank) ? step.bytes(peer, rank, size) : 0;
    }
    const Row sent(to_each), received(from_each);
    for (uint32_t peer = 0; peer < size; ++peer) {
      sent.fill(peer, pattern(step.salt, rank, peer, to_each[peer]));
      if (to_each[peer]) in[peer] = sent.part(peer);
      if (from_each[peer]) out[peer] = received.part(peer);
    }
    if (!call(step.call.is_uneven ? lengths.data() : nullptr)) return false;
    for (uint32_t peer = 0; peer < size; ++peer)
      received.compare(peer, pattern(step.salt, peer, rank, from_each[peer]), step, "part");
    return true;
  }
};

// Carry out one collective and look at the result; false if the group is broken.
bool perform(World& world, uint32_t rank, const Step& step, int64_t timeout = kPatience) {
  return Side(world, rank, step, timeout).run();
}

}  // namespace
