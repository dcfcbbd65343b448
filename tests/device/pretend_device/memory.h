// The memory of the device: host memory under another name, with a record of who used which part of it.
#pragma once
#include <ATen/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <list>
#include <set>

#include "streams.h"

namespace pretend {

struct Access {
  size_t begin, end;  // bytes of the block
  int64_t stream;
  uint64_t time;
  bool writes;
  std::string name;
};

struct Block {
  void* data;
  size_t bytes;
  int64_t stream;  // whose memory it is: who gets it next when it is free
  c10::Storage keeps;  // where the memory is another's
  std::vector<Access> accesses;
  std::set<int64_t> recorded;
};

struct Stats {
  c10::CachingDeviceAllocator::DeviceStats all;
  int64_t total = int64_t(16) << 30;
};
inline Stats stats;

inline void count(int64_t bytes) {
  auto& each = stats.all.allocated_bytes[0];
  auto& reserved = stats.all.reserved_bytes[0];
  if (bytes >= 0) each.increase(bytes), reserved.increase(bytes);
  else each.decrease(-bytes), reserved.decrease(-bytes);
}

// ---- copies that are under way --------------------------------------------------------------------------------------
// Between page-locked memory and the device, a copy that does not block is done as late as it may be: what came to the
// host is there once the host has waited for it, and what goes to the device is read when the device first uses it.
struct Copy {
  bool to_host;
  at::Tensor host;      // in page-locked memory
  at::Tensor snapshot;  // to_host: what the device had when the copy began
  at::Tensor device;    // otherwise: an alias of what will be written
  Block* block;
  int64_t stream;
  uint64_t time;
};
inline std::list<Copy> under_way;

inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
  auto begin = [](const at::Tensor& t) { return (const char*)t.storage().data(); };
  return begin(one) < begin(other) + other.storage().nbytes() && begin(other) < begin(one) + one.storage().nbytes();
}

void perform(const Copy& copy);

// Do the copies for which `wanted` holds, in their order.
template <class F>
void perform_if(F wanted) {
  for (auto it = under_way.begin(); it != under_way.end();) {
    if (!wanted(*it)) { ++it; continue; }
    Copy copy = std::move(*it);
    it = under_way.erase(it);
    perform(copy);
  }
}

// The host has waited until all that `clock` knows of is done.
inline void host_waited(const Clock& clock) {
  merge(host, clock);
  perform_if([](const Copy& copy) { return copy.time <= seen(host, copy.stream); });
}

// ---- accesses -------------------------------------------------------------------------------------------------------
inline void access(Block& block, size_t begin, size_t end, bool writes, int64_t stream, uint64_t time,
                   const std::string& name) {
  const Clock& clock = clocks[stream];
  for (const Access& old : block.accesses) {
    if (old.stream == stream || !(writes || old.writes) || old.begin >= end || begin >= old.end) continue;
    TORCH_CHECK(old.time <= seen(clock, old.stream), "A wait is missing: ", name, " on stream ", stream,
                writes ? " writes" : " reads", " memory that ", old.name, " on stream ", old.stream,
                old.writes ? " wrote" : " reads", ", and nothing makes it wait. Wait for an event of that stream.");
  }
  perform_if([&](const Copy& copy) { return copy.block == &block; });
  auto& all = block.accesses;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& old) {
    bool is_covered = begin <= old.begin && old.end <= end && (writes || !old.writes);
    return is_covered && old.time <= seen(clock, old.stream);
  }), all.end());
  all.push_back({begin, end, stream, time, writes, name});
}

// Memory that was freed while another stream may have used it, and the stream that gets it next.
inline std::list<std::pair<int64_t, Access>> freed;

// A stream takes memory: what was freed before may be what it gets.
inline void check_freed(int64_t stream) {
  for (auto it = freed.begin(); it != freed.end();) {
    const auto& [owner, old] = *it;
    if (owner != stream) { ++it; continue; }
    bool is_over = old.time <= std::max(seen(clocks[stream], old.stream), seen(host, old.stream));
    std::string name = old.name;
    int64_t user = old.stream;
    it = freed.erase(it);
    TORCH_CHECK(is_over, "A wait is missing: stream ", stream, " takes memory that was freed while ", name,
                " on stream ", user, " may use it. Keep the tensor until a wait, or record_stream.");
  }
}

inline void release(void* context) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto* block = static_cast<Block*>(context);
  // What is freed is lent again to its own stream, which has to wait for other streams first that still use it.
  for (const Access& old : block->accesses)
    if (old.stream != block->stream && !block->recorded.count(old.stream)) freed.push_back({block->stream, old});
  for (auto it = under_way.begin(); it != under_way.end();)
    it = !it->to_host && it->block == block ? under_way.erase(it) : std::next(it);
  count(-(int64_t)block->bytes);
  if (!block->keeps) std::free(block->data);
  delete block;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    check_freed(current);
    auto& used = stats.all.allocated_bytes[0];
    if (used.current + (int64_t)bytes > stats.total) {
      C10_THROW_ERROR(OutOfMemoryError, c10::str("The pretend device is out of memory. Tried to allocate ", bytes,
                      " bytes of ", stats.total, ", of which ", used.current, " are in use."));
    }
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    count((int64_t)bytes);
    return {data, new Block{data, bytes, current, {}, {}, {}}, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (auto* block = static_cast<Block*>(data.get_context())) block->recorded.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats.all; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    stats.all.allocated_bytes[0].reset_peak();
    stats.all.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {(size_t)(stats.total - stats.all.allocated_bytes[0].current), (size_t)stats.total};
  }
};
inline Memory memory;

// The block of a tensor on the device.
inline Block& block_of(const at::Tensor& tensor) {
  return *static_cast<Block*>(tensor.storage().data_ptr().get_context());
}

// Give memory that the CPU allocated to the device.
inline c10::Storage adopt(const c10::Storage& storage) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  size_t bytes = storage.nbytes();
  count((int64_t)bytes);
  void* data = const_cast<void*>(storage.data());
  c10::DataPtr pointer(data, new Block{data, bytes, current, storage, {}, {}}, &release, c10::Device(kDevice, 0));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), &memory, true);
}

// ---- page-locked memory ---------------------------------------------------------------------------------------------
inline std::map<const char*, size_t> pinned;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    char* data = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    pinned[data] = bytes;
    return {data, data, [](void* at) {
      std::lock_guard<std::recursive_mutex> lock(mutex);
      pinned.erase(static_cast<const char*>(at));
      std::free(at);
    }, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedMemory pinned_memory;

inline bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto it = std::prev(after);
  return static_cast<const char*>(data) < it->first + std::max<size_t>(it->second, 1);
}

}  // namespace pretend
