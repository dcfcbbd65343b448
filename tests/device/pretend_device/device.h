// What torch asks of a device: guards of devices and streams, events, generators, and the sizes of storages.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace pretend {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  static c10::Device only() { return c10::Device(kDevice, 0); }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  void setDevice(c10::Device device) const override { check(device.index()); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static void check(c10::DeviceIndex index) {
    TORCH_CHECK(index <= 0, "invalid device ordinal: there is one pretend device, and ", (int)index, " was asked for");
  }
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (*event == nullptr) *event = new Event;
    tick(stream.id());
    *static_cast<Event*>(*event) = Event{clocks[stream.id()]};
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (event) merge(clocks[stream.id()], static_cast<Event*>(event)->clock);
  }
  // Nothing that was just asked for is done: the first answer is no.
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto* it = static_cast<Event*>(event);
    if (!it || std::exchange(it->was_asked, true)) {
      if (it) host_waited(it->clock);
      return true;
    }
    return false;
  }
  void synchronizeEvent(void* event) const override {
    note_wait("Event.synchronize");
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (event) host_waited(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    host_waited(clocks[stream.id()]);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("Stream.synchronize");
    std::lock_guard<std::recursive_mutex> lock(mutex);
    host_waited(clocks[stream.id()]);
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    note_wait("synchronize");
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (const Clock& clock : std::vector<Clock>(clocks)) host_waited(clock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory.recordStream(data, stream);
  }
};

// A generator of the device. Its numbers are made like the CPU's, from a state of its own.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
    device_ = c10::Device(kDevice, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  CPUGeneratorImpl* clone_impl() const override {
    auto* copy = new Generator();
    copy->set_state(*get_state());
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard::check(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return Guard::check(index), 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void init() const override {}
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::make_generator<Generator>();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = memory.allocate(bytes);
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto* old = static_cast<Block*>(storage.data_ptr().get_context());
    if (old) {
      perform_if([&](const Copy& copy) { return copy.block == old; });
      if (bytes && old->bytes) std::memcpy(fresh.get(), old->data, std::min(bytes, old->bytes));
      auto* block = static_cast<Block*>(fresh.get_context());
      if (bytes) block->accesses = old->accesses;
      block->stream = old->stream;
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
inline Hooks hooks;

}  // namespace pretend
