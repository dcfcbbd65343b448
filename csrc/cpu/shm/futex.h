// Sleeping until another process writes to a word.

#pragma once

#if !defined(__linux__)
#error "memory is shared between processes on Linux only"
#endif

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace colossal {

inline int64_t now_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * int64_t{1000000000} + at.tv_nsec;
}

// Sleep while the word is `seen`, at most so long; may wake up for nothing.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
  const timespec span{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &span, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline uint32_t this_core() { return static_cast<uint32_t>(sched_getcpu()); }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Look again and again for a moment. To yield the core in between would be faster on an idle machine, and cost a time
// slice on one with other work.
template <class Done> bool spin(int times, Done done) {
  for (int i = 0; i < times; ++i) {
    if (done()) return true;
    pause();
  }
  return done();
}

// A handle of another process that does not pass on to the next one of its number; -1 where there are none.
inline int open_process(int pid) {
#if defined(SYS_pidfd_open)
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

inline bool process_lives(int handle, int pid) {
  if (handle >= 0) {
    pollfd ended{handle, POLLIN, 0};
    return poll(&ended, 1, 0) == 0;
  }
  return kill(pid, 0) == 0 || errno != ESRCH;
}

}  // namespace colossal
