// What the Cython bridge sees of the native layer: plain C++ types, no templates, no XLA.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "call.hpp"
#include "reduce_ops.hpp"

namespace jaxcomm {

struct Outcome {
  int code = 0;  // 0, an MPI error code, or Failure::kNotFromMpi
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

// Loads the entry points from an MPI that is in the process already. Returns an error message, or "".
std::string load_mpi(const std::string& library_path, bool handles_are_pointers);
bool has_large_counts();
void set_debug(bool on);
std::vector<Operation> operations();  // one per row of ops.inc
int operation_index(const std::string& name);
// Runs one operation on buffers that the caller owns: the eager path. `frame.operation` is filled in.
Outcome run_operation(int operation, Frame& frame);
// Makes a commutative MPI operation of reduce_ops.hpp and returns its row of the table; throws Failure.
std::int64_t add_own_reduction(const std::string& name, const std::string& dtype);
void free_communicator(std::int64_t index);

}  // namespace jaxcomm
