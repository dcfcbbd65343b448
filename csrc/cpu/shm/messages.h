// Messages from one rank to another: a ring of bytes for each pair, and for each rank a bell that tells it to look.

#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "group.h"

namespace colossal {

enum MessageState : int { kPending, kDelivered, kFailed };

struct Message {
  std::atomic<int32_t> peer;  // -1: from anybody
  uint32_t tag, dtype;
  char* data;
  uint64_t bytes, moved = 0;
  bool has_begun = false;
  std::atomic<int> state{kPending};
};

// What has come from one rank, and is coming.
struct RecvQueue {
  struct Kept {
    Envelope envelope;
    std::vector<char> content;
  };

  uint64_t position = 0;  // in the ring; what is published lags behind it, at the last whole line
  bool is_open = false;   // an envelope was read, its content is coming
  Envelope envelope;
  Message* target = nullptr;
  uint64_t moved = 0;
  std::vector<char> content;  // as long as nobody has asked for it
  std::deque<Kept> early;     // messages that lay before one that was asked for
};

// What goes to one rank.
struct Outbox {
  uint64_t position = 0;
  std::deque<Message*> queue;
};

class Post {
 public:
  explicit Post(Group& group) : g_(group), outboxes_(group.size), inboxes_(group.size) {}

  Message* send(uint32_t to, uint32_t tag, uint32_t dtype, const void* data, uint64_t bytes) {
    auto* message =
        new Message{static_cast<int32_t>(to), tag, dtype, static_cast<char*>(const_cast<void*>(data)), bytes};
    std::lock_guard<std::mutex> lock(mutex_);
    outboxes_[to].queue.push_back(message);
    progress();
    return message;
  }

  Message* receive(int32_t from, uint32_t tag, uint32_t dtype, void* data, uint64_t bytes) {
    auto* message = new Message{from, tag, dtype, static_cast<char*>(data), bytes};
    std::lock_guard<std::mutex> lock(mutex_);
    incoming_.push_back(message);
    progress();
    return message;
  }

  void poll() {
    std::lock_guard<std::mutex> lock(mutex_);
    progress();
  }

  // Move what can be moved, and tell a message's state: failed if it will never arrive.
  int look(Message& message) {
    poll();
    const int state = message.state.load();
    if (state != kPending || hopes(message, INT64_MAX)) return message.state.load();
    return kFailed;
  }

  // Wait until a message is delivered; false if the group is broken, or broken off by this wait.
  bool wait(Message& message, int64_t deadline) {
    Counter& bell = g_.member(g_.rank).bell;
    int64_t looked = now_ns();
    while (message.state.load() == kPending) {
      const uint32_t heard = bell.value.load();
      poll();
      if (message.state.load() != kPending) break;
      if (g_.is_broken()) return false;
      if (spin(bell.is_raised_here(this_core()) ? 0 : g_.spins, [&] { return bell.value.load() != heard; })) continue;
      bell.sleepers.fetch_add(1);
      if (bell.value.load() == heard) futex_wait(bell.value, heard, Group::kSliceNs);
      bell.sleepers.fetch_sub(1);
      if (now_ns() - looked < Group::kSliceNs) continue;
      looked = now_ns();
      if (!hopes(message, deadline)) return message.state.load() == kDelivered;
    }
    return message.state.load() == kDelivered;
  }

  void release(Message* message) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      forget(message);
    }
    delete message;
  }

 private:
  bool hopes(const Message& message, int64_t deadline) {
    if (g_.is_broken()) return false;
    uint64_t dead = 0, left = 0, all = 0;
    const int32_t from = message.peer.load();
    for (uint32_t peer = 0; peer < g_.size; ++peer) {
      if (peer == g_.rank || (from >= 0 && peer != static_cast<uint32_t>(from))) continue;
      const uint64_t bit = uint64_t{1} << peer;
      all |= bit;
      if (g_.member(peer).has_left.load()) left |= bit;
      else if (!g_.lives(peer)) dead |= bit;
    }
    if ((dead | left) == all) {
      poll();  // what they wrote before they went is still there
      if (message.state.load() != kPending) return true;
      return dead ? g_.break_off(kDead, dead) : g_.break_off(kLeft, left);
    }
    if (now_ns() < deadline || message.state.load() != kPending) return true;
    return g_.break_off(kTimeout, all);
  }

  void forget(Message* message) {
    for (auto& box : outboxes_)
      box.queue.erase(std::remove(box.queue.begin(), box.queue.end(), message), box.queue.end());
    incoming_.erase(std::remove(incoming_.begin(), incoming_.end(), message), incoming_.end());
    for (auto& inbox : inboxes_)
      if (inbox.target == message) inbox.target = nullptr, inbox.is_open = false;  // only where the group is broken
  }

  void progress() {
    has_finished_ = false;
    for (uint32_t peer = 0; peer < g_.size && !g_.is_broken(); ++peer) {
      if (peer == g_.rank) continue;
      const bool sent = push(peer), received = pull(peer);
      if (sent || received) g_.ring_bell(peer);
    }
    if (has_finished_) g_.ring_bell(g_.rank);  // another thread may wait for that message
  }

  void finish(Message& message) {
    message.state.store(kDelivered);
    has_finished_ = true;
  }

  template <class Move>
  void move(uint64_t position, uint64_t bytes, Move part) {
    const uint64_t ring = g_.layout.ring_bytes, begin = position % ring, first = std::min(bytes, ring - begin);
    if (first) part(begin, 0, first);
    if (bytes > first) part(0, first, bytes - first);
  }

  void write(uint32_t peer, uint64_t position, const char* from, uint64_t bytes) {
    char* ring = g_.ring(g_.rank, peer);
    move(position, bytes,
         [&](uint64_t at, uint64_t done, uint64_t part) { std::memcpy(ring + at, from + done, part); });
  }

  void read(uint32_t peer, uint64_t position, char* to, uint64_t bytes) {
    const char* ring = g_.ring(peer, g_.rank);
    move(position, bytes, [&](uint64_t at, uint64_t done, uint64_t part) { std::memcpy(to + done, ring + at, part); });
  }

  // Write what fits into the ring to a rank. Both ends count whole lines when a message ends.
  bool push(uint32_t peer) {
    Outbox& box = outboxes_[peer];
    Mail& mail = g_.mail(g_.rank, peer);
    const uint64_t before = box.position;
    while (!box.queue.empty()) {
      Message& message = *box.queue.front();
      uint64_t room = mail.read.load(std::memory_order_acquire) + g_.layout.ring_bytes - box.position;
      if (!message.has_begun) {
        if (room < sizeof(Envelope)) break;
        const Envelope envelope{message.bytes, message.tag, message.dtype, {}};
        write(peer, box.position, reinterpret_cast<const char*>(&envelope), sizeof envelope);
        box.position += sizeof envelope, room -= sizeof envelope;
        message.has_begun = true;
      }
      const uint64_t part = std::min(room, message.bytes - message.moved);
      write(peer, box.position, message.data + message.moved, part);
      box.position += part, message.moved += part;
      if (message.moved < message.bytes) break;
      box.position = round_up(box.position, kLine);
      box.queue.pop_front();
      finish(message);
    }
    if (box.position == before) return false;
    mail.written.store(box.position, std::memory_order_release);
    return true;
  }

  // Read what has come from a rank, as far as somebody has asked for it.
  bool pull(uint32_t peer) {
    RecvQueue& box = inboxes_[peer];
    const uint64_t before = box.position;
    serve(peer);
    while (!g_.is_broken() && (box.is_open || open(peer))) {
      const uint64_t written = g_.mail(peer, g_.rank).written.load(std::memory_order_acquire);
      const uint64_t part = std::min(written - box.position, box.envelope.bytes - box.moved);
      read(peer, box.position, (box.target ? box.target->data : box.content.data()) + box.moved, part);
      box.position += part, box.moved += part;
      if (box.moved < box.envelope.bytes) break;
      box.position = round_up(box.position, kLine);
      close(peer);
    }
    if (box.position == before) return false;
    g_.mail(peer, g_.rank).read.store(box.position / kLine * kLine, std::memory_order_release);
    return true;
  }

  // Take the next message out of the ring if it, or one behind it, is asked for.
  bool open(uint32_t peer) {
    RecvQueue& box = inboxes_[peer];
    if (g_.mail(peer, g_.rank).written.load(std::memory_order_acquire) - box.position < sizeof(Envelope)) return false;
    Envelope envelope;
    read(peer, box.position, reinterpret_cast<char*>(&envelope), sizeof envelope);
    Message* target = asked(peer, &envelope);
    if (!target && !asked(peer, nullptr)) return false;
    if (target && !fits(peer, *target, envelope)) return false;
    box.position += sizeof envelope;
    box.envelope = envelope, box.target = target, box.moved = 0, box.is_open = true;
    if (target) take(target, peer);
    else box.content.resize(envelope.bytes);
    return true;
  }

  void close(uint32_t peer) {
    RecvQueue& box = inboxes_[peer];
    box.is_open = false;
    if (box.target) finish(*box.target);
    else box.early.push_back({box.envelope, std::move(box.content)});
    box.target = nullptr;
    box.content.clear();
    serve(peer);
  }

  // Hand out what came earlier than it was asked for.
  void serve(uint32_t peer) {
    auto& early = inboxes_[peer].early;
    for (auto kept = early.begin(); kept != early.end();) {
      Message* target = asked(peer, &kept->envelope);
      if (!target) {
        ++kept;
        continue;
      }
      if (!fits(peer, *target, kept->envelope)) return;
      if (!kept->content.empty()) std::memcpy(target->data, kept->content.data(), kept->content.size());
      take(target, peer);
      finish(*target);
      kept = early.erase(kept);
    }
  }

  // The first request that such a message answers; without an envelope, any from that rank.
  Message* asked(uint32_t peer, const Envelope* envelope) {
    for (Message* message : incoming_)
      if ((message->peer < 0 || message->peer == static_cast<int32_t>(peer)) &&
          (!envelope || message->tag == envelope->tag))
        return message;
    return nullptr;
  }

  void take(Message* message, uint32_t peer) {
    message->peer = static_cast<int32_t>(peer);
    incoming_.erase(std::find(incoming_.begin(), incoming_.end(), message));
  }

  bool fits(uint32_t peer, const Message& message, const Envelope& envelope) {
    if (message.bytes == envelope.bytes && message.dtype == envelope.dtype) return true;
    Detail detail{};
    detail.from = peer, detail.to = g_.rank, detail.tag = envelope.tag;
    detail.sent_bytes = envelope.bytes, detail.expected_bytes = message.bytes;
    detail.sent_dtype = envelope.dtype, detail.expected_dtype = message.dtype;
    return g_.break_off(kMessage, detail);
  }

  Group& g_;
  std::mutex mutex_;
  bool has_finished_ = false;
  std::vector<Outbox> outboxes_;
  std::vector<RecvQueue> inboxes_;
  std::vector<Message*> incoming_;
};

}  // namespace colossal
