// Communicators, reductions and statuses by index.
//
// Compiled programs name a communicator by its index here, never by its handle: a pointer would differ from run to run
// and defeat the persistent compilation cache, and would dangle after Free. A slot is marked when it is freed and never
// used again, so a stale program gets an error and not somebody else's communicator.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "abi.hpp"

namespace jaxcomm {

struct Communicator {
  std::uint64_t handle = 0;
  std::uint64_t shadow = 0;  // for messages that differentiation adds: no ANY_SOURCE of the program may receive one
  int rank = 0, size = 0;
  int peers = 0;  // ranks to exchange messages with: of two groups, those of the other one
  bool two_groups = false;
  std::string name;
  bool freed = false;
  std::uint64_t reversed = 0;  // the same ranks in reverse order, made at first use
  bool has_reversed = false;
  std::uint64_t folds = 0;  // the same ranks again, for the messages of folds (folds.py), made at first use
  bool has_folds = false;
  std::uint64_t checks = 0;  // and for what ranks tell each other in checking mode (checks.hpp), made at first use
  bool has_checks = false;
  // For notes on messages (notes.hpp): a number that all its ranks know it by, and no other communicator's, or 0; the
  // ranks of its processes in the world, negative for one that is not there; whether mpi4py's methods have sent or
  // received here, whose messages have no notes.
  std::int64_t identity = 0;
  std::vector<int> in_world;
  bool mixed = false;
  // In checking mode: the last operation that differentiation has passed by on this rank, in words. `raised_mutex`
  // guards it.
  std::string unlinked;
  std::int64_t agreed = 0, unlinked_after = -1;  // how many collectives were alike so far, and before that operation
  // Of a communicator with a topology: its live edges as two distributed graphs, the second with all edges turned
  // round, and which edges of the topology, that number its blocks, those are, in the graph's order. See topology.py.
  std::uint64_t graph = 0, reversed_graph = 0;
  std::vector<int> in_edges, out_edges;
};

// `handle_at` is where mpi4py's object keeps its handle: read at each call, it is null as soon as the op is freed.
struct Reduction {
  const void* handle_at = nullptr;
  std::string name;
  // A user's operation is called through another one, which tells what it raises: see user_ops.py.
  const void* alive_at = nullptr;  // where the user's keeps its handle
  std::string raised = "";
};

// One row per element type: its MPI datatype, and how many of those an element takes (bfloat16 moves as 2 MPI_BYTE).
struct Datatype {
  std::uint64_t handle = 0;
  int per_element = 0;
  int bytes = 0;
  std::string name;
};

// Grows only; references stay valid. Rows are added under the lock and read by handler threads.
template <class Row>
class Table {
 public:
  std::int64_t add(Row row) {
    const std::lock_guard lock(mutex_);
    rows_.push_back(std::move(row));
    return static_cast<std::int64_t>(rows_.size()) - 1;
  }
  Row& at(std::int64_t index) {
    const std::lock_guard lock(mutex_);
    if (index < 0 || index >= static_cast<std::int64_t>(rows_.size()))
      throw Failure("a compiled program refers to an object that this process never made");
    return rows_[static_cast<std::size_t>(index)];
  }
  std::int64_t size() {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(rows_.size());
  }

 private:
  std::mutex mutex_;
  std::deque<Row> rows_;
};

// Where programs were written, by the number that their operations carry.
class Sites {
 public:
  void add(std::int64_t number, std::string text) {
    const std::lock_guard lock(mutex_);
    texts_[number] = std::move(text);
  }
  std::string at(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = texts_.find(number);
    return found == texts_.end() ? "" : found->second;
  }
  std::int64_t size() {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(texts_.size());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::int64_t, std::string> texts_;
};

// Messages that a matched probe has found, until they are received: MPI 4.1, 3.8.2.
class Messages {
 public:
  std::int64_t add(std::uint64_t handle) {
    const std::lock_guard lock(mutex_);
    found_[next_] = handle;
    return next_++;
  }
  template <class H>
  H take(std::int64_t number);
  std::int64_t size() {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(found_.size());
  }

 private:
  std::mutex mutex_;
  std::int64_t next_ = 0;
  std::unordered_map<std::int64_t, std::uint64_t> found_;
};

inline Messages messages;
inline Sites sites;
inline Table<Communicator> communicators;
inline Table<Reduction> reductions;
inline std::mutex raised_mutex;  // of Reduction::raised
inline Table<Status*> statuses;  // mpi4py's own objects, kept alive by the Python side
inline Table<Datatype> datatypes;
inline std::int64_t datatype_of_code[64];  // XLA_FFI_DataType -> row of datatypes, -1 where there is none

// The row of an element type of XLA; null where there is none.
inline const Datatype* datatype_of(int code) {
  const std::int64_t row = code >= 0 && code < 64 ? datatype_of_code[code] : -1;
  return row < 0 ? nullptr : &datatypes.at(row);
}
// How many bytes its elements take; 0 where there is none.
inline Count bytes_of(int code) {
  const Datatype* type = datatype_of(code);
  return type == nullptr ? 0 : type->bytes;
}

template <class H>
H handle_as(std::uint64_t raw) {
  if constexpr (std::is_pointer_v<H>)
    return reinterpret_cast<H>(raw);
  else
    return static_cast<H>(static_cast<std::int64_t>(raw));
}

template <class H>
std::uint64_t handle_bits(H handle) {
  if constexpr (std::is_pointer_v<H>)
    return reinterpret_cast<std::uint64_t>(handle);
  else
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(handle));
}

template <class H>
H Messages::take(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = found_.find(number);
  if (found == found_.end())
    throw Failure("this message was received before; a message that is probed for is received once");
  const H handle = handle_as<H>(found->second);
  found_.erase(found);
  return handle;
}

}  // namespace jaxcomm
