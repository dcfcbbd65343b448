// Ranks as threads of one process, over memory that is mapped once, so that a sanitizer sees all that they share.

#pragma once

#include <sanitizer/asan_interface.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "cpu/shm.cpp"

namespace {

using Bytes = std::vector<char>;

constexpr int64_t kPatience = int64_t{3600} * 1000000000;  // longer than the watchdog's

std::atomic<uint64_t> seed_of_now{0};

[[noreturn]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "FAILED with seed %lu: ", static_cast<unsigned long>(seed_of_now.load()));
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  _exit(1);
}

void check(bool is_true, const char* what) {
  if (!is_true) fail("%s", what);
}

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Everything that is random comes from a seed; a choice that ranks share, from the same one.
struct Random {
  uint64_t state;

  explicit Random(uint64_t seed, uint64_t stream = 0) : state(mixed(seed + 1) + mixed(stream + 77)) {}

  uint64_t next() { return mixed(state += 0x9e3779b97f4a7c15); }
  uint64_t below(uint64_t limit) { return next() % limit; }
  bool one_in(uint64_t times) { return below(times) == 0; }
  template <class T> void shuffle(std::vector<T>& all) {
    for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[below(i)]);
  }
  // Be late, now and then.
  void dawdle() {
    switch (below(10)) {
      case 0: usleep(static_cast<useconds_t>(below(300))); break;
      case 1:
      case 2: std::this_thread::yield(); break;
      default: break;
    }
  }
};

// Content that tells where it comes from.
Bytes pattern(uint64_t salt, uint64_t from, uint64_t to, size_t bytes) {
  Bytes content(bytes);
  const uint64_t begin = mixed(salt * 4096 + from * 64 + to);
  for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(begin + i * 131 + (i >> 8) * 17);
  return content;
}

// A group: its memory, and every rank's end of it.
struct World {
  uint32_t size;
  size_t bytes;
  char* base;
  std::vector<std::unique_ptr<Handle>> handles;

  World(uint32_t size, Random random) : size(size), bytes(Layout(size).end) {
    // A page that cannot be touched follows.
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* room = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, flags, -1, 0);
    check(room != MAP_FAILED, "no memory");
    base = static_cast<char*>(room);
    mprotect(base + bytes, kPage, PROT_NONE);
    poison(true);
    const std::vector<int> pids(size, getpid());
    const int spins = random.one_in(3) ? 200 : static_cast<int>(random.below(3));
    const auto isa = static_cast<uint32_t>(random.below(best_isa() + 1));
    for (uint32_t rank = 0; rank < size; ++rank)
      handles.emplace_back(new Handle(base, rank, size, pids.data(), spins, isa));
    begin_at(random.one_in(2) ? static_cast<uint32_t>(-random.below(12)) : 0);
  }

  ~World() {
    handles.clear();
    poison(false);
    munmap(base, bytes + kPage);
  }

  Handle* operator[](uint32_t rank) { return handles[rank].get(); }

  // Let counters pass over their largest number soon.
  void begin_at(uint32_t step) {
    for (uint32_t rank = 0; rank < size; ++rank) {
      Group& g = handles[rank]->group;
      g.step = step;
      g.member(rank).posted.value.store(step);
      g.member(rank).bell.value.store(step);
    }
  }

 private:
  // What lies between the parts of the memory belongs to nobody.
  void poison(bool is_on) {
    const Layout at(size);
    const size_t pairs = size_t{size} * size;
    const size_t gaps[][2] = {{sizeof(Header) + size * sizeof(Member), at.splits},
                              {at.splits + 4 * pairs * sizeof(uint64_t), at.mails},
                              {at.mails + pairs * sizeof(Mail), at.rings},
                              {at.rings + pairs * at.ring_bytes, at.slots},
                              {at.slots + 2 * size * at.slot_bytes, at.end}};
    for (auto& gap : gaps) {
      if (is_on) ASAN_POISON_MEMORY_REGION(base + gap[0], gap[1] - gap[0]);
      else ASAN_UNPOISON_MEMORY_REGION(base + gap[0], gap[1] - gap[0]);
    }
  }
};

// Threads that are joined.
struct Crew {
  std::vector<std::thread> threads;

  template <class Task> void add(Task task) { threads.emplace_back(task); }
  void join() {
    for (auto& thread : threads) thread.join();
    threads.clear();
  }
  ~Crew() { join(); }
};

}  // namespace
