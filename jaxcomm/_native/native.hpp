// What the Cython bridge sees of the native layer: plain C++ types, no templates, no XLA.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "call.hpp"
#include "checks.hpp"
#include "notes.hpp"
#include "reduce_ops.hpp"
#include "requests.hpp"
#include "trees.hpp"
#include "watchdog.hpp"

namespace jaxcomm {

struct Outcome {
  int code = 0;  // 0, an MPI error code, or one of Failure's
  std::string message;
};

struct Operation {
  const char* name;
  void* ffi_handler;
};

// How many programs of jaxcomm.jit have come to the end of their communication.
inline std::atomic<std::int64_t> ended_programs{0};
void* end_handler();    // an XLA FFI handler: counts one
void* empty_handler();  // one that does nothing

// Whether this process was forked from one that uses MPI. It has one thread of those that MPI and XLA started, and
// whatever locks the others held; MPI 4.1, 11.5, leaves fork to the implementation, and none lets the child
// communicate.
inline std::atomic<bool> forked{false};
inline constexpr const char* kForked =
    "this process was forked from a rank of an MPI job and is none itself: it has neither MPI's connections nor the "
    "threads "
    "of JAX, and would wait for ever. Communicate in the parent; let forked workers (multiprocessing, os.fork) work on "
    "NumPy "
    "arrays, or start more ranks with mpiexec instead";
// How many rows the tables have, and how many messages and requests are open.
std::vector<std::pair<std::string, std::int64_t>> counts();

// Loads the entry points from an MPI that is in the process already. Returns an error message, or "".
std::string load_mpi(const std::string& library_path, bool handles_are_pointers);
bool has_large_counts();
// Do without the large-count functions, with at most so many elements a call; 0 for what is usual. For tests.
void set_small_counts(Count limit);
void set_debug(bool on);
// The version of XLA's interface that this was built with.
std::pair<int, int> ffi_version();
std::vector<Operation> operations();  // one per OP of ops.inc, one per LATER, one per OP for trees
int operation_index(const std::string& name);
// Runs one operation on buffers that the caller owns: the eager path. `frame.operation` is filled in.
Outcome run_operation(int operation, Frame& frame);
Outcome run_tree_operation(int operation, Tree& tree);
// Makes a commutative MPI operation of reduce_ops.hpp and returns its row of the table; throws Failure.
std::int64_t add_own_reduction(const std::string& name, const std::string& dtype);
// Makes the call fail that a user's operation is called by.
void set_raised(std::int64_t index, const std::string& what);
// Returns whether it has no request under way: else it and its duplicates must stay until these have ended.
bool free_communicator(std::int64_t index);
// Checking mode: as before a collective, for a method of mpi4py's own. Failure: the ranks differ.
void check_operation(std::int64_t comm, const std::string& operation, std::int64_t site);
// Notes on messages travel on this communicator from now on: a duplicate of the world.
void carry_notes(std::uint64_t world);
// What was started and never waited for, in words; and the end of it, as far as it can be had within some time.
std::vector<std::string> open_requests();
void leave_requests(int milliseconds);

}  // namespace jaxcomm
