// One custom call in MPI's vocabulary: what a row of ops.inc is written in.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>

#include "abi.hpp"
#include "handles.hpp"
#include "large.hpp"
#include "recorder.hpp"
#include "watchdog.hpp"

namespace jaxcomm {

inline constexpr std::int64_t kTraced = std::numeric_limits<std::int64_t>::min();
inline constexpr int kMostBuffers = 16;
inline constexpr int kBytes = 6;  // XLA_FFI_DataType_U8

struct Buffer {
  void* data = nullptr;
  Count elements = 0;
  int code = 0;  // XLA_FFI_DataType
};

// Integers that somebody else owns.
struct List {
  const std::int64_t* data = nullptr;
  std::size_t size = 0;
};

struct Attributes {
#define ATTRIBUTE(name, absent) std::int64_t name = absent;
#include "attributes.inc"
#undef ATTRIBUTE
#define LIST(name) List name;
#include "attributes.inc"
#undef LIST
#define ATTRIBUTE(name, absent) bool has_##name = false;
#include "attributes.inc"
#undef ATTRIBUTE

  // False where there is no attribute of that name.
  bool set(std::string_view key, std::int64_t value) {
#define ATTRIBUTE(name, absent) \
  if (key == #name) {           \
    name = value;               \
    return has_##name = true;   \
  }
#include "attributes.inc"
#undef ATTRIBUTE
    return false;
  }
  bool set_list(std::string_view key, List value) {
#define LIST(name) \
  if (key == #name) return name = value, true;
#include "attributes.inc"
#undef LIST
    return false;
  }
};

// A buffer cut into one part after the other: how many elements each has, and where it begins.
struct Parts {
  Each counts, displs;
};

// Operands and results as XLA or the eager path hand them over, without the token.
struct Frame {
  const char* operation = "";
  int data_operands = 0;  // those before the traced scalars
  Buffer operands[kMostBuffers], results[kMostBuffers];
  int n_operands = 0, n_results = 0;
  Attributes attributes;
  Status* status = nullptr;  // the eager path's; a compiled program names one by index
};

// Replaces every traced attribute by the scalar operand that carries it.
inline void read_traced(Frame& frame) {
  int next = frame.data_operands;
  auto read = [&](std::int64_t& attribute) {
    if (attribute == kTraced) attribute = *static_cast<const std::int32_t*>(frame.operands[next++].data);
  };
#define ATTRIBUTE(name, absent) read(frame.attributes.name);
#include "attributes.inc"
#undef ATTRIBUTE
}

// Whether only the message that comes will tell from whom, or under which tag.
inline bool from_anyone(const Attributes& at) {
  return at.source == constants.any_source || at.recvtag == constants.any_tag;
}

// What the ranks must agree on in a collective.
struct Significance {
  bool collective = false, data = false, count = false, values = false, parts = false, edges = false;
};

inline constexpr std::int32_t kNoMessage = -2;  // that of a matched probe which found none

// How a send is done: MPI 4.1, 3.4. A ready send is a standard one that promises more. Nobody waits for a buffered one.
enum Mode : std::int64_t { kStandard = 0, kSynchronous = 1, kBuffered = 2 };

template <class Handle>
class Pending;
template <class Handle>
struct Agreement;
inline constexpr std::size_t kFacts = 7;  // by how many numbers ranks know whether they do the same: checks.hpp

template <class Handle>
class Call {
 public:
  using H = Handle;
  const Mpi<H>& mpi;

  Call(const Mpi<H>& mpi, const Frame& frame)
      : mpi(mpi), frame_(frame), at_(frame.attributes), comm_(communicators.at(at_.comm)) {}

  void check_alive() const {
    if (comm_.freed)
      throw Failure("the communicator " + comm_.name +
                    " was freed (Free, Disconnect or the end of a with block) and can carry no more messages; make a "
                    "new one and trace the "
                    "function again with it");
  }
  bool is_on(std::int64_t comm) const { return at_.comm == comm; }
  void check_order(std::int64_t number = std::numeric_limits<std::int64_t>::max()) const;
  // Whether the derivative of another message could be taken for that of this one.
  bool alike(const Attributes& other) const {
    const auto same = [](std::int64_t a, std::int64_t b, std::int64_t any) { return a == b || a == any || b == any; };
    if (at_.differentiated == 0 || at_.comm != other.comm || at_.shadow != other.shadow) return false;
    if (at_.has_dest && other.has_dest) return at_.dest == other.dest && at_.sendtag == other.sendtag;
    return at_.has_source && other.has_source && same(at_.source, other.source, constants.any_source) &&
           same(at_.recvtag, other.recvtag, constants.any_tag);
  }

  // Communicator, reduction, root, peers
  H comm() {
    if (at_.reverse != 0) return handle_as<H>(reversed());
    if (at_.fold != 0) return handle_as<H>(of_folds());
    return handle_as<H>(at_.shadow != 0 ? comm_.shadow : comm_.handle);
  }
  int peers() const { return comm_.peers; }
  // MPI 4.1, 6.2.3: of two groups, the root's knows it as MPI_ROOT.
  bool is_root() const { return comm_.two_groups ? root() == constants.root : comm_.rank == root(); }
  int root() const { return static_cast<int>(at_.root); }  // checked when the program was traced
  H op() const {
    const Reduction& reduction = reductions.at(at_.op);
    H handle, alive;
    std::memcpy(&handle, reduction.handle_at, sizeof handle);
    std::memcpy(&alive, reduction.alive_at != nullptr ? reduction.alive_at : reduction.handle_at, sizeof alive);
    if (alive == handle_as<H>(constants.op_null))
      throw Failure("the operation " + reduction.name + " was freed (MPI.Op.Free) and can be used no more");
    return handle;
  }
  // Throws what the operation of this call, or of the one that it waits for, has raised on this rank.
  void check_op() const;

  // Reductions in a fixed order, whatever the MPI library would do: the contributions of ranks 0 and 1, 2 and 3 ... are
  // combined, then those of these pairs, and so on; one that has no other waits for the next round.
  bool in_order() const { return at_.ordered != 0; }
  // Whether its nonblocking form does the same, and may be waited for: not so in a fixed order, and buffered.
  bool may_take_long() const { return !in_order() && !is_buffered(); }
  bool is_buffered() const { return at_.mode == kBuffered; }
  int allreduce_in_order() { return reduce_in_order(true); }
  int reduce_in_order() { return reduce_in_order(false); }
  int dest() const { return peer(at_.dest, "dest", false); }
  int source() const { return peer(at_.source, "source", true); }
  int sendtag() const { return sends() ? tag(at_.sendtag, "tag", false) : 0; }
  int recvtag() const { return tag(at_.recvtag, "recvtag", true); }
  bool sends() const { return at_.dest != constants.proc_null; }
  bool receives() const { return at_.source != constants.proc_null; }

  // Payload. `in(i)` and `out(i)` never are null: MPI libraries reject null and equal pointers even where nothing
  // moves.
  const void* in(int i = 0) const { return pointer(frame_.operands[i], 0); }
  void* out(int i = 0) const { return pointer(frame_.results[i], 1); }
  H type() const { return handle_as<H>(datatype().handle); }
  Elements n_in(int i = 0, Count parts = 1) const { return units(frame_.operands[i].elements / parts); }
  Elements n_out(int i = 0, Count parts = 1) const { return units(frame_.results[i].elements / parts); }
  // What a send sends: all of operand 0, or its first `count` elements (the adjoint of a message shorter than its
  // template).
  Elements n_sent() const {
    return at_.count < 0 ? n_in() : units(std::min<Count>(at_.count, frame_.operands[0].elements));
  }

  // The parts of a ragged operand or result. Off the root, where they are unknown, MPI does not look at them.
  const Parts& in_parts() {
    return cut(in_parts_, frame_.operands[0], at_.sendcounts.size > 0 ? at_.sendcounts : at_.counts);
  }
  const Parts& out_parts() {
    return cut(out_parts_, frame_.results[0], at_.recvcounts.size > 0 ? at_.recvcounts : at_.counts);
  }

  // Whether MPI is to know the parts by datatypes, as the library does not take large counts: a rank may not know how
  // many elements others have, and all must call the same function.
  bool by_types() const { return !mpi.Alltoallv.has_large(); }
  // Likewise for Allgatherv, all of whose ranks know all parts, unless they are two groups.
  bool gathers_by_types() {
    return by_types() && (comm_.two_groups || !fits(out_parts().counts) || !fits(out_parts().displs));
  }
  int exchange(const Parts& to, const Parts& from) {
    return with_types(typed_in_, typed_out_, to, from, mpi.Alltoallw, comm());
  }
  int start_exchange(const Parts& to, const Parts& from) {
    return with_types(typed_in_, typed_out_, to, from, mpi.Ialltoallw, comm(), request());
  }
  int exchange_with_neighbors(const Parts& to, const Parts& from) {
    return with_types(edges_in_, edges_out_, to, from, mpi.Neighbor_alltoallw, graph());
  }
  int start_exchange_with_neighbors(const Parts& to, const Parts& from) {
    return with_types(edges_in_, edges_out_, to, from, mpi.Ineighbor_alltoallw, graph(), request());
  }
  // The parts of Alltoallw for operations with a root, or with one part for all.
  const Parts& in_to_root() { return one_part(in_parts_, root(), n_in()); }
  const Parts& out_from_root() { return one_part(out_parts_, root(), n_out()); }
  const Parts& in_if_root() { return is_root() ? in_parts() : no_parts(in_parts_); }
  const Parts& out_if_root() { return is_root() ? out_parts() : no_parts(out_parts_); }
  const Parts& in_to_all() {
    in_parts_.counts.values.assign(static_cast<std::size_t>(peers()), n_in().value);
    in_parts_.displs.values.assign(static_cast<std::size_t>(peers()), 0);
    return in_parts_;
  }

  // A reduction whose result is scattered, where all of it has more elements than an int counts: libraries may count
  // them. Then it is a reduction to each rank.
  bool scatters_more() const { return !fits(Elements{frame_.operands[0].elements}); }
  const Parts& equal_parts() {
    in_parts();
    for (Count i = static_cast<Count>(in_parts_.counts.values.size()); i < peers(); ++i) {
      in_parts_.counts.values.push_back(n_out().value);
      in_parts_.displs.values.push_back(i * n_out().value);
    }
    return in_parts_;
  }
  template <class Reduce, class... Request>
  int reduce_to_each(const Parts& parts, const Reduce& reduce, Request... request) {
    if (comm_.two_groups) throw Failure("between two groups, so many elements cannot be reduced and scattered");
    const Count bytes = Types<H>::extent(type());
    int code = 0;
    for (int rank = 0; rank < peers() && code == 0; ++rank) {
      const auto i = static_cast<std::size_t>(rank);
      const void* from = static_cast<const char*>(in()) + parts.displs.values[i] * bytes;
      code = reduce(from, out(), Elements{parts.counts.values[i]}, type(), op(), rank, comm(), request...);
    }
    return code;
  }

  // Neighbours. The parts belong to the edges of the topology, and the graph has the live ones, maybe in another order.
  H graph() const { return handle_as<H>(at_.reverse != 0 ? comm_.reversed_graph : comm_.graph); }
  const Parts& to_edges() { return pick(to_edges_, in_parts(), out_edges()); }
  const Parts& from_edges() { return pick(from_edges_, out_parts(), in_edges()); }
  const Parts& all_to_edges() {
    to_edges_.counts.values.assign(out_edges().size(), n_in().value);
    to_edges_.displs.values.assign(out_edges().size(), 0);
    return to_edges_;
  }
  // Nothing comes over an edge from PROC_NULL: its part of the result becomes zero.
  int zero_missing(int code) {
    const Parts& parts = out_parts();
    const auto bytes = static_cast<std::size_t>(datatype().bytes / datatype().per_element);
    for (std::size_t i = 0; i < parts.counts.values.size(); ++i)
      if (std::find(in_edges().begin(), in_edges().end(), static_cast<int>(i)) == in_edges().end())
        std::memset(static_cast<char*>(out()) + static_cast<std::size_t>(parts.displs.values[i]) * bytes, 0,
                    static_cast<std::size_t>(parts.counts.values[i]) * bytes);
    return code;
  }

  // Where XLA gave operand and result one buffer, MPI reads and writes in place.
  const void* in_or_in_place() const {
    return frame_.operands[0].data == frame_.results[0].data ? constants.in_place : in();
  }
  // Result 0 becomes operand 0.
  int pass_on() {
    keep_rest(0, 0);
    return 0;
  }
  // Result 0, holding operand 0 to begin with.
  void* inout() const {
    keep_rest(0, 0);
    return out();
  }

  // What a broadcast is of: the result, which holds the operand on the root; or the operand, where there is no result.
  void* broadcast() const { return !has_result() ? const_cast<void*>(in()) : is_root() ? inout() : out(); }
  Elements n_broadcast() const { return has_result() ? n_out() : n_in(); }
  // How much the root scatters to each.
  Elements n_part() const { return is_root() ? n_in(0, peers()) : n_out(); }

  // The status that the user asked for, else a scratch one.
  Status* status() {
    if (frame_.status != nullptr) return frame_.status;
    return at_.status >= 0 ? statuses.at(at_.status) : &scratch_;
  }
  // Writes the template's elements where none arrived, and, if there is a result for it, what a receive learnt (source,
  // tag, number of elements or -1 for all of the template) to result 1. From PROC_NULL MPI reports that source, ANY_TAG
  // and no elements.
  int envelope(int code, int template_operand) {
    if (code != 0) return code;
    if (at_.message == kNoMessage) return nothing_arrived(template_operand);
    Count units_received = 0;
    code = mpi.Get_elements_x(status(), type(), &units_received);
    const Count received = units_received / datatype().per_element;
    // MPICH 5.0 now and then forgets to report it.
    if (code == 0 && received > frame_.results[0].elements) return constants.err_truncate;
    const bool whole = receives() && received == frame_.results[0].elements;
    if (!whole && received > 0 && at_.batch > 1)
      throw Failure("a message of " + std::to_string(received) + " elements is shorter than its template of " +
                    std::to_string(frame_.results[0].elements) +
                    ": under vmap the two must have the same size, because one message carries the whole batch");
    if (!whole && received > std::numeric_limits<std::int32_t>::max())
      throw Failure("a message of more than 2^31 - 1 elements that is shorter than its template is not supported");
    check_message();
    if (!whole) keep_rest(template_operand, received);
    if (frame_.n_results < 2) return code;
    auto* into = static_cast<std::int32_t*>(frame_.results[1].data);
    into[0] = status_field(constants.status_source_at);
    into[1] = status_field(constants.status_tag_at);
    into[2] = whole ? -1 : static_cast<std::int32_t>(received);
    return code;
  }

  int send();
  int start_send() {
    if (!sends()) return 0;
    announce();
    const auto start = at_.mode == kSynchronous ? mpi.Issend : mpi.Isend;
    return start(in(), n_sent(), type(), dest(), sendtag(), comm(), request());
  }
  int receive_now() {
    if (at_.message == kNoMessage) return 0;
    if (at_.message < 0) return mpi.Recv(out(), n_out(), type(), source(), recvtag(), comm(), status());
    H message = messages.take<H>(at_.message);
    return mpi.Mrecv(out(), n_out(), type(), &message, status());
  }

  // Messages in two steps. The receive is the first request.
  int receive() {
    if (at_.message == kNoMessage) return 0;
    if (at_.message < 0) return mpi.Irecv(out(), n_out(), type(), source(), recvtag(), comm(), request());
    H message = messages.take<H>(at_.message);
    return mpi.Imrecv(out(), n_out(), type(), &message, request());
  }
  int receive_and_send() {
    const int to = dest(), tag = sendtag();  // these may fail, which they must not with a receive under way
    announce();
    int code = receive();
    if (code != 0) return code;
    code = mpi.Isend(in(), n_sent(), type(), to, tag, comm(), request());
    if (code == 0) return code;
    started_.handles.resize(1), started_.ended.resize(1);
    mpi.Cancel(&started_.handles[0]);
    while (!test()) {
    }
    return code;
  }
  int send_and_receive() {
    announce();
    return mpi.Sendrecv(in(), n_sent(), type(), dest(), sendtag(), out(), n_out(), type(), source(), recvtag(), comm(),
                        status());
  }
  // What a probe found, to result 0: source, tag, number of bytes, whether there is a message, its number if it is
  // matched.
  int probe() {
    int flag = 1;
    H message{};
    int code = 0;
    do {
      code = at_.matched != 0 ? match(flag, message) : look(flag);
      if (flag == 0 && at_.waits != 0) check_given_up();
    } while (code == 0 && flag == 0 && at_.waits != 0);
    if (code != 0) return code;
    Count bytes = 0;
    if (flag != 0) mpi.Get_elements_x(status(), handle_as<H>(datatype_of(kByte)->handle), &bytes);
    if (bytes > std::numeric_limits<std::int32_t>::max())
      throw Failure("a message of more than 2^31 - 1 bytes cannot be probed for in 32 bits");
    auto* into = static_cast<std::int32_t*>(frame_.results[0].data);
    into[0] = flag != 0 ? status_field(constants.status_source_at) : static_cast<std::int32_t>(at_.source);
    into[1] = flag != 0 ? status_field(constants.status_tag_at) : static_cast<std::int32_t>(at_.recvtag);
    into[2] = static_cast<std::int32_t>(bytes);
    into[3] = flag;
    into[4] =
        flag != 0 && at_.matched != 0 ? static_cast<std::int32_t>(messages.add(handle_bits(message))) : kNoMessage;
    return code;
  }

  // Requests: requests.hpp. Those that continue one take what it is to be called in `text`.
  bool cancel_receive() { return at_.has_source && started() > 0 && mpi.Cancel(&started_.handles[0]) == 0; }
  bool was_cancelled() {
    int flag = 0;
    mpi.Test_cancelled(status(), &flag);
    return flag != 0;
  }
  H* request() { return started_.next(); }
  Started<H>* each_request() { return &started_; }  // one for each part of a reduction
  std::size_t started() const { return started_.handles.size(); }
  template <class Op>
  int start_later();
  template <class F>
  int give_up_or_end(F start, int template_operand);
  void check_given_up();
  int resume(int operand);
  int resume_or_receive(int operand);
  int wait(int operand);
  int collect(int code);
  int collect_message(int code);
  int choose();
  int cancel(int operand);
  int release(int operand);

  // Whether all that was started has ended; then `failed` is MPI's first error code, or 0.
  bool arrived();
  bool test() {
    bool all = true;
    for (std::size_t i = 0; i < started(); ++i) {
      if (started_.ended[i]) continue;
      int flag = 0;
      const int code = mpi.Test(&started_.handles[i], &flag, i == 0 ? status() : &of_send_);
      if (failed_ == 0) failed_ = code;
      started_.ended[i] = flag != 0 || code != 0;
      all = all && started_.ended[i];
    }
    return all;
  }
  int failed() const;
  // Goes on with what another Call has started.
  void take_over(const Call& other) {
    started_ = other.started_, failed_ = other.failed_, scratch_ = other.scratch_;
    pending_ = other.pending_, record_ = other.record_;
  }

  Facts facts() const;
  std::string describe() const;

  // The recorder knows of the call from `record` to `recorded`.
  void record() {
    record_ = recorder.begin(facts());
    if (at_.unlinked != 0) remember_unlinked();
  }
  void recorded(bool failed) const { recorder.end(record_, failed); }

  // Checking mode: throws on every rank if the ranks are not about to do the same. checks.hpp
  void check_agreement(const Significance& what);
  void check_parts(bool edges);
  void check_operation();
  int tell_later();
  bool told();
  std::string differs() const;
  // Likewise: tells the receiver of a message what it is; throws if what has come was not meant to come so; says whose
  // message a receive has failed on. notes.hpp
  void announce();
  void check_message();
  std::string sender_of_failed();
  Facts pending_facts() const;

 private:
  static constexpr int kByte = kBytes;
  auto teller();
  std::array<std::int64_t, kFacts> fingerprint(const Significance& what) const;
  void remember_unlinked();
  std::int64_t channel() const;  // which of its communicators a message is on
  int look(int& flag) {
    if (at_.waits != 0 && !interruptible) return mpi.Probe(source(), recvtag(), comm(), status());
    return mpi.Iprobe(source(), recvtag(), comm(), &flag, status());
  }
  int match(int& flag, H& message) {
    if (at_.waits != 0 && !interruptible) return mpi.Mprobe(source(), recvtag(), comm(), &message, status());
    return mpi.Improbe(source(), recvtag(), comm(), &flag, &message, status());
  }
  void copy_result(Count most);
  bool has_result() const { return frame_.n_results > 0 && frame_.results[0].elements > 0; }
  int nothing_arrived(int template_operand) {
    keep_rest(template_operand, 0);
    if (frame_.n_results < 2) return 0;
    auto* into = static_cast<std::int32_t*>(frame_.results[1].data);
    into[0] = constants.proc_null, into[1] = constants.any_tag, into[2] = 0;
    return 0;
  }
  // A long array is cut into a part for each rank to combine, which takes the memory of two arrays. A short one is
  // gathered, and combined by whoever needs the result. The bits are the same.
  int reduce_in_order(bool by_all) {
    const Count n = frame_.operands[0].elements;
    if (n * datatype().bytes <= kShort) return combine_everything(by_all);
    const Count mine = share(n, comm_.rank);
    Each counts, displs, of_mine, places;
    for (int rank = 0, each = comm_.size; rank < each; ++rank) {
      displs.values.push_back(rank > 0 ? displs.values.back() + counts.values.back() : 0);
      counts.values.push_back(units(share(n, rank)).value);
      of_mine.values.push_back(units(mine).value);
      places.values.push_back(units(rank * mine).value);
    }
    std::vector<char> all(static_cast<std::size_t>(comm_.size * mine * datatype().bytes));
    const Parts everyones{counts, displs}, from_all{of_mine, places};
    const bool typed = by_types() && !fits(Elements{n});  // all ranks have as many
    int code = typed ? exchange(in(), everyones, memory(all), from_all)
                     : mpi.Alltoallv(in(), counts, displs, type(), memory(all), of_mine, places, type(), comm());
    if (code != 0) return code;
    const void* combined = memory(all);
    if ((code = combine(all, mine, combined)) != 0) return code;
    if (typed) {
      Parts to = from_all, from = everyones;
      for (std::size_t rank = 0; rank < to.counts.values.size(); ++rank) {
        to.displs.values[rank] = 0;
        if (!by_all && static_cast<int>(rank) != root()) to.counts.values[rank] = 0;
      }
      return exchange(combined, to, out(), by_all || is_root() ? from : no_parts(from));
    }
    if (by_all) return mpi.Allgatherv(combined, units(mine), type(), out(), counts, displs, type(), comm());
    return mpi.Gatherv(combined, units(mine), type(), out(), counts, displs, type(), root(), comm());
  }
  int combine_everything(bool by_all) {
    const Count n = frame_.operands[0].elements;
    const std::size_t bytes = static_cast<std::size_t>(n * datatype().bytes);
    std::vector<char> all(by_all || is_root() ? bytes * static_cast<std::size_t>(comm_.size) : 0);
    int code = by_all ? mpi.Allgather(in(), n_in(), type(), memory(all), n_in(), type(), comm())
                      : mpi.Gather(in(), n_in(), type(), memory(all), n_in(), type(), root(), comm());
    if (code != 0 || bytes == 0 || all.empty()) return code;
    const void* combined = memory(all);
    code = combine(all, n, combined);
    std::memcpy(out(), combined, bytes);
    return code;
  }
  // What rank 0, 1 ... brought, n elements each, becomes one.
  int combine(std::vector<char>& all, Count n, const void*& combined) {
    std::vector<char*> at;
    for (std::int64_t rank = 0; rank < comm_.size; ++rank) at.push_back(memory(all) + rank * n * datatype().bytes);
    for (std::size_t step = 1; n > 0 && step < at.size(); step *= 2)
      for (std::size_t i = 0; i + step < at.size(); i += 2 * step) {
        const int code = mpi.Reduce_local(at[i], at[i + step], units(n), type(), op());
        if (code != 0) return code;
        at[i] = at[i + step];
      }
    combined = at[0];
    return 0;
  }
  Count share(Count n, int rank) const { return n / comm_.size + (rank < n % comm_.size ? 1 : 0); }
  static char* memory(std::vector<char>& bytes) {
    static char none;
    return bytes.empty() ? &none : bytes.data();
  }
  static constexpr Count kShort = 1 << 12;  // bytes
  const std::vector<int>& in_edges() const { return at_.reverse != 0 ? comm_.out_edges : comm_.in_edges; }
  const std::vector<int>& out_edges() const { return at_.reverse != 0 ? comm_.in_edges : comm_.out_edges; }
  static const Parts& pick(Parts& picked, const Parts& parts, const std::vector<int>& edges) {
    if (!picked.counts.values.empty()) return picked;
    for (const int edge : edges) {
      picked.counts.values.push_back(parts.counts.values[static_cast<std::size_t>(edge)]);
      picked.displs.values.push_back(parts.displs.values[static_cast<std::size_t>(edge)]);
    }
    return picked;
  }
  // `rows` says how many rows of the buffer's axis 0 each part has.
  const Parts& cut(Parts& parts, const Buffer& buffer, List rows) const {
    if (!parts.counts.values.empty()) return parts;
    const Count all = std::accumulate(rows.data, rows.data + rows.size, Count{0});
    const Count row = all > 0 ? units(buffer.elements / all).value : 0;
    Count next = 0;
    for (std::size_t i = 0; i < rows.size; ++i) {
      parts.counts.values.push_back(rows.data[i] * row);
      parts.displs.values.push_back(next);
      next += parts.counts.values.back();
    }
    return parts;
  }
  static const Parts& no_parts(Parts& parts, std::size_t n) {
    parts.counts.values.assign(n, 0);
    parts.displs.values.assign(n, 0);
    return parts;
  }
  const Parts& no_parts(Parts& parts) const { return no_parts(parts, static_cast<std::size_t>(peers())); }
  // Between two groups, the root's has MPI_ROOT or MPI_PROC_NULL here, and nothing of this kind.
  const Parts& one_part(Parts& parts, int rank, Elements n) const {
    no_parts(parts);
    if (rank >= 0) parts.counts.values[static_cast<std::size_t>(rank)] = n.value;
    return parts;
  }
  template <class Place>
  void type_parts(TypedParts<H, Place>& typed, const Parts& parts) {
    const Count bytes = Types<H>::extent(type());
    for (std::size_t i = 0; i < parts.counts.values.size(); ++i)
      typed.add(types_, parts.counts.values[i], parts.displs.values[i], type(), bytes);
  }
  int exchange(const void* there, const Parts& to, void* here, const Parts& from) {
    TypedParts<H, int> typed_to, typed_from;
    type_parts(typed_to, to), type_parts(typed_from, from);
    return mpi.Alltoallw(there, data(typed_to.counts), data(typed_to.places), data(typed_to.types), here,
                         data(typed_from.counts), data(typed_from.places), data(typed_from.types), comm());
  }
  template <class Place, class Function, class... Rest>
  int with_types(TypedParts<H, Place>& there, TypedParts<H, Place>& here, const Parts& to, const Parts& from,
                 const Function& function, Rest... rest) {
    type_parts(there, to), type_parts(here, from);
    return function(in(), data(there.counts), data(there.places), data(there.types), out(), data(here.counts),
                    data(here.places), data(here.types), rest...);
  }
  void keep_rest(int operand, Count received) const {
    const Buffer &from = frame_.operands[operand], &to = frame_.results[0];
    const auto bytes = static_cast<std::size_t>(datatype().bytes), done = static_cast<std::size_t>(received) * bytes;
    if (from.data != to.data && from.elements > received)
      std::memcpy(static_cast<char*>(to.data) + done, static_cast<const char*>(from.data) + done,
                  static_cast<std::size_t>(from.elements) * bytes - done);
  }
  static void* pointer(const Buffer& buffer, int side) {
    static std::int64_t nowhere[2][2];
    return buffer.data != nullptr && buffer.elements > 0 ? buffer.data : nowhere[side];
  }
  const Buffer& payload() const { return frame_.data_operands > 0 ? frame_.operands[0] : frame_.results[0]; }
  const Datatype& datatype() const {
    const int code = payload().code;
    const Datatype* type = datatype_of(code);
    if (type == nullptr) throw Failure("element type " + std::to_string(code) + " of XLA has no MPI datatype");
    return *type;
  }
  Elements units(Count elements) const { return {elements * datatype().per_element}; }

  // Static peers were checked when the program was traced; traced ones are checked here, in the same words.
  int peer(std::int64_t value, const char* what, bool any) const {
    const bool special = value == constants.proc_null || (any && value == constants.any_source);
    if (!special && (value < 0 || value >= comm_.peers))
      throw Failure(std::string(what) + " must be a rank below the communicator's size " + std::to_string(comm_.peers) +
                    (any ? ", ANY_SOURCE or PROC_NULL" : " or PROC_NULL") + ", got " + number_text(value));
    return static_cast<int>(value);
  }
  int tag(std::int64_t value, const char* what, bool any) const {
    if (!(any && value == constants.any_tag) && (value < 0 || value > constants.tag_ub))
      throw Failure(std::string(what) + " must lie between 0 and " + std::to_string(constants.tag_ub) +
                    " (MPI.TAG_UB), got " + number_text(value));
    return static_cast<int>(value);
  }
  // The Python side puts the lowest 32-bit number in the place of one that 32 bits cannot hold.
  static std::string number_text(std::int64_t value) {
    return value == std::numeric_limits<std::int32_t>::min() ? "a number beyond 32 bits" : std::to_string(value);
  }
  int status_field(std::size_t at) {
    int value;
    std::memcpy(&value, status()->bytes + at, sizeof value);
    return value;
  }

  std::uint64_t of_checks() { return made(comm_.checks, comm_.has_checks, comm_.rank); }
  std::uint64_t reversed() { return made(comm_.reversed, comm_.has_reversed, comm_.size - comm_.rank); }
  std::uint64_t of_folds() { return made(comm_.folds, comm_.has_folds, comm_.rank); }
  // A communicator of the same ranks in another order, made when all of them first need it.
  std::uint64_t made(std::uint64_t& handle, bool& there, int key) {
    if (!there) {
      H split;
      if (mpi.Comm_split(handle_as<H>(comm_.handle), 0, key, &split) != 0)
        throw Failure("a communicator of the same ranks could not be made");
      handle = handle_bits(split);
      there = true;
    }
    return handle;
  }

  const Frame& frame_;
  const Attributes& at_;
  Communicator& comm_;
  Status scratch_, of_send_;
  Parts in_parts_, out_parts_, to_edges_, from_edges_;
  Started<H> started_;
  Types<H> types_;
  TypedParts<H, int> typed_in_, typed_out_;
  TypedParts<H, Count> edges_in_, edges_out_;
  int failed_ = 0;
  std::int64_t record_ = 0;
  std::shared_ptr<Agreement<H>> agreement_;
  std::shared_ptr<Pending<H>> pending_;  // the request that this call waits for
};

template <class H>
Facts Call<H>::facts() const {
  const Buffer& data = payload();
  Facts facts;
  facts.operation = frame_.operation, facts.comm = at_.comm, facts.elements = data.elements, facts.code = data.code;
  // What these give are no data of the user's.
  const std::string_view name(frame_.operation);
  if (name == "probe" || name == "choose") facts.code = 0, facts.elements = 0;
  if (name == "choose") facts.operation = at_.waits != 0 ? "Waitany or Waitsome" : "Test";
  if (at_.has_op) facts.op = at_.op;
  if (at_.has_root) facts.root = at_.root;
  if (at_.has_dest) facts.dest = at_.dest, facts.sendtag = at_.sendtag;
  if (at_.has_source) facts.source = at_.source, facts.recvtag = at_.recvtag;
  facts.apart = at_.fold != 0 ? 2 : at_.shadow != 0 ? 1 : 0;
  facts.site = at_.site, facts.says = at_.says, facts.unlinked = at_.unlinked != 0;
  return facts;
}

template <class H>
std::string Call<H>::describe() const {
  return pending_ != nullptr ? waited_text(pending_facts(), at_.site) : jaxcomm::describe(facts());
}

}  // namespace jaxcomm
