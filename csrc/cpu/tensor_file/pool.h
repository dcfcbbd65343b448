// Threads that each carry out one piece at a time.

#pragma once

#include <vector>

#include "engine.h"

namespace colossal {

class Pool final : public Engine {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) {
      std::thread thread = quiet_thread([this] { serve(); });
      if (thread.joinable()) threads_.push_back(std::move(thread));
    }
  }

  ~Pool() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closing_ = true;
    }
    wake();
    for (std::thread& thread : threads_) thread.join();
  }

  bool is_running() const { return !threads_.empty(); }

 protected:
  void wake() override { work_.notify_all(); }

 private:
  void serve() {
    Piece piece;
    while (true) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
        if (!take(piece)) return;
      }
      int32_t status = 0;
      while (advance(piece, transfer(piece), status)) {
      }
      finish(piece, status);
    }
  }

  static int64_t transfer(const Piece& piece) {
    const off_t offset = static_cast<off_t>(piece.offset);
    const ssize_t moved = piece.is_write ? pwrite(piece.descriptor, piece.memory, piece.bytes, offset)
                                         : pread(piece.descriptor, piece.memory, piece.bytes, offset);
    return moved < 0 ? -errno : moved;
  }

  std::condition_variable work_;
  std::vector<std::thread> threads_;
};

}  // namespace colossal
