// More elements than an int counts, for MPI libraries that lack the large-count functions of MPI 4.
#pragma once

#include <vector>

#include "abi.hpp"

namespace jaxcomm {

// Datatypes that are made for a call, until it is over.
template <class H>
class Types {
 public:
  Types() = default;
  Types(const Types&) = delete;
  Types& operator=(const Types&) = delete;
  ~Types() {
    int finalized = 0;
    if (made_.empty() || loaded<H>.Finalized(&finalized) != 0 || finalized != 0) return;
    for (H& type : made_) loaded<H>.Type_free(&type);
  }

  static Count extent(H type) {
    Count lower = 0, bytes = 0;
    check(loaded<H>.Type_get_extent(type, &lower, &bytes));
    return bytes;
  }

  // So many elements, some bytes behind where the buffer begins: blocks of as many as an int counts, and the rest.
  H made(Count elements, H type, Count at = 0) {
    const Count block = std::min(elements, constants.small_count_limit), blocks = elements / block;
    const int lengths[] = {1, narrow(Elements{elements % block})};
    const Count places[] = {at, at + blocks * block * extent(type)};
    const H parts[] = {repeated(blocks, repeated(block, type)), type};
    H whole{};
    check(loaded<H>.Type_create_struct(2, lengths, places, parts, &whole));
    made_.push_back(whole);
    check(loaded<H>.Type_commit(&made_.back()));
    return made_.back();
  }

 private:
  H repeated(Count count, H type) {
    if (count > std::numeric_limits<int>::max()) throw Failure("a message of more than 2^62 elements");
    H made{};
    check(loaded<H>.Type_contiguous(narrow(Elements{count}), type, &made));
    made_.push_back(made);
    return made;
  }
  static void check(int code) {
    if (code != 0) throw Failure("the datatype of a large message could not be made", code);
  }

  std::vector<H> made_;
};

template <class... P>
template <std::size_t... i>
int Counted<P...>::with_types(std::index_sequence<i...>, const std::tuple<P...>& p) const {
  if constexpr (datatype_at() < sizeof...(P)) {
    Types<Nth<datatype_at()>> types;
    return small(argument<i>(p, types)...);
  } else {
    throw Failure("this operation has no numbers of elements");
  }
}

// Parts for each rank with a datatype for each: what MPI_Alltoallw takes. `Place` is the type of its displacements.
template <class H, class Place>
struct TypedParts {
  std::vector<int> counts;
  std::vector<Place> places;
  std::vector<H> types;

  void add(Types<H>& made, Count count, Count displ, H type, Count bytes) {
    const Count at = count > 0 ? displ * bytes : 0;
    const bool near = at <= constants.small_count_limit || sizeof(Place) == sizeof(Count);
    const bool plain = near && fits(Elements{count});
    counts.push_back(plain ? narrow(Elements{count}) : 1);
    places.push_back(plain ? static_cast<Place>(at) : 0);
    types.push_back(plain ? type : made.made(count, type, at));
  }
};

}  // namespace jaxcomm
