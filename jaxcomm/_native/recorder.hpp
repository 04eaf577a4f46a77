// The flight recorder: what this rank is doing in MPI, what it did last, and, while a timeline is wanted, all of it. It
// is always on, so that whoever looks at a program that waits need not have foreseen it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "handles.hpp"

namespace jaxcomm {

// What can be said of one call: all that its description needs, and nothing that does not outlive it.
struct Facts {
  const char* operation = "";
  std::int64_t comm = 0, elements = 0, op = -1, root = kUnknown, dest = kUnknown, sendtag = 0, source = kUnknown,
               recvtag = 0, site = 0, says = 0;
  std::int64_t apart = 0;  // on which duplicate: 0 the communicator itself, 1 that for derivatives, 2 that for folds
  int code = 0;            // XLA_FFI_DataType; 0 where there is no payload
  bool unlinked = false;
  bool mpi4pys = false;  // a method of mpi4py's own, of which there are name, communicator and site

  static constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();
};

inline std::string rank_text(std::int64_t rank) {
  if (rank == constants.proc_null) return "PROC_NULL";
  return rank == constants.any_source ? "ANY_SOURCE" : "rank " + std::to_string(rank);
}

// "recv on WORLD, rank 1 of 3, 8 x float32 (32 bytes), from rank 0 tag 7, at ring.py:12 (step)"
inline std::string describe(const Facts& facts) {
  const Communicator& comm = communicators.at(facts.comm);
  const std::string said = sites.at(facts.says);
  std::string text = (said.empty() ? std::string(facts.operation) : said) + " on " + comm.name + ", rank " +
                     std::to_string(comm.rank) + " of " + std::to_string(comm.size);
  if (const Datatype* type = datatype_of(facts.code); facts.code != 0 && type != nullptr)
    text += ", " + std::to_string(facts.elements) + " x " + type->name + " (" +
            std::to_string(facts.elements * type->bytes) + " bytes)";
  if (facts.op >= 0) text += ", op " + reductions.at(facts.op).name;
  if (facts.root != Facts::kUnknown) text += ", root " + std::to_string(facts.root);
  if (facts.dest != Facts::kUnknown) text += ", to " + rank_text(facts.dest) + " tag " + std::to_string(facts.sendtag);
  if (facts.source != Facts::kUnknown)
    text += ", from " + rank_text(facts.source) + " tag " +
            (facts.recvtag == constants.any_tag ? "ANY_TAG" : std::to_string(facts.recvtag));
  if (const std::string site = sites.at(facts.site); !site.empty()) text += ", at " + site;
  if (facts.unlinked) text += ", whose operands do not depend on what is differentiated";
  return text;
}

// That of a call which waits for a request: `site` is where it waits.
inline std::string waited_text(const Facts& request, std::int64_t site) {
  const std::string here = sites.at(site);
  return describe(request) + (here.empty() ? "" : ", waited for at " + here);
}

struct Record {
  std::int64_t number = 0;             // of the operation, from 1
  std::int64_t began = 0, ended = -1;  // nanoseconds of the steady clock; ended: -1 while it is under way
  int thread = 0;                      // from 1, in the order in which threads came
  bool failed = false, waits = false;  // waits: `facts` are those of the request that the call waits for
  std::int64_t here = 0;               // then the site of the call itself
  std::int64_t request = 0;            // and the number of the operation that started the request
  Facts facts;

  std::string text() const { return waits ? waited_text(facts, here) : describe(facts); }
};

inline std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Recorder {
 public:
  static constexpr std::size_t kLast = 64;

  std::int64_t begin(const Facts& facts) {
    Record record;
    record.began = now(), record.thread = thread(), record.facts = facts;
    const std::lock_guard lock(mutex_);
    record.number = ++number_;
    open_.push_back(record);
    return record.number;
  }
  void waits_for(std::int64_t number, const Facts& request, std::int64_t started_by) {
    const std::lock_guard lock(mutex_);
    if (Record* record = find(number)) {
      record->here = record->facts.site, record->waits = true;
      record->facts = request, record->request = started_by;
    }
  }
  void end(std::int64_t number, bool failed) {
    const std::int64_t time = now();
    const std::lock_guard lock(mutex_);
    Record* record = find(number);
    if (record == nullptr) return;
    record->ended = time, record->failed = failed;
    last_[ended_++ % kLast] = *record;
    if (keeps_all_) all_.push_back(*record);
    *record = open_.back();
    open_.pop_back();
  }
  // What is under way, and what ended last: the oldest first.
  std::vector<Record> open() const {
    const std::lock_guard lock(mutex_);
    std::vector<Record> records = open_;
    std::sort(records.begin(), records.end(), [](const Record& a, const Record& b) { return a.number < b.number; });
    return records;
  }
  std::vector<Record> last() const {
    const std::lock_guard lock(mutex_);
    std::vector<Record> records;
    for (std::size_t i = ended_ > kLast ? ended_ - kLast : 0; i < ended_; ++i) records.push_back(last_[i % kLast]);
    return records;
  }
  // A timeline: everything that ends from now on, until it is asked for.
  void keep_all(bool on) {
    const std::lock_guard lock(mutex_);
    keeps_all_ = on;
  }
  std::vector<Record> take_all() {
    const std::lock_guard lock(mutex_);
    return std::exchange(all_, {});
  }
  std::int64_t count() const {
    const std::lock_guard lock(mutex_);
    return number_;
  }

 private:
  static int thread() {
    static std::atomic<int> threads{0};
    thread_local const int mine = ++threads;
    return mine;
  }
  Record* find(std::int64_t number) {
    for (Record& record : open_)
      if (record.number == number) return &record;
    return nullptr;
  }

  mutable std::mutex mutex_;
  std::int64_t number_ = 0;
  std::size_t ended_ = 0;
  std::vector<Record> open_;  // as many as threads are in MPI
  std::array<Record, kLast> last_;
  bool keeps_all_ = false;
  std::vector<Record> all_;
};

inline Recorder recorder;

}  // namespace jaxcomm
