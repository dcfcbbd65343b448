// Streams, events and what happens before what: vector clocks, as a race detector keeps them.
//
// Work on the device is done at once, in the order in which the host asks for it. That a wait is missing shows
// nevertheless: each stream counts its work, an event carries what its stream had seen, and memory remembers who used
// it last. What no wait puts in order is an error, whatever the values happen to be.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace pretend {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
using Clock = std::vector<uint64_t>;  // by stream: how much of its work is known to be done

struct Event {
  Clock clock;
  bool was_asked = false;
};

inline std::recursive_mutex mutex;  // of all that follows
inline std::vector<Clock> clocks(1);  // by stream
inline Clock host;
inline thread_local int64_t current = 0;
inline std::map<std::string, int64_t> waits;  // of the host for the device, by what made it wait
inline bool refuses_waits = false;

inline uint64_t seen(const Clock& clock, int64_t stream) {
  return stream < (int64_t)clock.size() ? clock[stream] : 0;
}

inline void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// Begin a piece of work of a stream: all that the host has seen is done before it.
inline uint64_t tick(int64_t stream) {
  merge(clocks[stream], host);
  if ((int64_t)clocks[stream].size() <= stream) clocks[stream].resize(stream + 1);
  return ++clocks[stream][stream];
}

inline int64_t new_stream() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  clocks.emplace_back();
  return (int64_t)clocks.size() - 1;
}

inline c10::Stream stream_of(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), id);
}

// Count a wait of the host, and refuse it where a program promised that it makes none.
inline void note_wait(const std::string& what) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  TORCH_CHECK(!refuses_waits, "The host must not wait for the device here, but ", what, " makes it wait.");
  ++waits[what];
}

}  // namespace pretend
