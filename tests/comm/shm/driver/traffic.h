// Messages of two threads of each rank: several tags, from one rank or anybody, asked for in another order than sent.

#pragma once

#include "world.h"

namespace {

constexpr uint32_t kWriters = 2;  // threads of a rank that send and receive at the same time

// A message that both its ranks know of. Those of one pair and tag have one thread at each end, and an order.
struct Letter {
  uint32_t from, to, tag, writer, reader, dtype;
  uint64_t bytes, salt;
  bool is_for_any;  // its reader asks for the tag only
};

uint64_t random_length(Random& random, uint64_t ring) {
  const uint64_t edges[] = {0,        1,            kLine - 1, kLine, kLine + 1, ring / 2,
                            ring - 1, ring - kLine, ring,      ring + 1, ring * 3};
  return random.one_in(2) ? random.below(400) : edges[random.below(sizeof edges / sizeof *edges)];
}

// What is sent and received between two rests; tags of messages from anybody belong to one round.
std::vector<Letter> random_round(Random random, uint32_t size, uint64_t ring, uint32_t index) {
  std::vector<Letter> letters;
  const auto any = 1000 + index * kWriters * kMaxRanks;
  std::vector<uint64_t> any_bytes(size * kWriters);
  for (uint64_t& bytes : any_bytes) bytes = random_length(random, ring);
  const uint64_t count = 1 + random.below(4 * size);
  while (letters.size() < count) {
    Letter letter{};
    letter.from = static_cast<uint32_t>(random.below(size));
    letter.to = static_cast<uint32_t>((letter.from + 1 + random.below(size - 1)) % size);
    letter.writer = static_cast<uint32_t>(random.below(kWriters)), letter.reader = letter.writer;
    letter.is_for_any = random.one_in(3);
    letter.dtype = static_cast<uint32_t>(random.below(9));
    letter.bytes = random_length(random, ring);
    if (letter.is_for_any) {
      const uint32_t box = letter.to * kWriters + letter.reader;
      letter.tag = any + box, letter.bytes = any_bytes[box], letter.dtype = 0;
    } else {
      letter.reader = static_cast<uint32_t>(random.below(kWriters));
      letter.tag = static_cast<uint32_t>((random.below(3) * kWriters + letter.writer) * kWriters + letter.reader);
    }
    letter.salt = random.next() >> 20;
    letters.push_back(letter);
  }
  return letters;
}

// One end of a message, while it is under way.
struct Errand {
  const Letter* letter;
  bool is_sent;
  Bytes content;
  Message* message = nullptr;

  // Those of one lane stay in order.
  uint64_t lane() const {
    const uint64_t peer = is_sent ? letter->to : letter->is_for_any ? kMaxRanks : letter->from;
    return (uint64_t{letter->tag} * 2 + is_sent) * 256 + peer;
  }
};

// One thread's part of a round; false if the group is broken.
class Correspondence {
 public:
  Correspondence(World& world, uint32_t rank, uint32_t thread, const std::vector<Letter>& letters, Random random)
      : handle_(world[rank]), random_(random) {
    for (const Letter& letter : letters) {
      if (letter.from == rank && letter.writer == thread)
        errands_.push_back({&letter, true, pattern(letter.salt, letter.from, letter.to, letter.bytes)});
      if (letter.to == rank && letter.reader == thread) errands_.push_back({&letter, false, Bytes(letter.bytes)});
    }
    mix();
  }

  // Nobody has to wait for what was begun before all is begun, so no two ranks wait for each other.
  bool run(int64_t timeout = kPatience) {
    for (Errand& errand : errands_) {
      begin(errand);
      if (random_.one_in(4)) colossal_shm_look(handle_, errand.message);
      random_.dawdle();
    }
    std::vector<Errand*> open;
    for (Errand& errand : errands_) open.push_back(&errand);
    random_.shuffle(open);
    bool is_whole = true;
    for (Errand* errand : open) is_whole = is_whole && colossal_shm_wait(handle_, errand->message, timeout);
    if (is_whole) compare();
    for (Errand& errand : errands_) colossal_shm_release(handle_, errand.message);
    return is_whole;
  }

 private:
  void mix() {
    std::vector<size_t> order(errands_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    random_.shuffle(order);
    for (size_t i = 0; i < order.size(); ++i)
      for (size_t k = i + 1; k < order.size(); ++k)
        if (order[k] < order[i] && errands_[order[k]].lane() == errands_[order[i]].lane())
          std::swap(order[i], order[k]);
    std::vector<Errand> mixed;
    for (size_t index : order) mixed.push_back(std::move(errands_[index]));
    errands_ = std::move(mixed);
  }

  void begin(Errand& errand) {
    const Letter& letter = *errand.letter;
    char* data = errand.content.data();
    if (errand.is_sent) {
      errand.message = static_cast<Message*>(
          colossal_shm_send(handle_, letter.to, letter.tag, letter.dtype, data, letter.bytes));
    } else {
      const int32_t from = letter.is_for_any ? -1 : static_cast<int32_t>(letter.from);
      errand.message =
          static_cast<Message*>(colossal_shm_receive(handle_, from, letter.tag, letter.dtype, data, letter.bytes));
    }
  }

  // What comes from anybody is, of each sender, what it sent first, second, ...
  void compare() {
    std::vector<const Errand*> open;
    for (const Errand& errand : errands_)
      if (!errand.is_sent) open.push_back(&errand);
    std::vector<const Letter*> letters;
    for (const Errand* errand : open) letters.push_back(errand->letter);
    std::sort(letters.begin(), letters.end());  // as they were written
    for (const Errand* errand : open) {
      const auto from = static_cast<uint32_t>(colossal_shm_source(errand->message));
      const auto letter = std::find_if(letters.begin(), letters.end(), [&](const Letter* one) {
        return one->from == from && one->tag == errand->letter->tag;
      });
      if (letter == letters.end()) fail("a message with tag %u came from rank %u", errand->letter->tag, from);
      const Bytes expected = pattern((*letter)->salt, from, (*letter)->to, (*letter)->bytes);
      if (errand->content != expected)
        fail("wrong message: %u -> %u, tag %u, %lu bytes, %s", from, (*letter)->to, (*letter)->tag,
             static_cast<unsigned long>(expected.size()), (*letter)->is_for_any ? "from anybody" : "from this rank");
      letters.erase(letter);
    }
  }

  Handle* handle_;
  Random random_;
  std::vector<Errand> errands_;
};

// A thread's messages, round after round; `alter` may change what this rank believes of one.
template <class Alter>
bool correspond(World& world, uint32_t rank, uint32_t thread, Random shared, uint32_t rounds, Alter alter) {
  Random own(shared.state, 1 + rank * kWriters + thread);
  for (uint32_t index = 0; index < rounds; ++index) {
    auto letters = random_round(Random(shared.next()), world.size, world[rank]->group.layout.ring_bytes, index);
    alter(letters, index);
    if (!Correspondence(world, rank, thread, letters, Random(own.next())).run()) return false;
    own.dawdle();
  }
  return true;
}

}  // namespace
