// What goes wrong: all threads must be told, and nobody may wait for ever.

#pragma once

#include "calls.h"
#include "traffic.h"

namespace {

enum Trouble : uint32_t {
  kLeavesBetween, kLeavesDuring, kComesNever, kComesLate, kDiffers, kSplitsDiffer, kMessageDiffers, kManyAtOnce,
  kUnanswered, kOvertaken, kTroubles
};

constexpr int64_t kMillisecond = 1000000;
constexpr uint32_t kForever = 1u << 30;

// A group in which one rank makes trouble in one collective, while two threads of each rank may exchange messages.
class Incident {
 public:
  Incident(uint32_t size, uint64_t seed, uint64_t limit, uint32_t trouble)
      : seed_(seed), limit_(limit), world_(size, Random(seed, 1)), done_(size) {
    Random random(seed, 2);
    trouble_ = trouble < kTroubles ? trouble : static_cast<uint32_t>(random.below(kTroubles));
    culprit_ = static_cast<uint32_t>(random.below(size));
    at_ = static_cast<uint32_t>(random.below(6));
    has_traffic_ = is_one_of({kMessageDiffers, kManyAtOnce, kUnanswered}) || random.one_in(2);
    if (trouble_ == kOvertaken) has_traffic_ = false;
    is_held_ = random.one_in(2);
  }

  void run() {
    Crew crew;
    for (uint32_t rank = 0; rank < world_.size; ++rank) {
      crew.add([this, rank] { call_until_broken(rank); });
      for (uint32_t thread = 0; has_traffic_ && thread < kWriters; ++thread)
        crew.add([this, rank, thread] { write_until_broken(rank, thread); });
    }
    if (trouble_ == kLeavesDuring) crew.add([this] { leave_during(); });
    if (trouble_ == kUnanswered) crew.add([this] { wait_for_nothing(); });
    if (trouble_ == kUnanswered) crew.add([this] { disturb(); });
    if (trouble_ == kOvertaken) crew.add([this] { overtake(true); });
    if (trouble_ == kOvertaken) crew.add([this] { overtake(false); });
    crew.join();
    for (uint32_t rank = 0; rank < world_.size; ++rank) {
      check(!perform(world_, rank, Step{}), "a broken group goes on");
      check_count(rank);
      check_fault(rank);
    }
  }

 private:
  bool is_one_of(std::initializer_list<uint32_t> troubles) const {
    return std::find(troubles.begin(), troubles.end(), trouble_) != troubles.end();
  }
  bool is_closed(uint32_t rank) { return world_[rank]->group.member(rank).has_left.load(); }

  Step step_at(uint32_t index) const {
    Random random(seed_, 1000 + index);
    Step step = random_step(random, world_.size, limit_);
    if (index == at_ && trouble_ == kSplitsDiffer) {
      step.call = Call{};
      step.call.kind = kAllToAll, step.call.root = -1, step.call.is_uneven = 1;
      step.lengths.assign(world_.size * world_.size, random.below(limit_ / world_.size));
    }
    return step;
  }

  void call_until_broken(uint32_t rank) {
    Random random(seed_, 100 + rank);
    for (uint32_t index = 0;; ++index) {
      Step step = step_at(index);
      random.dawdle();
      if (rank == culprit_ && !misbehave(index, step, random)) return;
      if (trouble_ == kLeavesDuring && is_held_ && index == at_ && rank != culprit_)
        while (!is_closed(culprit_)) usleep(100);
      const bool is_impatient = is_one_of({kComesNever, kComesLate}) && index >= at_ && rank != culprit_;
      if (!perform(world_, rank, step, is_impatient ? kMillisecond : kPatience)) return;
      done_[rank] = index + 1;
    }
  }

  // What the culprit does before a collective; false if it takes no part in it.
  bool misbehave(uint32_t index, Step& step, Random& random) {
    const bool leaves = trouble_ == kLeavesBetween ? index == at_ : trouble_ == kComesLate && index == at_ + 3;
    if (leaves) colossal_shm_leave(world_[culprit_]);
    if (leaves) return false;
    is_there_ = index >= at_;
    if (index != at_) return true;
    if (trouble_ == kComesNever)
      while (!world_[culprit_]->group.is_broken()) usleep(100);
    if (trouble_ == kComesLate) usleep(static_cast<useconds_t>(random.below(4000)));
    if (trouble_ == kManyAtOnce)
      while (!is_writing_) usleep(50);
    if (is_one_of({kDiffers, kManyAtOnce})) make_different(step, random);
    if (trouble_ == kSplitsDiffer) {
      const uint64_t peer = (culprit_ + 1 + random.below(world_.size - 1)) % world_.size;
      step.lengths[random.one_in(2) ? culprit_ * world_.size + peer : peer * world_.size + culprit_] += 1;
    }
    return true;
  }

  void make_different(Step& step, Random& random) {
    const Call before = step.call;
    while (step.call.equals(before)) step = random_step(random, world_.size, limit_);
  }

  void leave_during() {
    while (!is_there_) usleep(50);
    usleep(static_cast<useconds_t>(mixed(seed_) % 2000));
    colossal_shm_leave(world_[culprit_]);
  }

  void write_until_broken(uint32_t rank, uint32_t thread) {
    correspond(world_, rank, thread, Random(seed_, 3), kForever, [this, rank](auto& letters, uint32_t index) {
      if (!is_one_of({kMessageDiffers, kManyAtOnce}) || rank != culprit_ || index < at_) return;
      is_writing_ = true;
      for (Letter& letter : letters)
        if (letter.to == culprit_) {
          if (seed_ % 2) letter.bytes += 1;
          else letter.dtype += 1;
          return;
        }
    });
  }

  void wait_for_nothing() {
    Handle* handle = world_[culprit_];
    char nothing;
    const auto from = static_cast<int32_t>((culprit_ + 1) % world_.size);
    auto* message = static_cast<Message*>(colossal_shm_receive(handle, seed_ % 2 ? from : -1, 999, 0, &nothing, 1));
    check(!colossal_shm_wait(handle, message, 5 * kMillisecond), "a message came from nowhere");
    colossal_shm_release(handle, message);
  }

  // Something else keeps coming, so it seems.
  void disturb() {
    Group& peer = world_[(culprit_ + 1) % world_.size]->group;
    for (; !peer.is_broken(); usleep(300)) peer.ring_bell(culprit_);
  }

  // A message that does not fit what is asked for, and behind it one that would.
  void overtake(bool sends) {
    struct { uint32_t tag; char content[10]; uint64_t bytes; } parts[] = {{901, {}, 9}, {902, {}, 1}, {901, {}, 10}};
    const uint32_t peer = (culprit_ + 1) % world_.size;
    std::vector<Message*> messages;
    Handle* handle = world_[sends ? peer : culprit_];
    bool is_whole = true;
    for (auto* part : sends ? std::vector{&parts[0], &parts[1], &parts[2]} : std::vector{&parts[1], &parts[2]}) {
      char* data = part->content;
      void* message = sends ? colossal_shm_send(handle, culprit_, part->tag, 0, data, part->bytes)
                            : colossal_shm_receive(handle, static_cast<int32_t>(peer), part->tag, 0, data, part->bytes);
      messages.push_back(static_cast<Message*>(message));
      if (sends) continue;
      is_whole = colossal_shm_wait(handle, message, kPatience);
      usleep(2000);
    }
    for (Message* message : messages) {
      if (sends) colossal_shm_wait(handle, message, kPatience);
      colossal_shm_release(handle, message);
    }
    check(sends || !is_whole, "a message came instead of another");
  }

  // How many collectives went well: as many on all ranks, or one more where some were told during the last one.
  void check_count(uint32_t rank) const {
    const auto [least, most] = std::minmax_element(done_.begin(), done_.end());
    check(*most - *least <= 1, "ranks stopped at different collectives");
    const uint32_t done = done_[rank];
    if (is_one_of({kLeavesBetween, kComesNever, kDiffers, kSplitsDiffer}) && done != at_)
      fail("trouble %u in collective %u, but rank %u did %u", trouble_, at_, rank, done);
  }

  void check_fault(uint32_t rank) {
    uint32_t finder = rank;
    Detail detail{};
    const uint32_t kind = colossal_shm_fault(world_[rank], &finder, &detail);
    const bool names_culprit = detail.ranks >> culprit_ & 1, names_another = detail.ranks & ~(uint64_t{1} << culprit_);
    bool is_right = false;
    switch (trouble_) {
      case kLeavesBetween:
      case kLeavesDuring: is_right = kind == kLeft && names_culprit && !names_another; break;
      case kComesNever: is_right = kind == kTimeout && names_culprit; break;
      case kComesLate: is_right = (kind == kTimeout || kind == kLeft) && detail.ranks; break;
      case kDiffers: is_right = is_mismatch(kind, detail); break;
      case kSplitsDiffer: is_right = kind == kSplits && is_about_culprit(detail); break;
      case kOvertaken:
      case kMessageDiffers: is_right = kind == kMessage && is_about_culprit(detail); break;
      case kManyAtOnce: is_right = is_mismatch(kind, detail) || (kind == kMessage && is_about_culprit(detail)); break;
      default: is_right = kind == kTimeout && detail.ranks && !names_culprit; break;
    }
    if (!is_right)
      fail("trouble %u of rank %u ends in fault %u found by rank %u: ranks %lx, %u -> %u, %lu and %lu bytes", trouble_,
           culprit_, kind, finder, static_cast<unsigned long>(detail.ranks), detail.from, detail.to,
           static_cast<unsigned long>(detail.sent_bytes), static_cast<unsigned long>(detail.expected_bytes));
  }

  bool is_mismatch(uint32_t kind, const Detail& detail) {
    Call said, other;
    colossal_shm_call(world_[0], culprit_, detail.parity, &said);
    colossal_shm_call(world_[0], (culprit_ + 1) % world_.size, detail.parity, &other);
    return kind == kMismatch && !said.equals(other) && !detail.from && !detail.to && !detail.sent_bytes;
  }

  bool is_about_culprit(const Detail& detail) const {
    const bool differs = detail.sent_bytes != detail.expected_bytes || detail.sent_dtype != detail.expected_dtype;
    return differs && detail.from != detail.to && (detail.to == culprit_ || detail.from == culprit_);
  }

  uint64_t seed_, limit_;
  World world_;
  uint32_t trouble_, culprit_, at_;
  bool has_traffic_, is_held_;
  std::atomic<bool> is_there_{false}, is_writing_{false};  // the culprit, in the collective and the round
  std::vector<uint32_t> done_;  // collectives of each rank that went well
};

}  // namespace
