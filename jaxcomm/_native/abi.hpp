// What the native layer knows of MPI: two kinds of handle, and entry points found at run time.
//
// No mpi.h: handles are int (MPICH, Intel, Cray) or pointers (Open MPI, the MPI-5 standard ABI), and everything else
// that a header would fix (constants, the layout of MPI_Status) is told by mpi4py at import.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace jaxcomm {

using Count = long long;  // MPI_Count: 64 bits wherever JAX runs

// What went wrong. `code` is MPI's error code, or kNotFromMpi, or kFromOp for an exception that
// a user's operation raised.
struct Failure : std::runtime_error {
  static constexpr int kNotFromMpi = -1, kFromOp = -2;
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
  int any_source = 0, any_tag = 0, proc_null = 0, root = 0, tag_ub = 0, err_truncate = 0;
  std::uint64_t op_null = 0;
  std::size_t status_bytes = 0, status_source_at = 0, status_tag_at = 0;
  // The most elements that are given to a small-count entry point, and whether the others are passed by: for tests.
  Count small_count_limit = std::numeric_limits<int>::max();
  bool small_counts_only = false;
};

inline Constants constants;

// A number of elements: the marker by which an entry point's signature says which arguments grew to MPI_Count in MPI 4.
struct Elements {
  Count value;
};

// A number of elements, or where they begin, for each rank: likewise, MPI_Count or MPI_Aint in MPI 4, else int.
struct Each {
  std::vector<Count> values;
  mutable std::vector<int> narrowed;  // MPI reads it during the call
};
static_assert(sizeof(std::ptrdiff_t) == sizeof(Count), "MPI_Aint is as wide as MPI_Count");

template <class T>
T widen(T x) {
  return x;
}
inline Count widen(Elements n) { return n.value; }
// Never null, also where there is none: some libraries reject that.
template <class T>
const T* data(const std::vector<T>& values) {
  static const T none{};
  return values.empty() ? &none : values.data();
}
inline const Count* widen(const Each& each) { return data(each.values); }

template <class T>
T narrow(T x) {
  return x;
}
inline int narrow(Elements n) { return static_cast<int>(n.value); }  // after fits()
inline const int* narrow(const Each& each) {
  each.narrowed.assign(each.values.begin(), each.values.end());
  return data(each.narrowed);
}

template <class T>
bool fits(T) {
  return true;
}
inline bool fits(Elements n) { return n.value <= constants.small_count_limit; }
inline bool fits(const Each& each) {
  return std::all_of(each.values.begin(), each.values.end(), [](Count n) { return fits(Elements{n}); });
}

// Datatypes that are made for a call: large.hpp.
template <class H>
class Types;

// MPI_<name>_c where the library has it, else MPI_<name>; there, so many elements of a datatype that an int does not
// count them are one of a datatype that is made of them.
template <class... P>
struct Counted {
  int (*large)(decltype(widen(std::declval<P>()))...) = nullptr;
  int (*small)(decltype(narrow(std::declval<P>()))...) = nullptr;

  bool has_large() const { return large != nullptr && !constants.small_counts_only; }
  int operator()(P... p) const {
    if (has_large()) return large(widen(p)...);
    if ((fits(p) && ...)) return small(narrow(p)...);
    if (!((fits(p) || std::is_same_v<P, Elements>) && ...)) throw Failure("counts that do not fit into an int");
    return with_types(std::index_sequence_for<P...>{}, std::tuple<P...>(p...));
  }

 private:
  // Where the first datatype is that belongs to a number of elements; behind the end if there is none.
  static constexpr std::size_t datatype_at() {
    constexpr bool is_count[] = {std::is_same_v<P, Elements>...};
    std::size_t i = 0;
    while (i < sizeof...(P) && !is_count[i]) ++i;
    return i + 1;
  }
  template <std::size_t i>
  using Nth = std::tuple_element_t<i, std::tuple<P...>>;

  template <std::size_t... i>
  int with_types(std::index_sequence<i...>, const std::tuple<P...>& p) const;
  // The datatype that comes behind a number of elements, for that number.
  template <std::size_t i, class T>
  auto argument(const std::tuple<P...>& p, T& types) const {
    if constexpr (std::is_same_v<Nth<i>, Elements>) {
      return fits(std::get<i>(p)) ? narrow(std::get<i>(p)) : 1;
    } else if constexpr (i > 0 && std::is_same_v<Nth<i - (i > 0)>, Elements>) {
      const Elements count = std::get<i - 1>(p);
      return fits(count) ? std::get<i>(p) : types.made(count.value, std::get<i>(p));
    } else {
      return narrow(std::get<i>(p));
    }
  }
};

// A reduction, of one part of the elements after the other: MPI_<name>. The large-count functions would not do for the
// operations of reduce_ops.hpp, which count with an int.
template <class... P>
struct Reducing;

// The requests of an operation.
template <class H>
struct Started {
  std::vector<H> handles;
  std::vector<char> ended;

  H* next() {
    ended.push_back(0);
    return &handles.emplace_back();
  }
};
template <class H>
H* narrow(Started<H>* started) {
  return started->next();
}

template <class H, class... P>
struct Reducing<const void*, void*, Elements, H, H, P...> {
  int (*small)(const void*, void*, int, H, H, decltype(narrow(std::declval<P>()))...) = nullptr;

  int operator()(const void* in, void* out, Elements n, H type, H op, P... p) const {
    if (fits(n)) return small(in, out, narrow(n), type, op, narrow(p)...);
    const Count bytes = Types<H>::extent(type);
    int code = 0;
    for (Count done = 0; done < n.value && code == 0; done += constants.small_count_limit) {
      const Elements part{std::min(constants.small_count_limit, n.value - done)};
      const void* from = in == constants.in_place ? in : static_cast<const char*>(in) + done * bytes;
      code = small(from, static_cast<char*>(out) + done * bytes, narrow(part), type, op, narrow(p)...);
    }
    return code;
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
bool bind(Reducing<P...>& entry, const Library& library, const std::string& name) {
  assign(entry.small, library.find(name));
  return entry.small != nullptr;
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
#define REDUCING(name, ...) Reducing<__VA_ARGS__> name;
#include "entries.inc"
#undef COUNTED
#undef PLAIN
#undef REDUCING

  // Returns the names that the library lacks, separated by blanks: empty when all is well.
  std::string load(const Library& library) {
    std::string missing;
#define COUNTED(name, ...) \
  if (!bind(name, library, "MPI_" #name)) missing += " MPI_" #name;
#define PLAIN(name, ...) COUNTED(name, )
#define REDUCING(name, ...) COUNTED(name, )
#include "entries.inc"
#undef COUNTED
#undef PLAIN
#undef REDUCING
    return missing;
  }
  bool has_large_counts() const { return Bcast.has_large(); }
};

template <class H>
inline Mpi<H> loaded;
inline bool handles_are_pointers = false;  // which of the two is

}  // namespace jaxcomm
