// Parts of a computation side by side.

#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace colossal {

// Call `work` with 0 to `count` - 1, each on a thread of its own, the first on this one; return when all have ended.
template <typename Work>
void run_on_threads(int64_t count, const Work& work) {
  std::vector<std::thread> others;
  for (int64_t each = 1; each < count; ++each) others.emplace_back(work, each);
  work(0);
  for (std::thread& other : others) other.join();
}

// Call `run` with the first and the end of parts of `total` that are as good as equal.
template <typename Run>
void run_in_parts(int64_t count, int64_t total, const Run& run) {
  run_on_threads(count, [&](int64_t each) { run(total * each / count, total * (each + 1) / count); });
}

}  // namespace colossal
