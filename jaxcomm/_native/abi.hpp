// What the native layer knows of MPI: two kinds of handle, and entry points found at run time.
//
// No mpi.h: handles are int (MPICH, Intel, Cray) or pointers (Open MPI, the MPI-5 standard ABI), and everything else
// that a header would fix (constants, the layout of MPI_Status) is told by mpi4py at import.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace jaxcomm {

using Count = long long;  // MPI_Count: 64 bits wherever JAX runs

// What went wrong. `code` is MPI's error code, or kNotFromMpi.
struct Failure : std::runtime_error {
  static constexpr int kNotFromMpi = -1;
  int code;
  explicit Failure(const std::string& what, int code = kNotFromMpi) : std::runtime_error(what), code(code) {}
};

// An MPI_Status of any implementation. The standard leaves its size open: 20 bytes in MPICH, 24 in Open MPI, 32 in the
// MPI-5 ABI. `source_at` and `tag_at` are offsets that the bridge measured.
struct Status {
  alignas(8) std::byte bytes[128];
};

// MPI_User_function: the last parameter points to a datatype handle of either kind.
using Combiner = void(void* in, void* inout, int* count, void* datatype);

struct Constants {
  void* in_place = nullptr;
  int any_source = 0, any_tag = 0, proc_null = 0, tag_ub = 0;
  std::uint64_t op_null = 0;
  std::size_t status_source_at = 0, status_tag_at = 0;
  // The most elements that a small-count entry point takes; tests lower it.
  Count small_count_limit = std::numeric_limits<int>::max();
};

inline Constants constants;

// A number of elements: the marker by which an entry point's signature says which arguments grew to MPI_Count in MPI 4.
struct Elements {
  Count value;
};

template <class T>
T widen(T x) {
  return x;
}
inline Count widen(Elements n) { return n.value; }

template <class T>
T narrow(T x) {
  return x;
}
inline int narrow(Elements n) { return static_cast<int>(n.value); }  // after fits()

template <class T>
bool fits(T) {
  return true;
}
inline bool fits(Elements n) { return n.value <= constants.small_count_limit; }

// MPI_<name>_c where the library has it, else MPI_<name>.
template <class... P>
struct Counted {
  int (*large)(decltype(widen(std::declval<P>()))...) = nullptr;
  int (*small)(decltype(narrow(std::declval<P>()))...) = nullptr;

  int operator()(P... p) const {
    if (large != nullptr) return large(widen(p)...);
    if (!(fits(p) && ...))
      throw Failure(
          "a message of more than " + std::to_string(constants.small_count_limit) +
          " elements needs the large-count functions of MPI 4, which this MPI library lacks; send it in parts");
    return small(narrow(p)...);
  }
};

template <class... P>
struct Plain {
  int (*function)(P...) = nullptr;
  int operator()(P... p) const { return function(p...); }
};

// Finds a symbol first in the global scope, so that PMPI tools in LD_PRELOAD are honoured, then in mpi4py's own
// library.
class Library {
 public:
  explicit Library(void* handle) : handle_(handle) {}
  void* find(const std::string& name) const {
    void* symbol = dlsym(RTLD_DEFAULT, name.c_str());
    return symbol != nullptr ? symbol : dlsym(handle_, name.c_str());
  }

 private:
  void* handle_;
};

template <class F>
void assign(F*& function, void* symbol) {
  function = reinterpret_cast<F*>(symbol);
}

template <class... P>
bool bind(Counted<P...>& entry, const Library& library, const std::string& name) {
  assign(entry.large, library.find(name + "_c"));
  assign(entry.small, library.find(name));
  return entry.large != nullptr || entry.small != nullptr;
}

template <class... P>
bool bind(Plain<P...>& entry, const Library& library, const std::string& name) {
  assign(entry.function, library.find(name));
  return entry.function != nullptr;
}

template <class Handle>
struct Mpi {
  using H = Handle;
#define COUNTED(name, ...) Counted<__VA_ARGS__> name;
#define PLAIN(name, ...) Plain<__VA_ARGS__> name;
#include "entries.inc"
#undef COUNTED
#undef PLAIN

  // Returns the names that the library lacks, separated by blanks: empty when all is well.
  std::string load(const Library& library) {
    std::string missing;
#define COUNTED(name, ...) \
  if (!bind(name, library, "MPI_" #name)) missing += " MPI_" #name;
#define PLAIN(name, ...) COUNTED(name, )
#include "entries.inc"
#undef COUNTED
#undef PLAIN
    return missing;
  }
  bool has_large_counts() const { return Allreduce.large != nullptr; }
};

}  // namespace jaxcomm
