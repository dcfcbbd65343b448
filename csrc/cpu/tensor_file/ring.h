// The kernel's ring of requests, io_uring, served by one thread; used through its system calls alone.

#pragma once

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <memory>
#include <vector>

#include "engine.h"

namespace colossal {

constexpr uint8_t kRead = 22, kWrite = 23;  // IORING_OP_READ and _WRITE, which headers before Linux 5.6 do not name

// The two rings that a process shares with the kernel.
class Rings {
 public:
  ~Rings() {
    for (const auto& [memory, bytes] : mapped_) munmap(memory, bytes);
    if (descriptor_ >= 0) close(descriptor_);
  }

  // Returns whether the kernel gives them; a sandbox may forbid it.
  bool open(unsigned entries) {
    io_uring_params params = {};
    descriptor_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (descriptor_ < 0) return false;
    const io_sqring_offsets& sq = params.sq_off;
    const io_cqring_offsets& cq = params.cq_off;
    char* head = map(sq.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char* tail = map(cq.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    char* entries_at = map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    if (!head || !tail || !entries_at) return false;
    sq_head_ = word(head, sq.head);
    sq_tail_ = word(head, sq.tail);
    sq_mask_ = *word(head, sq.ring_mask);
    sq_array_ = word(head, sq.array);
    cq_head_ = word(tail, cq.head);
    cq_tail_ = word(tail, cq.tail);
    cq_mask_ = *word(tail, cq.ring_mask);
    sqes_ = reinterpret_cast<io_uring_sqe*>(entries_at);
    cqes_ = reinterpret_cast<io_uring_cqe*>(tail + cq.cqes);
    return true;
  }

  // Add an entry; there are never more than the ring has room for.
  io_uring_sqe& add(uint8_t opcode, int descriptor, uint64_t tag) {
    const unsigned at = tail_++ & sq_mask_;
    io_uring_sqe& entry = sqes_[at];
    entry = {};
    entry.opcode = opcode;
    entry.fd = descriptor;
    entry.user_data = tag;
    sq_array_[at] = at;
    return entry;
  }

  // Pass what was added to the kernel, and sleep until something is done; returns an errno or 0.
  int enter() {
    __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
    do {
      const unsigned waiting = tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
      const long taken = syscall(__NR_io_uring_enter, descriptor_, waiting, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
    } while (!has_events());
    return 0;
  }

  template <typename Handle>
  void each_event(Handle&& handle) {
    unsigned head = *cq_head_;
    while (head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) {
      const io_uring_cqe event = cqes_[head & cq_mask_];
      __atomic_store_n(cq_head_, ++head, __ATOMIC_RELEASE);
      handle(event.user_data, event.res);
    }
  }

 private:
  bool has_events() const { return *cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); }

  static unsigned* word(char* base, unsigned at) { return reinterpret_cast<unsigned*>(base + at); }

  char* map(size_t bytes, off_t what) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_, what);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_DONTFORK);
    mapped_.push_back({memory, bytes});
    return static_cast<char*>(memory);
  }

  int descriptor_ = -1;
  std::vector<std::pair<void*, size_t>> mapped_;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, tail_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
};

class Ring final : public Engine {
 public:
  // Returns null where the kernel has no such ring, or not the operations that are needed.
  static Engine* open(unsigned depth) {
    std::unique_ptr<Ring> ring(new Ring(depth));
    if (ring->bell_ < 0 || !ring->rings_.open(depth + 1) || !ring->answers()) return nullptr;
    ring->thread_ = quiet_thread([it = ring.get()] { it->serve(); });
    return ring->thread_.joinable() ? ring.release() : nullptr;
  }

  ~Ring() override {
    if (thread_.joinable()) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        is_closing_ = true;
      }
      wake();
      thread_.join();
    }
    if (bell_ >= 0) close(bell_);
  }

 protected:
  void wake() override {
    const uint64_t one = 1;
    while (write(bell_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  explicit Ring(unsigned depth) : bell_(eventfd(0, EFD_CLOEXEC)), bell_tag_(depth), flight_(depth) {
    for (unsigned i = 0; i < depth; ++i) free_.push_back(i);
  }

  void listen() {
    io_uring_sqe& entry = rings_.add(kRead, bell_, bell_tag_);
    entry.addr = reinterpret_cast<uintptr_t>(&rung_);
    entry.len = sizeof rung_;
  }

  // A first turn round the ring: kernels before 5.6 refuse the operation.
  bool answers() {
    int64_t moved = 0;
    wake();
    listen();
    if (rings_.enter()) return false;
    rings_.each_event([&](uint64_t, int32_t result) { moved = result; });
    return moved == sizeof rung_;
  }

  void start(unsigned slot) {
    const Piece& piece = flight_[slot];
    io_uring_sqe& entry = rings_.add(piece.is_write ? kWrite : kRead, piece.descriptor, slot);
    entry.addr = reinterpret_cast<uintptr_t>(piece.memory);
    entry.len = static_cast<uint32_t>(piece.bytes);
    entry.off = piece.offset;
  }

  // Start as many pieces as may be in flight; returns whether there is something to wait for.
  bool fill() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!free_.empty() && take(flight_[free_.back()])) {
      start(free_.back());
      free_.pop_back();
    }
    return !is_closing_ || free_.size() < flight_.size();
  }

  void serve() {
    int broken = 0;
    listen();
    while (fill() && !(broken = rings_.enter()))
      rings_.each_event([this](uint64_t tag, int32_t result) { handle(tag, result); });
    if (broken) refuse(broken);
  }

  void handle(uint64_t tag, int32_t result) {
    if (tag == bell_tag_) return listen();
    const unsigned slot = static_cast<unsigned>(tag);
    int32_t status = 0;
    if (advance(flight_[slot], result, status)) return start(slot);
    finish(flight_[slot], status);
    free_.push_back(slot);
  }

  // The kernel does not take entries any more: everything fails, now and later.
  void refuse(int error) {
    std::vector<bool> is_free(flight_.size());
    for (unsigned slot : free_) is_free[slot] = true;
    for (unsigned slot = 0; slot < flight_.size(); ++slot)
      if (!is_free[slot]) finish(flight_[slot], error);
    Piece piece;
    for (bool is_open = true; is_open;) {
      bool found;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        is_open = !is_closing_;
        found = take(piece);
      }
      if (found) {
        finish(piece, error);
      } else {
        while (is_open && read(bell_, &rung_, sizeof rung_) < 0 && errno == EINTR) {
        }
      }
    }
  }

  int bell_;  // an eventfd, which wakes the thread for new requests
  const uint64_t bell_tag_;
  uint64_t rung_ = 0;
  Rings rings_;
  std::vector<Piece> flight_;
  std::vector<unsigned> free_;
  std::thread thread_;
};

}  // namespace colossal
