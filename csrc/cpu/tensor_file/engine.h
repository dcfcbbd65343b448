// What all engines have in common: requests are cut into pieces, which wait in one queue until the engine takes them.

#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace colossal {

constexpr uint64_t kBlock = 4096;      // memory, offset and length of direct transfers are multiples of it
constexpr uint64_t kPiece = 4u << 20;  // what one system call moves
constexpr uint64_t kTail = ~uint64_t{0} - (kBlock - 1);
constexpr int32_t kEndOfFile = -1;

// What the interpreter passes: one transfer.
struct Order {
  char* memory;
  uint64_t offset, bytes;
  int32_t buffered, direct;  // descriptors of one file; `direct` is that of `buffered` where it is not to be used
  int32_t is_write, padding;
};

struct Request {
  uint64_t pieces = 0;  // how many are not done yet
  int32_t status = 0;   // an errno, kEndOfFile, or 0
};

struct Piece {
  Request* request = nullptr;
  char* memory = nullptr;
  uint64_t offset = 0, bytes = 0;
  int32_t descriptor = -1, buffered = -1;
  bool is_write = false;
};

// Note what a system call moved; returns whether something is left to do.
inline bool advance(Piece& piece, int64_t moved, int32_t& status) {
  if (moved == -EINTR || moved == -EAGAIN) return true;
  if (moved == -EINVAL && piece.descriptor != piece.buffered) {  // a file system with rules of its own
    piece.descriptor = piece.buffered;
    return true;
  }
  if (moved <= 0) {
    status = moved ? static_cast<int32_t>(-moved) : piece.is_write ? EIO : kEndOfFile;
    return false;
  }
  piece.memory += moved;
  piece.offset += moved;
  piece.bytes -= moved;
  if (moved % kBlock) piece.descriptor = piece.buffered;
  return piece.bytes != 0;
}

// Start a thread that leaves all signals to the others; where there is none to be had, it is not joinable.
inline std::thread quiet_thread(std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error&) {  // the thread that is returned does not run
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

class Engine {
 public:
  virtual ~Engine() = default;

  Request* submit(const Order& order) {
    Request* request = new Request;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const bool is_aligned = (reinterpret_cast<uintptr_t>(order.memory) | order.offset) % kBlock == 0;
      const uint64_t direct = is_aligned ? order.bytes & kTail : 0;
      add(request, order, 0, direct, order.direct);
      add(request, order, direct, order.bytes, order.buffered);
    }
    wake();
    return request;
  }

  int32_t wait(Request* request) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return request->pieces == 0; });
    return request->status;
  }

  bool is_done(const Request* request) {
    std::lock_guard<std::mutex> lock(mutex_);
    return request->pieces == 0;
  }

 protected:
  virtual void wake() = 0;

  // The next piece, if there is one; the lock is held.
  bool take(Piece& piece) {
    if (queue_.empty()) return false;
    piece = queue_.front();
    queue_.pop_front();
    return true;
  }

  void finish(const Piece& piece, int32_t status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (status) piece.request->status = status;
    if (--piece.request->pieces == 0) done_.notify_all();
  }

  std::mutex mutex_;
  std::deque<Piece> queue_;
  bool is_closing_ = false;

 private:
  void add(Request* request, const Order& order, uint64_t from, uint64_t to, int32_t descriptor) {
    for (uint64_t at = from; at < to; at += kPiece) {
      const uint64_t bytes = std::min(kPiece, to - at);
      const bool is_write = order.is_write != 0;
      queue_.push_back({request, order.memory + at, order.offset + at, bytes, descriptor, order.buffered, is_write});
      ++request->pieces;
    }
  }

  std::condition_variable done_;
};

}  // namespace colossal
