// Requests: nonblocking operations under way, by number. They own their data, because XLA may reuse the memory of an
// operand, and the caller that of a NumPy array, as soon as the call that starts them returns.
//
// Between the calls that start and end an operation a program carries its number, in an array of two float32: whole
// numbers below 2^24, which survive whatever differentiation does to cotangents on their way (sums with zeros).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call.hpp"
#include "checks.hpp"

namespace jaxcomm {

// No request at all: what the derivative of one is that did not move. One that is not to be looked at. And what stands
// for several, under vmap.
inline constexpr std::int64_t kNoRequest = 0, kNothing = -1, kSeveral = -2;

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Freed>;

template <class H>
class Pending {
 public:
  Pending(const Mpi<H>& mpi, const Frame& begun) : frame_(begun), call(mpi, frame_) {
    frame_.status = nullptr;
    for (int i = 0; i < frame_.data_operands; ++i) own(frame_.operands[i], true);
    frame_.n_results = 1;
    frame_.results[0] = {nullptr, begun.attributes.expected, frame_.operands[0].code};
    own(frame_.results[0], false);
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  // Whether there is no more to wait for. In checking mode that is so too where ranks do not do the same.
  bool arrived() {
    const std::lock_guard lock(mutex_);
    return call.told() && (!call.differs().empty() || call.test());
  }
  // Whether MPI is done with its memory.
  bool ended() {
    const std::lock_guard lock(mutex_);
    const bool told = call.told();
    return call.test() && told;
  }
  const Buffer& result() const { return frame_.results[0]; }

 private:
  void own(Buffer& buffer, bool copy) {
    const auto bytes = static_cast<std::size_t>(buffer.elements * bytes_of(buffer.code));
    if (bytes == 0) return;
    memory_.emplace_back(std::malloc(bytes));
    if (memory_.back() == nullptr) throw Failure("no memory for a message of " + std::to_string(bytes) + " bytes");
    if (copy) std::memcpy(memory_.back().get(), buffer.data, bytes);
    buffer.data = memory_.back().get();
  }

  Frame frame_;
  std::vector<Memory> memory_;
  std::mutex mutex_;

 public:
  Call<H> call;
  bool cancelled = false;
  bool excused = false;  // its program has failed: it stays, and is in nobody's way
  bool told = false;     // Test, Waitany and their like have said that it is complete
};

template <class H>
class Requests {
 public:
  using Shared = std::shared_ptr<Pending<H>>;

  std::int64_t add(Shared pending) {
    const std::lock_guard lock(mutex_);
    released_.remove_if([](const Shared& other) { return other->ended(); });
    pending_[++last_] = std::move(pending);
    return last_;
  }
  // The request of a number; null for one that was waited for.
  Shared find(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number > last_) throw Failure("a request that this process never made");
    const auto found = pending_.find(number);
    return found == pending_.end() ? nullptr : found->second;
  }
  Shared take(std::int64_t number, bool keep) {
    Shared found = find(number);
    if (found == nullptr)
      throw Failure(
          "the request was waited for before, by Wait, Waitall, Waitany or Waitsome; it is complete, and its result is "
          "what that call returned. (Under vmap both branches of a cond run whose predicate has the batch: wait for a "
          "request outside of it)");
    keep ? tell(number, *found) : forget(number);
    return found;
  }
  // A test has told that the request is complete, and given the result. A Wait may still come: the last few are kept.
  void tell(std::int64_t number, Pending<H>& pending) {
    const std::lock_guard lock(mutex_);
    if (std::exchange(pending.told, true)) return;
    told_.push_back(number);
    if (told_.size() <= kKept) return;
    pending_.erase(told_.front());
    told_.pop_front();
  }
  // Nobody will wait for it: it ends by itself.
  void release(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(number);
    if (found == pending_.end()) return;
    keep_until_ended(std::move(found->second));
    pending_.erase(found);
  }
  void release(Shared pending) {
    const std::lock_guard lock(mutex_);
    keep_until_ended(std::move(pending));
  }
  // Derivatives of messages that one receive could take for another find each other by their order alone. So refuses to
  // end one, or to do one at once, while an earlier one is open.
  void check_order(const Attributes& one, std::int64_t number) {
    const std::lock_guard lock(mutex_);
    for (const auto& [other_number, other] : pending_)
      if (other_number < number && !other->told && !other->excused && other->call.alike(one)) {
        excuse(one);
        throw Failure(
            "messages of the same ranks with the same tag are under way at once, and this one ends before one that was "
            "started earlier (" +
            other->call.describe() +
            "). Their derivatives could not be told apart: wait for "
            "them in the order in which they were started, or give them different tags");
      }
  }
  // Whether there is one on a communicator.
  bool any_on(std::int64_t comm) {
    const std::lock_guard lock(mutex_);
    released_.remove_if([](const Shared& other) { return other->ended(); });
    const auto on_it = [comm](const Shared& each) { return !each->told && each->call.is_on(comm); };
    return std::any_of(released_.begin(), released_.end(), on_it) ||
           std::any_of(pending_.begin(), pending_.end(), [&](const auto& entry) { return on_it(entry.second); });
  }
  // Those that nobody has waited for yet, or that MPI is still at work on.
  std::int64_t size() {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(pending_.size() + released_.size());
  }
  // What was never waited for, in words.
  std::vector<std::string> open() {
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<std::int64_t, std::string>> found;
    for (const auto& [number, pending] : pending_)
      if (!pending->told && !pending->excused) found.emplace_back(number, pending->call.describe());
    std::sort(found.begin(), found.end());
    std::vector<std::string> texts;
    for (auto& [number, text] : found) texts.push_back(std::move(text));
    return texts;
  }
  // Ends what can be ended, before MPI does: receives that nobody waits for are cancelled; sends get some time.
  void leave(std::chrono::milliseconds patience);

 private:
  static constexpr std::size_t kKept = 16;
  void excuse(const Attributes& one) {
    for (const auto& entry : pending_)
      if (entry.second->call.alike(one)) entry.second->excused = true;
  }
  void keep_until_ended(Shared pending) {
    released_.remove_if([](const Shared& other) { return other->ended(); });
    released_.push_back(std::move(pending));
  }
  void forget(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    pending_.erase(number);
  }

  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::unordered_map<std::int64_t, Shared> pending_;
  std::list<Shared> released_;
  std::deque<std::int64_t> told_;
};

template <class H>
Requests<H>& requests() {
  static Requests<H> all;
  return all;
}

inline void write_number(std::int64_t number, const Buffer& into) {
  auto* parts = static_cast<float*>(into.data);
  parts[0] = static_cast<float>(number & 0xFFFFFF);
  parts[1] = static_cast<float>(number >> 24);
}

inline std::int64_t read_number(const Buffer& from, Count index = 0) {
  if (from.elements < 2 * index + 2) return kNoRequest;  // a batch without elements
  const auto* parts = static_cast<const float*>(from.data) + 2 * index;
  return parts[0] < 0 ? static_cast<std::int64_t>(parts[0])
                      : static_cast<std::int64_t>(parts[0]) + (static_cast<std::int64_t>(parts[1]) << 24);
}

template <class H>
void Requests<H>::leave(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  for (auto& entry : pending_) released_.push_back(entry.second);
  pending_.clear();
  for (const Shared& pending : released_)
    if (!pending->ended()) pending->call.cancel_receive();
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (!released_.empty() && std::chrono::steady_clock::now() < limit) {
    released_.remove_if([](const Shared& pending) { return pending->ended(); });
    std::this_thread::yield();
  }
}

// A buffered send is no request: nobody need wait for it. Nor is a receive on the shadow communicator from ANY_SOURCE:
// that is the derivative of the wait for a send, and the message is received when that is waited for, which knows from
// whom.
template <class H>
template <class Op>
int Call<H>::start_later() {
  if (at_.shadow != 0 && from_anyone(at_)) {
    write_number(kNoRequest, frame_.results[0]);
    return 0;
  }
  auto pending = std::make_shared<Pending<H>>(mpi, frame_);
  pending->call.record_ = record_;
  int code = checking.load(std::memory_order_relaxed) ? pending->call.tell_later() : 0;
  try {
    if (code == 0) code = Op::begin(pending->call);
  } catch (...) {
    requests<H>().release(std::move(pending));
    throw;
  }
  if (code == 0 && !is_buffered()) {
    write_number(requests<H>().add(std::move(pending)), frame_.results[0]);
    return 0;
  }
  write_number(kNoRequest, frame_.results[0]);
  requests<H>().release(std::move(pending));  // if it has failed, a part of it may be under way
  return code;
}

// Throws if the watchdog has given up what this call does. Then what is under way is left to end by itself.
template <class H>
void Call<H>::check_given_up() {
  if (record_ > given_up.load(std::memory_order_relaxed)) return;
  if (pending_ != nullptr) requests<H>().release(pending_);
  throw Failure(
      "given up, since it took longer than JAXCOMM_TIMEOUT or was interrupted. The other ranks do not know; "
      "communicate no "
      "more on this communicator, and end the program or make a new communicator on all ranks");
}

// Starts an operation on copies of its data and waits for it, as long as the watchdog does.
template <class H>
template <class F>
int Call<H>::give_up_or_end(F start, int template_operand) {
  Frame frame = frame_;
  frame.attributes.expected = has_result() ? frame_.results[0].elements : 0;
  const auto pending = std::make_shared<Pending<H>>(mpi, frame);
  const int code = start(pending->call);
  if (code != 0) {
    if (pending->call.started() > 0) requests<H>().release(pending);
    return code;
  }
  for (int tests = 0; !pending->arrived(); ++tests) {
    if (tests % 64 != 63) continue;
    std::this_thread::yield();
    try {
      check_given_up();
    } catch (...) {
      pending->call.cancel_receive();
      requests<H>().release(pending);
      throw;
    }
  }
  if (pending->call.failed() != 0) return pending->call.failed();
  const Buffer &from = pending->result(), &to = frame_.results[0];
  if (!at_.has_source) {
    if (from.elements > 0) std::memcpy(to.data, from.data, static_cast<std::size_t>(to.elements * bytes_of(to.code)));
    return 0;
  }
  if (at_.message == kNoMessage) return envelope(0, template_operand);
  std::memcpy(status()->bytes, pending->call.status()->bytes, constants.status_bytes);
  Count came = 0;
  const int counted = mpi.Get_elements_x(status(), type(), &came);
  const Count whole = std::min<Count>(came / datatype().per_element, to.elements);
  const auto bytes = static_cast<std::size_t>(whole * datatype().bytes);
  if (bytes > 0) std::memcpy(to.data, from.data, bytes);
  return envelope(counted, template_operand);
}

template <class H>
int Call<H>::send() {
  if (!sends()) return 0;
  if (is_buffered()) {
    auto pending = std::make_shared<Pending<H>>(mpi, frame_);
    const int code = pending->call.start_send();
    if (code == 0) requests<H>().release(std::move(pending));
    return code;
  }
  announce();
  const auto now = at_.mode == kSynchronous ? mpi.Ssend : mpi.Send;
  return now(in(), n_sent(), type(), dest(), sendtag(), comm());
}

template <class H>
bool Call<H>::arrived() {
  return pending_ != nullptr ? pending_->arrived() : test();
}

template <class H>
int Call<H>::failed() const {
  return pending_ != nullptr ? pending_->call.failed() : failed_;
}

template <class H>
void Call<H>::check_op() const {
  const Attributes& begun = pending_ != nullptr ? pending_->call.at_ : at_;
  if (!begun.has_op) return;
  Reduction& reduction = reductions.at(begun.op);
  if (reduction.alive_at == nullptr) return;
  std::string raised;
  {
    const std::lock_guard lock(raised_mutex);
    std::swap(raised, reduction.raised);
  }
  if (!raised.empty()) throw Failure(reduction.name + " raised " + raised, Failure::kFromOp);
}

template <class H>
Facts Call<H>::pending_facts() const {
  return pending_->call.facts();
}

template <class H>
void Call<H>::check_order(std::int64_t number) const {
  if (at_.differentiated != 0) requests<H>().check_order(at_, number);
}

template <class H>
int Call<H>::resume(int operand) {
  const std::int64_t number = read_number(frame_.operands[operand]);
  if (number == kSeveral)
    throw Failure(
        "under vmap a request is for the whole batch, and here its elements have different ones: a cond or a "
        "while_loop "
        "has chosen among requests by a predicate that differs within the batch. Start and wait within the branch, or "
        "let the predicate be the same for the batch");
  if (number <= kNoRequest) return 0;
  if (const auto found = requests<H>().find(number)) found->call.check_order(number);
  pending_ = requests<H>().take(number, at_.keep != 0);
  recorder.waits_for(record_, pending_facts(), pending_->call.record_);
  return 0;
}

template <class H>
int Call<H>::resume_or_receive(int operand) {
  const std::int64_t number = read_number(frame_.operands[operand]);
  if (number != kNoRequest) return resume(operand);
  check_alive();
  return receive();
}

template <class H>
int Call<H>::wait(int operand) {
  const int code = frame_.data_operands > 0 ? resume_or_receive(operand) : resume(operand);
  if (code != 0) return code;
  for (int tests = 0; !arrived(); ++tests)
    if (tests % 64 == 63) std::this_thread::yield(), check_given_up();
  return failed();
}

template <class H>
void Call<H>::copy_result(Count most) {
  const Buffer &from = pending_->result(), &to = frame_.results[0];
  if (from.elements != to.elements)
    throw Failure("the request is for " + std::to_string(from.elements) + " elements and not for " +
                  std::to_string(to.elements) +
                  ": one that is started under vmap is for the whole batch, and is waited for under vmap, once");
  const Count elements = std::min(most, to.elements), bytes = bytes_of(to.code);
  if (elements > 0) std::memcpy(to.data, from.data, static_cast<std::size_t>(elements * bytes));
}

template <class H>
int Call<H>::collect(int code) {
  if (pending_ != nullptr && !pending_->call.differs().empty()) {
    const std::string differs = pending_->call.differs();
    requests<H>().release(pending_);
    throw Failure(differs);
  }
  if (code != 0 || frame_.n_results == 0) return code;
  const Buffer& to = frame_.results[0];
  if (pending_ != nullptr)
    copy_result(to.elements);
  else if (to.elements > 0)
    std::memset(to.data, 0, static_cast<std::size_t>(to.elements * bytes_of(to.code)));
  return 0;
}

template <class H>
int Call<H>::collect_message(int code) {
  if (code != 0) return code;
  if (pending_ == nullptr) return started() > 0 ? envelope(0, 0) : nothing_arrived(0);
  if (pending_->call.started() == 0) return nothing_arrived(0);
  std::memcpy(status()->bytes, pending_->call.status()->bytes, constants.status_bytes);
  if (pending_->cancelled && was_cancelled()) return nothing_arrived(0);
  Count came = 0;
  code = mpi.Get_elements_x(status(), type(), &came);
  if (code != 0) return code;
  // No more than came: the template may share its memory with the result.
  copy_result(came / datatype().per_element);
  return envelope(0, 0);
}

// Which of some requests are complete: 0 is not (or not asked for yet), 1 is now, 2 was told before, 3 was waited for.
template <class H>
int Call<H>::choose() {
  const Count n = frame_.operands[0].elements / 2;
  auto* told = static_cast<std::int32_t*>(frame_.results[0].data);
  std::vector<std::shared_ptr<Pending<H>>> open(static_cast<std::size_t>(n));
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(n));
  Count candidates = 0;
  for (Count i = 0; i < n; ++i) {
    numbers[i] = read_number(frame_.operands[0], i);
    auto found = numbers[i] > kNoRequest ? requests<H>().find(numbers[i]) : nullptr;
    told[i] = found == nullptr ? 3 : found->told ? 2 : 0;
    if (told[i] == 0) open[i] = std::move(found), ++candidates;
  }
  const Count need = std::min<Count>(at_.need, candidates);
  Count there = 0;
  for (int tests = 0;; ++tests) {
    there = 0;
    for (const auto& pending : open) there += pending != nullptr && pending->arrived();
    if (there >= need || at_.waits == 0) break;
    if (tests % 64 == 63) std::this_thread::yield(), check_given_up();
  }
  Count left = there >= need ? at_.most : 0;
  for (Count i = 0; i < n && left > 0; ++i)
    if (open[i] != nullptr && open[i]->arrived()) told[i] = 1, --left;
  return 0;
}

template <class H>
int Call<H>::cancel(int operand) {
  const std::int64_t number = read_number(frame_.operands[operand]);
  const auto pending = number > kNoRequest ? requests<H>().find(number) : nullptr;
  if (pending == nullptr) return 0;
  pending->cancelled = !pending->arrived() && pending->call.cancel_receive();
  return 0;
}

template <class H>
int Call<H>::release(int operand) {
  const std::int64_t number = read_number(frame_.operands[operand]);
  if (const auto found = number > kNoRequest ? requests<H>().find(number) : nullptr) {
    found->call.check_order(number);
    requests<H>().release(number);
  }
  return 0;
}

}  // namespace jaxcomm
