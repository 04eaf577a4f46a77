// Expands ops.inc into XLA FFI handlers and eager calls; MPI errors become ffi errors, never an abort.
#include <pthread.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <thread>

#include "native.hpp"
#include "xla/ffi/api/c_api.h"

namespace jaxcomm {
namespace {

Mpi<int>& int_mpi = loaded<int>;
Mpi<void*>& pointer_mpi = loaded<void*>;
bool debug = false;

template <class H>
const Mpi<H>& mpi() {
  if constexpr (std::is_pointer_v<H>)
    return pointer_mpi;
  else
    return int_mpi;
}

// One struct per row of ops.inc.
#define OP(row, operands, call)                    \
  struct row##_op {                                \
    static constexpr const char* name = #row;      \
    static constexpr int data_operands = operands; \
    template <class H>                             \
    static int run([[maybe_unused]] Call<H>& c) {  \
      return call;                                 \
    }                                              \
  };
#define PATIENT(row, start, finish)
#define LATER(row, start)
#include "ops.inc"
#undef OP
#undef PATIENT
#undef LATER

// One for each nonblocking form, which hands over to a request.
#define OP(row, operands, call)
#define PATIENT(row, start, finish)
#define LATER(row, start)                                         \
  struct start_##row##_op {                                       \
    static constexpr const char* name = "i" #row;                 \
    static constexpr int data_operands = row##_op::data_operands; \
    template <class H>                                            \
    static int begin([[maybe_unused]] Call<H>& c) {               \
      return start;                                               \
    }                                                             \
    template <class H>                                            \
    static int run(Call<H>& c) {                                  \
      return c.template start_later<start_##row##_op>();          \
    }                                                             \
  };
#include "ops.inc"
#undef OP
#undef PATIENT
#undef LATER

// One more for each that works in two steps.
template <class Op>
struct Steps {
  static constexpr bool two = false;
};
#define OP(row, operands, call)
#define PATIENT(row, first, second)                 \
  template <>                                       \
  struct Steps<row##_op> {                          \
    static constexpr bool two = true;               \
    template <class H>                              \
    static int start(Call<H>& c) {                  \
      return first;                                 \
    }                                               \
    template <class H>                              \
    static int finish(Call<H>& c) {                 \
      return c.failed() != 0 ? c.failed() : second; \
    }                                               \
  };
#define LATER(row, start)
#include "ops.inc"
#undef OP
#undef PATIENT
#undef LATER

// The nonblocking form of an operation, if there is one.
template <class Op>
struct Nonblocking {
  using type = void;
};
#define OP(row, operands, call)
#define PATIENT(row, first, second)
#define LATER(row, start)          \
  template <>                      \
  struct Nonblocking<row##_op> {   \
    using type = start_##row##_op; \
  };
#include "ops.inc"
#undef OP
#undef PATIENT
#undef LATER

template <class Op, class = void>
inline constexpr bool is_start = false;
template <class Op>
inline constexpr bool is_start<Op, std::void_t<decltype(&Op::template begin<int>)>> = true;

// What requests end by: also on a communicator that was freed meanwhile.
template <class Op>
inline constexpr bool ends_requests =
    std::is_same_v<Op, wait_op> || std::is_same_v<Op, wait_recv_op> || std::is_same_v<Op, choose_op> ||
    std::is_same_v<Op, cancel_op> || std::is_same_v<Op, release_op>;

using Clock = std::chrono::steady_clock;

// One write a line, so that the lines of several ranks do not run into each other.
void log(const std::string& what, const char* how, double microseconds) {
  char time[32] = "";
  if (microseconds >= 0) std::snprintf(time, sizeof time, " in %.1f us", microseconds);
  const std::string line = "jaxcomm: " + what + ": " + how + time + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

template <class H>
std::string error_string(int code) {
  char text[1024] = {};
  int length = 0;
  mpi<H>().Error_string(code, text, &length);
  return std::string(text, static_cast<std::size_t>(length));
}

template <class H>
Outcome recorded(const Call<H>& call, Outcome outcome) {
  call.recorded(outcome.code != 0);
  return outcome;
}

// Runs something; whatever goes wrong is told with operation, communicator, rank and peers.
template <class H, class F>
Outcome attempt(Call<H>& call, F run) {
  try {
    const int code = run();
    if (code == 0) return {};
    return {code, call.describe() + ": " + error_string<H>(code) + call.sender_of_failed()};
  } catch (const Failure& failure) {
    return {failure.code, call.describe() + ": " + failure.what()};
  }
}

// Runs an operation so that it can be given up, if that is wanted and possible: its nonblocking form, which owns its
// data, is left to end when it may.
template <class Op, class H>
int run_or_give_up(Call<H>& call) {
  using Start = typename Nonblocking<Op>::type;
  if constexpr (!std::is_void_v<Start>) {
    if (interruptible.load(std::memory_order_relaxed) && call.may_take_long())
      return call.give_up_or_end([](Call<H>& each) { return Start::begin(each); }, 0);
  } else if constexpr (std::is_same_v<Op, sendrecv_op>) {
    if (interruptible.load(std::memory_order_relaxed))
      return call.give_up_or_end([](Call<H>& each) { return each.receive_and_send(); }, 1);
  }
  return Op::template run<H>(call);
}

template <class Op, class H>
Outcome run_call(Call<H>& call) {
  call.record();
  return recorded(call, attempt(call, [&call] {
                    if constexpr (!ends_requests<Op>) call.check_alive();
                    if constexpr (!is_start<Op>) call.check_order();
                    const std::string what = debug ? call.describe() : "";
                    if (debug) log(what, "begins", -1);
                    if (checking.load(std::memory_order_relaxed)) call.check_agreement(significance(Op::name));
                    const auto start = Clock::now();
                    const int code = run_or_give_up<Op>(call);
                    if constexpr (!is_start<Op>) call.check_op();
                    if (debug)
                      log(what, "done", std::chrono::duration<double, std::micro>(Clock::now() - start).count());
                    return code;
                  }));
}

// Makes the Call of a frame, for the kind of handle that the MPI library has, and runs something with it.
template <class Op, class H, class F>
Outcome with_handles(Frame& frame, F run) {
  try {
    read_traced(frame);
    Call<H> call(mpi<H>(), frame);
    return run(call);
  } catch (const std::exception& error) {
    return {Failure::kNotFromMpi, std::string(Op::name) + ": " + error.what()};
  }
}

template <class Op, class F>
Outcome with_call(Frame& frame, F run) {
  // Before anything that takes a lock, which a thread that is gone may hold.
  if (forked.load(std::memory_order_relaxed)) return {Failure::kNotFromMpi, std::string(Op::name) + ": " + kForked};
  frame.operation = Op::name;
  frame.data_operands = Op::data_operands;
  return handles_are_pointers ? with_handles<Op, void*>(frame, run) : with_handles<Op, int>(frame, run);
}

template <class Op>
Outcome run(Frame& frame) {
  return with_call<Op>(frame, [](auto& call) { return run_call<Op>(call); });
}

template <class Op>
Outcome run_leaves(Tree& tree) {
  try {
    return run_tree(tree, Op::data_operands, [](Frame& frame) { return run<Op>(frame); });
  } catch (const std::exception& error) {
    return {Failure::kNotFromMpi, std::string(Op::name) + ": " + error.what()};
  }
}

// XLA's side

int append(Buffer* into, const XLA_FFI_Buffer& buffer) {
  if (buffer.dtype == XLA_FFI_DataType_TOKEN) return 0;
  Count elements = 1;
  for (std::int64_t i = 0; i < buffer.rank; ++i) elements *= buffer.dims[i];
  *into = {buffer.data, elements, static_cast<int>(buffer.dtype)};
  return 1;
}

bool set_attribute(Attributes& attributes, std::string_view name, XLA_FFI_AttrType type, const void* value) {
  if (type == XLA_FFI_AttrType_SCALAR) {
    const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(value);
    return scalar.dtype == XLA_FFI_DataType_S64 &&
           attributes.set(name, *static_cast<const std::int64_t*>(scalar.value));
  }
  if (type != XLA_FFI_AttrType_ARRAY) return false;
  const auto& list = *static_cast<const XLA_FFI_Array*>(value);
  return list.dtype == XLA_FFI_DataType_S64 &&
         attributes.set_list(name, {static_cast<const std::int64_t*>(list.data), list.size});
}

Outcome read_attributes(const XLA_FFI_CallFrame& call, Attributes& attributes) {
  for (std::int64_t i = 0; i < call.attrs.size; ++i) {
    const std::string_view name(call.attrs.names[i]->ptr, call.attrs.names[i]->len);
    if (!set_attribute(attributes, name, call.attrs.types[i], call.attrs.attrs[i]))
      return {Failure::kNotFromMpi, "unknown attribute " + std::string(name)};
  }
  return {};
}

Outcome read(const XLA_FFI_CallFrame& call, Frame& frame) {
  if (call.args.size > kMostBuffers || call.rets.size > kMostBuffers)
    return {Failure::kNotFromMpi, "too many operands or results"};
  for (std::int64_t i = 0; i < call.args.size; ++i)
    frame.n_operands +=
        append(frame.operands + frame.n_operands, *static_cast<const XLA_FFI_Buffer*>(call.args.args[i]));
  for (std::int64_t i = 0; i < call.rets.size; ++i)
    frame.n_results += append(frame.results + frame.n_results, *static_cast<const XLA_FFI_Buffer*>(call.rets.rets[i]));
  return read_attributes(call, frame.attributes);
}

Outcome read(const XLA_FFI_CallFrame& call, Tree& tree) {
  const auto append_all = [](std::vector<Buffer>& into, std::int64_t count, void* const* buffers) {
    for (std::int64_t i = 0; i < count; ++i) {
      Buffer buffer;
      if (append(&buffer, *static_cast<const XLA_FFI_Buffer*>(buffers[i])) > 0) into.push_back(buffer);
    }
  };
  append_all(tree.operands, call.args.size, call.args.args);
  append_all(tree.results, call.rets.size, call.rets.rets);
  return read_attributes(call, tree.attributes);
}

// XLA asks each handler once which version of the interface it was built with.
bool answers_metadata(XLA_FFI_CallFrame& call) {
  if (call.extension_start == nullptr || call.extension_start->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(call.extension_start)->metadata;
  metadata.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  metadata.traits = 0;
  return true;
}

XLA_FFI_Error* as_ffi_error(const XLA_FFI_Api& api, const Outcome& outcome) {
  if (outcome.code == 0) return nullptr;
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, outcome.message.c_str(),
                                 XLA_FFI_Error_Code_INTERNAL};
  return api.XLA_FFI_Error_Create(&args);
}

// Messages that come late. XLA runs the rest of a program meanwhile if the handler returns a future: the wait is over
// on a thread of its own. Not at once, since that thread costs more than a message that is nearly there.

constexpr auto kPatience = std::chrono::milliseconds(1);
constexpr auto kBetweenTests = std::chrono::microseconds(20);

template <class Op, class H>
Outcome finish(Call<H>& call) {
  return recorded(call, attempt(call, [&call] {
                    const int code = Steps<Op>::template finish<H>(call);
                    call.check_op();
                    return code;
                  }));
}

template <class H>
struct Late {
  Frame frame;
  Call<H> call{mpi<H>(), frame};

  Late(const Frame& begun, const Call<H>& other) : frame(begun) { call.take_over(other); }
};

template <class Op, class H>
void wait_elsewhere(XLA_FFI_CallFrame& xla, std::unique_ptr<Late<H>> late) {
  std::thread([&api = *xla.api, future = xla.future, late = std::move(late)] {
    while (!late->call.arrived()) std::this_thread::sleep_for(kBetweenTests);
    if (XLA_FFI_Error* error = as_ffi_error(api, finish<Op>(late->call))) {
      XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future, error};
      api.XLA_FFI_Future_SetError(&args);
    } else {
      XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr, future};
      api.XLA_FFI_Future_SetAvailable(&args);
    }
  }).detach();
}

template <class Op, class H>
Outcome run_patiently(XLA_FFI_CallFrame& xla, const Frame& frame, Call<H>& call) {
  call.record();
  const Outcome started = attempt(call, [&call] {
    if constexpr (!ends_requests<Op>) call.check_alive();
    call.check_order();
    return Steps<Op>::template start<H>(call);
  });
  if (started.code != 0) return recorded(call, started);
  const auto limit = Clock::now() + kPatience;
  for (int tests = 0; !call.arrived(); ++tests) {
    if (tests % 64 == 63) std::this_thread::yield();
    if (Clock::now() < limit) continue;
    XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
    if (XLA_FFI_Error* error = xla.api->XLA_FFI_Future_Create(&args)) {
      XLA_FFI_Error_Destroy_Args gone{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
      xla.api->XLA_FFI_Error_Destroy(&gone);
      continue;
    }
    xla.future = args.future;
    wait_elsewhere<Op>(xla, std::make_unique<Late<H>>(frame, call));
    return {};
  }
  return finish<Op>(call);
}

template <class Op>
Outcome run_compiled(XLA_FFI_CallFrame& xla, Frame& frame) {
  if constexpr (Steps<Op>::two) {
    if (!debug && !interruptible)
      return with_call<Op>(frame, [&](auto& call) { return run_patiently<Op>(xla, frame, call); });
  }
  return run<Op>(frame);
}

template <class Op>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* call) {
  if (answers_metadata(*call)) return nullptr;
  Frame frame;
  Outcome outcome = read(*call, frame);
  if (outcome.code == 0) outcome = run_compiled<Op>(*call, frame);
  return as_ffi_error(*call->api, outcome);
}

template <class Op>
XLA_FFI_Error* tree_handler(XLA_FFI_CallFrame* call) {
  if (answers_metadata(*call)) return nullptr;
  Tree tree;
  Outcome outcome = read(*call, tree);
  if (outcome.code == 0) outcome = run_leaves<Op>(tree);
  return as_ffi_error(*call->api, outcome);
}

XLA_FFI_Error* do_nothing(XLA_FFI_CallFrame* call) {
  answers_metadata(*call);
  return nullptr;
}

XLA_FFI_Error* end_program(XLA_FFI_CallFrame* call) {
  if (answers_metadata(*call)) return nullptr;
  ended_programs.fetch_add(1, std::memory_order_release);
  return nullptr;
}

using Runner = Outcome (*)(Frame&);
constexpr Runner runners[] = {
#define OP(row, ...) &run<row##_op>,
#define PATIENT(...)
#define LATER(...)
#include "ops.inc"
#undef OP
#undef LATER
#define OP(...)
#define LATER(row, ...) &run<start_##row##_op>,
#include "ops.inc"
#undef OP
#undef PATIENT
#undef LATER
};

using TreeRunner = Outcome (*)(Tree&);
constexpr TreeRunner tree_runners[] = {
#define OP(row, ...) &run_leaves<row##_op>,
#define PATIENT(...)
#define LATER(...)
#include "ops.inc"
#undef OP
#undef PATIENT
#undef LATER
};

template <class H>
void free_made(std::uint64_t made, bool& there) {
  if (!there) return;
  H handle = handle_as<H>(made);
  mpi<H>().Comm_free(&handle);
  there = false;
}

template <class H>
void free_made(Communicator& communicator) {
  free_made<H>(communicator.reversed, communicator.has_reversed);
  free_made<H>(communicator.folds, communicator.has_folds);
  free_made<H>(communicator.checks, communicator.has_checks);
}

template <class H>
const void* make_operation(Combiner* combine) {
  static std::deque<H> made;  // the table refers to the handles, so they stay where they are
  H& handle = made.emplace_back();
  if (mpi<H>().Op_create(combine, 1, &handle) != 0) throw Failure("MPI_Op_create failed");
  return &handle;
}

}  // namespace

void* empty_handler() { return reinterpret_cast<void*>(&do_nothing); }

void* end_handler() { return reinterpret_cast<void*>(&end_program); }

std::vector<Operation> operations() {
  return {
#define OP(row, ...) {#row, reinterpret_cast<void*>(&handler<row##_op>)},
#define PATIENT(...)
#define LATER(...)
#include "ops.inc"
#undef OP
#undef LATER
#define OP(...)
#define LATER(row, ...) {"start_" #row, reinterpret_cast<void*>(&handler<start_##row##_op>)},
#include "ops.inc"
#undef OP
#undef LATER
#define OP(row, ...) {"tree_" #row, reinterpret_cast<void*>(&tree_handler<row##_op>)},
#define LATER(...)
#include "ops.inc"
#undef OP
#undef PATIENT
#undef LATER
  };
}

int operation_index(const std::string& name) {
  const std::vector<Operation> all = operations();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (name == all[i].name) return static_cast<int>(i);
  return -1;
}

namespace {

template <class Runners, class Buffers>
Outcome run_numbered(const Runners& all, int operation, Buffers& buffers) {
  if (operation >= 0 && operation < static_cast<int>(std::size(all))) return all[operation](buffers);
  return {Failure::kNotFromMpi, "no operation has the number " + std::to_string(operation)};
}

}  // namespace

Outcome run_operation(int operation, Frame& frame) { return run_numbered(runners, operation, frame); }

Outcome run_tree_operation(int operation, Tree& tree) { return run_numbered(tree_runners, operation, tree); }

std::string load_mpi(const std::string& library_path, bool pointers) {
  void* handle = dlopen(library_path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return "mpi4py's extension module " + library_path + " is not loaded";
  handles_are_pointers = pointers;
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
  const Library library(handle);
  const std::string missing = pointers ? pointer_mpi.load(library) : int_mpi.load(library);
  return missing.empty() ? "" : "the MPI library lacks" + missing;
}

void set_small_counts(Count limit) {
  constants.small_counts_only = limit > 0;
  constants.small_count_limit = limit > 0 ? limit : std::numeric_limits<int>::max();
}

bool has_large_counts() { return handles_are_pointers ? pointer_mpi.has_large_counts() : int_mpi.has_large_counts(); }

void set_debug(bool on) { debug = on; }

std::pair<int, int> ffi_version() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

std::int64_t add_own_reduction(const std::string& name, const std::string& dtype) {
  Combiner* combine = combiner(name, dtype);
  return reductions.add({handles_are_pointers ? make_operation<void*>(combine) : make_operation<int>(combine), name});
}

void set_raised(std::int64_t index, const std::string& what) {
  Reduction& reduction = reductions.at(index);
  const std::lock_guard lock(raised_mutex);
  reduction.raised = what;
}

bool free_communicator(std::int64_t index) {
  Communicator& communicator = communicators.at(index);
  communicator.freed = true;
  if (handles_are_pointers ? requests<void*>().any_on(index) : requests<int>().any_on(index)) return false;
  handles_are_pointers ? free_made<void*>(communicator) : free_made<int>(communicator);
  return true;
}

namespace {
template <class H>
void check_with_handles(const Frame& frame) {
  Call<H>(mpi<H>(), frame).check_operation();
}
}  // namespace

void check_operation(std::int64_t comm, const std::string& operation, std::int64_t site) {
  Frame frame;
  frame.operation = operation.c_str(), frame.attributes.comm = comm, frame.attributes.site = site;
  handles_are_pointers ? check_with_handles<void*>(frame) : check_with_handles<int>(frame);
}

void carry_notes(std::uint64_t world) {
  handles_are_pointers ? notes<void*>().carry(handle_as<void*>(world)) : notes<int>().carry(handle_as<int>(world));
}

std::vector<std::pair<std::string, std::int64_t>> counts() {
  return {{"communicators", communicators.size()},
          {"reductions", reductions.size()},
          {"statuses", statuses.size()},
          {"datatypes", datatypes.size()},
          {"sites", sites.size()},
          {"messages", messages.size()},
          {"requests", handles_are_pointers ? requests<void*>().size() : requests<int>().size()}};
}

std::vector<std::string> open_requests() {
  return handles_are_pointers ? requests<void*>().open() : requests<int>().open();
}

void leave_requests(int milliseconds) {
  const std::chrono::milliseconds patience(milliseconds);
  handles_are_pointers ? requests<void*>().leave(patience) : requests<int>().leave(patience);
  handles_are_pointers ? notes<void*>().leave(pointer_mpi, patience) : notes<int>().leave(int_mpi, patience);
}

}  // namespace jaxcomm
