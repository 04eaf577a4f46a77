// Checking mode, messages: before each message its sender sends a note that says what it is, and from where in its
// program. Who has received the message looks for its note, and raises if the two do not fit. docs/adr/0016-checking.md
// says why a note is recognised by what its message contains.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <string>

#include "call.hpp"
#include "checks.hpp"
#include "requests.hpp"

namespace jaxcomm {

struct Note {
  static constexpr std::size_t kText = 432;

  std::int64_t communicator = 0, channel = 0, source = 0, tag = 0;
  std::int64_t code = 0, elements = 0, bytes = 0, mixed = 0;
  std::uint64_t checksum = 0;
  char text[kText] = {};
};

// How well a note fits a message.
enum class Fit { kNot, kDisagrees, kAgrees };

inline std::uint64_t checksum(const void* data, Count bytes) {
  const auto* at = static_cast<const char*>(data);
  std::uint64_t sum = 14695981039346656037ULL;
  const auto add = [&sum](std::uint64_t word) {
    sum = (sum ^ word) * 1099511628211ULL;
    sum ^= sum >> 32;
  };
  for (; bytes >= 8; bytes -= 8, at += 8) {
    std::uint64_t word;
    std::memcpy(&word, at, 8);
    add(word);
  }
  std::uint64_t rest = 0;
  if (bytes > 0) std::memcpy(&rest, at, static_cast<std::size_t>(bytes)), add(rest);
  return sum;
}

// Whether all bytes are alike, as those of zeros: then other messages have the same.
inline bool plain(const void* data, Count bytes) {
  const auto* at = static_cast<const char*>(data);
  return bytes < 2 || std::memcmp(at, at + 1, static_cast<std::size_t>(bytes) - 1) == 0;
}

// Those under way. They travel on a communicator of their own, which all processes of the world share and nobody frees:
// MPI could give that of a freed communicator's notes to another one, which would get what is left of them.
template <class H>
class Notes {
 public:
  void carry(H world) {
    const std::lock_guard lock(mutex_);
    world_ = world, carried_ = true;
  }
  void send(const Mpi<H>& mpi, int to, const Note& note) {
    const std::lock_guard lock(mutex_);
    if (!carried_) return;
    tidy(mpi), fetch(mpi);
    Sent& sent = sent_.emplace_back(Sent{note, H{}});
    if (mpi.Isend(&sent.note, Elements{sizeof(Note)}, bytes(), to, kTag, world_, &sent.request) != 0) sent_.pop_back();
  }
  // Takes the oldest of the notes that agree, else of those that disagree. They were sent before their messages, but
  // MPI may deliver one a little later. False: there is none, because the message is not from here, or was not noted.
  template <class F>
  bool take(const Mpi<H>& mpi, Note& taken, F fit) {
    const auto limit = std::chrono::steady_clock::now() + kPatience;
    for (bool last = false;; last = std::chrono::steady_clock::now() > limit) {
      const std::lock_guard lock(mutex_);
      if (!carried_) return false;
      fetch(mpi);
      const auto find = [&](Fit wanted) {
        return std::find_if(come_.begin(), come_.end(), [&](const Note& note) { return fit(note) == wanted; });
      };
      auto found = find(Fit::kAgrees);
      if (found == come_.end() && last) found = find(Fit::kDisagrees);
      if (found != come_.end()) return taken = *found, come_.erase(found), true;
      if (last) return false;
    }
  }
  // What can be ended before MPI does.
  void leave(const Mpi<H>& mpi, std::chrono::milliseconds patience) {
    const auto limit = std::chrono::steady_clock::now() + patience;
    do {
      const std::lock_guard lock(mutex_);
      if (!carried_) return;
      tidy(mpi), fetch(mpi);
      if (sent_.empty()) return;
    } while (std::chrono::steady_clock::now() < limit);
  }

 private:
  static constexpr int kTag = 0;
  static constexpr std::size_t kMost = 1024;  // notes of messages that nobody receives with jaxcomm stay
  static constexpr auto kPatience = std::chrono::microseconds(200);

  struct Sent {
    Note note;
    H request;
  };

  static H bytes() { return handle_as<H>(datatype_of(kBytes)->handle); }
  void tidy(const Mpi<H>& mpi) {
    sent_.remove_if([&mpi](Sent& sent) {
      int ended = 0;
      Status status;
      return mpi.Test(&sent.request, &ended, &status) != 0 || ended != 0;
    });
  }
  void fetch(const Mpi<H>& mpi) {
    for (;;) {
      int there = 0, source = 0;
      Status status;
      if (mpi.Iprobe(constants.any_source, kTag, world_, &there, &status) != 0 || there == 0) return;
      std::memcpy(&source, status.bytes + constants.status_source_at, sizeof source);
      Note& note = come_.emplace_back();
      if (mpi.Recv(&note, Elements{sizeof note}, bytes(), source, kTag, world_, &status) != 0) come_.pop_back();
      if (come_.size() > kMost) come_.pop_front();
    }
  }

  std::mutex mutex_;
  bool carried_ = false;
  H world_{};
  std::list<Sent> sent_;
  std::list<Note> come_;
};

template <class H>
Notes<H>& notes() {
  static Notes<H> all;
  return all;
}

template <class H>
std::int64_t Call<H>::channel() const {
  return at_.fold != 0 ? 2 : at_.shadow;
}

template <class H>
void Call<H>::announce() {
  if (!checking.load(std::memory_order_relaxed) || comm_.identity == 0 || !sends()) return;
  const int to = comm_.in_world[static_cast<std::size_t>(dest())];
  if (to < 0) return;
  Note note;
  note.communicator = comm_.identity, note.channel = channel(), note.source = comm_.rank, note.tag = sendtag();
  note.code = payload().code, note.elements = n_sent().value / datatype().per_element;
  note.bytes = note.elements * datatype().bytes, note.mixed = comm_.mixed;
  note.checksum = checksum(payload().data, note.bytes);
  const std::string text = describe();
  text.copy(note.text, Note::kText - 1);
  notes<H>().send(mpi, to, note);
}

// A part of `note` is what `describe` says of a payload.
inline std::string payload_text(std::int64_t elements, int code) {
  const Datatype* type = datatype_of(code);
  return std::to_string(elements) + " x " + (type == nullptr ? "?" : type->name);
}

// A program may receive less than its template, if it asks how much has come or has looked before. Those are its own
// messages: of one that was short, so is the derivative.
template <class H>
void Call<H>::check_message() {
  if (!checking.load(std::memory_order_relaxed) || comm_.identity == 0 || !receives()) return;
  const Buffer& to = frame_.results[0];
  const Count capacity = to.elements * bytes_of(to.code);
  Count bytes = 0;
  mpi.Get_elements_x(status(), handle_as<H>(datatype_of(kByte)->handle), &bytes);
  if (bytes < 0 || bytes > capacity) return;
  const std::uint64_t sum = checksum(to.data, bytes);
  const int source = status_field(constants.status_source_at), tag = status_field(constants.status_tag_at);
  const bool any = plain(to.data, bytes);
  Note note;
  const bool noted = notes<H>().take(mpi, note, [&](const Note& other) {
    if (other.communicator != comm_.identity || other.channel != channel() || other.source != source ||
        other.tag != tag || other.bytes != bytes || other.checksum != sum)
      return Fit::kNot;
    if (other.code == to.code || bytes == 0) return Fit::kAgrees;
    return any && (other.mixed != 0 || comm_.mixed) ? Fit::kNot : Fit::kDisagrees;
  });
  if (!noted) return;
  const std::string what = "a message of " + payload_text(note.elements, static_cast<int>(note.code));
  const std::string whose = "\nIt is that of\n  " + std::string(note.text) + "\n";
  if (note.code != to.code && bytes > 0)
    throw Failure(what + " was received with a template of " + payload_text(to.elements, to.code) +
                  ", so that its bytes mean something else." + whose + "Send and receive the same dtype.");
  const bool asked = at_.enveloped == 1 || at_.status >= 0 || frame_.status != nullptr || at_.message >= 0;
  if (bytes < capacity && !asked && channel() == 0)
    throw Failure(what + " is shorter than its template of " + payload_text(to.elements, to.code) +
                  ", the rest of which stays as it was." + whose +
                  "Receive it with a template of its size; or, if messages may be shorter, ask how much has come "
                  "(return_status=True, status=), or look before (Mprobe).");
}

// Of a receive that has failed: the message that it cannot have been big enough for.
template <class H>
std::string Call<H>::sender_of_failed() {
  if (!checking.load(std::memory_order_relaxed) || comm_.identity == 0) return "";
  Call& call = pending_ != nullptr ? pending_->call : *this;
  if (!call.at_.has_source || !call.receives() || call.frame_.n_results == 0) return "";
  const Buffer& to = call.frame_.results[0];
  const Count capacity = to.elements * bytes_of(to.code);
  const bool matched = call.at_.message >= 0;
  const auto known = [&](std::int64_t given, std::int64_t any, std::size_t field) {
    return given == any || matched ? call.status_field(field) : given;
  };
  const std::int64_t source = known(call.at_.source, constants.any_source, constants.status_source_at);
  const std::int64_t tag = known(call.at_.recvtag, constants.any_tag, constants.status_tag_at);
  Note note;
  const bool noted = notes<H>().take(mpi, note, [&](const Note& other) {
    const bool fits = other.communicator == comm_.identity && other.channel == call.channel() &&
                      other.source == source && other.tag == tag && other.bytes > capacity;
    return fits ? Fit::kAgrees : Fit::kNot;
  });
  if (!noted) return "";
  return "\nThe message is that of\n  " + std::string(note.text) + "\nand the template has room for " +
         payload_text(to.elements, to.code) + " (" + std::to_string(capacity) + " bytes).";
}

}  // namespace jaxcomm
