// Random collectives, messages and faults of a few ranks, for a sanitizer to look at; wrong results end it, too.
//
// Arguments are of the form name=number; see `settings` below. Those of its last line are for an edited copy of the
// headers; without them the program is made of what is shipped.

#include <csignal>
#include <map>
#include <string>

#include "faults.h"

namespace {

std::map<std::string, int64_t> settings{
    {"ranks", 3},       // threads that play ranks
    {"seed", 0},        // the first one
    {"seeds", 1},       // how many
    {"limit", 200000},  // bytes of a collective; a few are larger
    {"large", 0},       // bytes of those
    {"steps", 8},       // collectives of a thread
    {"work", 1},        // runs without faults?
    {"faults", 1},      // runs with one?
    {"trouble", -1},    // which; by chance if negative
    {"kind", -1},       // of all collectives; by chance if negative
    {"seconds", 120},   // of one seed, after which somebody hangs
    {"mutant", 0}, {"slot", 0}, {"direct", 0}, {"ring", 0}, {"stream", 0}, {"slice", 0},
};

extern "C" void give_up(int) {
  char text[] = "HANGS with seed ....................\n";  // no printf in a handler
  uint64_t seed = seed_of_now.load();
  size_t at = sizeof text - 2;
  do text[--at] = static_cast<char>('0' + seed % 10);
  while (seed /= 10);
  _exit(write(2, text, sizeof text - 1) < 0 ? 4 : 3);
}

[[noreturn]] void refuse(const char* argument) {
  std::fprintf(stderr, "%s means nothing here\n", argument);
  _exit(64);
}

void apply_settings() {
#if defined(COLOSSAL_EDITED)
  colossal_mutant = static_cast<int>(settings["mutant"]);
  if (settings["slot"]) kSlotBytes = settings["slot"];
  if (settings["direct"]) kDirectBytes = settings["direct"];
  if (settings["ring"]) kMinRingBytes = kMaxRingBytes = settings["ring"];
  if (settings["stream"]) kStreamBytes = settings["stream"];
  if (settings["slice"]) Group::kSliceNs = settings["slice"];
#else
  for (const char* name : {"mutant", "slot", "direct", "ring", "stream", "slice"})
    if (settings[name]) refuse(name);
#endif
}

// Three groups: one of all ranks, and two of some, each in an order of its own.
class Day {
 public:
  Day(uint32_t size, uint64_t seed) : size_(size), seed_(seed) {
    Random random(seed, 9);
    for (uint32_t group = 0; group < 3; ++group) {
      std::vector<uint32_t> members(size);
      for (uint32_t rank = 0; rank < size; ++rank) members[rank] = rank;
      if (group) random.shuffle(members), members.resize(2 + random.below(size - 1));
      worlds_.emplace_back(new World(static_cast<uint32_t>(members.size()), Random(seed, 20 + group)));
      members_.push_back(members);
    }
  }

  void run() {
    Crew crew;
    for (uint32_t rank = 0; rank < size_; ++rank) crew.add([this, rank] { live(rank); });
  }

 private:
  // A rank's day ends without a word to the others, who may have to read what it has written.
  void live(uint32_t rank) {
    {
      Crew crew;
      crew.add([this, rank] { call(rank, {0, 1}, 30); });
      crew.add([this, rank] { call(rank, {2}, 31); });
      for (uint32_t thread = 0; thread < kWriters; ++thread) crew.add([this, rank, thread] { write(rank, thread); });
    }
    for (uint32_t group : {2, 0, 1})
      if (place(group, rank) >= 0) colossal_shm_leave((*worlds_[group])[static_cast<uint32_t>(place(group, rank))]);
  }

  // In a group; negative if it is none of its members.
  int place(uint32_t group, uint32_t rank) const {
    const auto& members = members_[group];
    const auto found = std::find(members.begin(), members.end(), rank);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }

  // One thread's collectives in some groups, which all members call in the same order.
  void call(uint32_t rank, const std::vector<uint32_t>& groups, uint64_t stream) {
    Random shared(seed_, stream), own(seed_, stream * 100 + rank);
    for (int64_t i = 0; i < settings["steps"]; ++i) {
      const uint32_t group = groups[shared.below(groups.size())];
      const bool is_large = settings["large"] && shared.one_in(5);
      const auto limit = static_cast<uint64_t>(settings[is_large ? "large" : "limit"]);
      const Step step = random_step(shared, worlds_[group]->size, limit, settings["kind"]);
      const int at = place(group, rank);
      own.dawdle();
      if (at >= 0) check(perform(*worlds_[group], static_cast<uint32_t>(at), step), "a collective failed");
    }
  }

  void write(uint32_t rank, uint32_t thread) {
    const auto nothing = [](auto&, uint32_t) {};
    check(correspond(*worlds_[0], rank, thread, Random(seed_, 40), 4, nothing), "a message failed");
  }

  uint32_t size_;
  uint64_t seed_;
  std::vector<std::unique_ptr<World>> worlds_;
  std::vector<std::vector<uint32_t>> members_;
};

}  // namespace

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const size_t at = argument.find('=');
    if (at == std::string::npos || !settings.count(argument.substr(0, at))) refuse(arguments[i]);
    settings[argument.substr(0, at)] = std::atoll(argument.c_str() + at + 1);
  }
  apply_settings();
  std::signal(SIGALRM, give_up);
  const auto size = static_cast<uint32_t>(settings["ranks"]);
  for (int64_t i = 0; i < settings["seeds"]; ++i) {
    const auto seed = static_cast<uint64_t>(settings["seed"] + i);
    seed_of_now = seed;
    alarm(static_cast<unsigned>(settings["seconds"]));
    if (settings["work"]) Day(size, seed).run();
    if (settings["faults"])
      Incident(size, seed, static_cast<uint64_t>(settings["limit"]), static_cast<uint32_t>(settings["trouble"])).run();
  }
  std::printf("done\n");
  return 0;
}
