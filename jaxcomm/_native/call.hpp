// One custom call in MPI's vocabulary: what a row of ops.inc is written in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

#include "abi.hpp"
#include "handles.hpp"

namespace jaxcomm {

inline constexpr std::int64_t kTraced = std::numeric_limits<std::int64_t>::min();
inline constexpr int kMostBuffers = 16;

struct Buffer {
  void* data = nullptr;
  Count elements = 0;
  int code = 0;  // XLA_FFI_DataType
};

struct Attributes {
#define ATTRIBUTE(name, absent) std::int64_t name = absent;
#include "attributes.inc"
#undef ATTRIBUTE
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
                    " was freed (Free or the end of a with block) and can carry no more messages; make a new one and "
                    "trace the function again with it");
  }

  // Communicator, reduction, root, peers
  H comm() {
    if (at_.reverse != 0) return handle_as<H>(reversed());
    return handle_as<H>(at_.shadow != 0 ? comm_.shadow : comm_.handle);
  }
  int size() const { return comm_.size; }
  bool is_root() const { return comm_.rank == root(); }
  int root() const { return static_cast<int>(at_.root); }  // checked when the program was traced
  H op() const {
    const Reduction& reduction = reductions.at(at_.op);
    H handle;
    std::memcpy(&handle, reduction.handle_at, sizeof handle);
    if (handle == handle_as<H>(constants.op_null))
      throw Failure("the operation " + reduction.name + " was freed (MPI.Op.Free) and can be used no more");
    return handle;
  }
  int dest() const { return peer(at_.dest, "dest", false); }
  int source() const { return peer(at_.source, "source", true); }
  int sendtag() const { return sends() ? tag(at_.sendtag, "tag", false) : 0; }
  int recvtag() const { return tag(at_.recvtag, "recvtag", true); }
  bool synchronous() const { return at_.synchronous != 0; }
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

  // Where XLA gave operand and result one buffer, MPI reads and writes in place.
  const void* in_or_in_place() const {
    return frame_.operands[0].data == frame_.results[0].data ? constants.in_place : in();
  }
  // Result 0, holding operand 0 to begin with.
  void* inout() const {
    keep_rest(0, 0);
    return out();
  }

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
    Count units_received = 0;
    code = mpi.Get_elements_x(status(), type(), &units_received);
    const Count received = units_received / datatype().per_element;
    const bool whole = receives() && received == frame_.results[0].elements;
    if (!whole && received > 0 && at_.batch > 1)
      throw Failure("a message of " + std::to_string(received) + " elements is shorter than its template of " +
                    std::to_string(frame_.results[0].elements) +
                    ": under vmap the two must have the same size, because one message carries the whole batch");
    if (!whole && received > std::numeric_limits<std::int32_t>::max())
      throw Failure("a message of more than 2^31 - 1 elements that is shorter than its template is not supported");
    if (!whole) keep_rest(template_operand, received);
    if (frame_.n_results < 2) return code;
    auto* into = static_cast<std::int32_t*>(frame_.results[1].data);
    into[0] = status_field(constants.status_source_at);
    into[1] = status_field(constants.status_tag_at);
    into[2] = whole ? -1 : static_cast<std::int32_t>(received);
    return code;
  }

  // Messages in two steps. The receive is the first request.
  int receive() { return mpi.Irecv(out(), n_out(), type(), source(), recvtag(), comm(), next_request()); }
  int receive_and_send() {
    const int to = dest(), tag = sendtag();  // these may fail, which they must not with a receive under way
    int code = receive();
    if (code != 0) return code;
    code = mpi.Isend(in(), n_sent(), type(), to, tag, comm(), next_request());
    if (code == 0) return code;
    n_requests_ = 1;
    mpi.Cancel(&requests_[0]);
    while (!arrived()) {
    }
    return code;
  }
  // Whether all that was started has ended; then `failed` is MPI's first error code, or 0.
  bool arrived() {
    for (int i = 0; i < n_requests_; ++i) {
      if (ended_[i]) continue;
      int flag = 0;
      const int code = mpi.Test(&requests_[i], &flag, i == 0 ? status() : &of_send_);
      if (failed_ == 0) failed_ = code;
      ended_[i] = flag != 0 || code != 0;
    }
    return ended_[0] && (n_requests_ < 2 || ended_[1]);
  }
  int failed() const { return failed_; }
  // Goes on with what another Call has started.
  void take_over(const Call& other) {
    std::copy(other.requests_, other.requests_ + 2, requests_);
    std::copy(other.ended_, other.ended_ + 2, ended_);
    n_requests_ = other.n_requests_, failed_ = other.failed_, scratch_ = other.scratch_;
  }

  std::string describe() const;

 private:
  H* next_request() { return &requests_[n_requests_++]; }
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
    const std::int64_t row = code >= 0 && code < 64 ? datatype_of_code[code] : -1;
    if (row < 0) throw Failure("element type " + std::to_string(code) + " of XLA has no MPI datatype");
    return datatypes.at(row);
  }
  Elements units(Count elements) const { return {elements * datatype().per_element}; }

  // Static peers were checked when the program was traced; traced ones are checked here, in the same words.
  int peer(std::int64_t value, const char* what, bool any) const {
    const bool special = value == constants.proc_null || (any && value == constants.any_source);
    if (!special && (value < 0 || value >= comm_.size))
      throw Failure(std::string(what) + " must be a rank below the communicator's size " + std::to_string(comm_.size) +
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
  static std::string rank_text(std::int64_t rank) {
    if (rank == constants.proc_null) return "PROC_NULL";
    return rank == constants.any_source ? "ANY_SOURCE" : "rank " + std::to_string(rank);
  }
  static std::string tag_text(std::int64_t tag) { return tag == constants.any_tag ? "ANY_TAG" : std::to_string(tag); }
  int status_field(std::size_t at) {
    int value;
    std::memcpy(&value, status()->bytes + at, sizeof value);
    return value;
  }

  std::uint64_t reversed() {
    if (!comm_.has_reversed) {
      H made;
      if (mpi.Comm_split(handle_as<H>(comm_.handle), 0, comm_.size - comm_.rank, &made) != 0)
        throw Failure("the communicator in reverse order could not be made");
      comm_.reversed = handle_bits(made);
      comm_.has_reversed = true;
    }
    return comm_.reversed;
  }

  const Frame& frame_;
  const Attributes& at_;
  Communicator& comm_;
  Status scratch_, of_send_;
  H requests_[2] = {};
  bool ended_[2] = {};
  int n_requests_ = 0, failed_ = 0;
};

// "recv on WORLD, rank 1 of 3, 8 x float32 (32 bytes), from rank 0 tag 7, at ring.py:12 (step)"
template <class H>
std::string Call<H>::describe() const {
  const Buffer& data = payload();
  std::string text = std::string(frame_.operation) + " on " + comm_.name + ", rank " + std::to_string(comm_.rank) +
                     " of " + std::to_string(comm_.size);
  if (data.code != 0) {
    const Datatype& type = datatype();
    text += ", " + std::to_string(data.elements) + " x " + type.name + " (" +
            std::to_string(data.elements * type.bytes) + " bytes)";
  }
  if (at_.has_op) text += ", op " + reductions.at(at_.op).name;
  if (at_.has_root) text += ", root " + std::to_string(at_.root);
  if (at_.has_dest) text += ", to " + rank_text(at_.dest) + " tag " + std::to_string(at_.sendtag);
  if (at_.has_source) text += ", from " + rank_text(at_.source) + " tag " + tag_text(at_.recvtag);
  if (const std::string site = sites.at(at_.site); !site.empty()) text += ", at " + site;
  if (at_.unlinked != 0) text += ", whose operands do not depend on what is differentiated";
  return text;
}

}  // namespace jaxcomm
