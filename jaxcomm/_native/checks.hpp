// Checking mode: before a collective the ranks tell each other what they are about to do. If that differs, every rank
// raises, and says what each is doing; since none has entered MPI's collective, the communicator goes on.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "call.hpp"

namespace jaxcomm {

inline std::atomic<bool> checking{false};

// What is significant in an operation, by its name. Of ragged ones, ranks know different counts, which have to fit; so
// they do of what goes to their neighbours.
constexpr Significance significance(std::string_view name) {
  constexpr std::string_view alike[] = {"bcast",         "gather",    "scatter", "allgather", "alltoall",
                                        "reduce",        "allreduce", "scan",    "exscan",    "reduce_scatter_block",
                                        "reduce_scatter"};
  constexpr std::string_view ragged[] = {"gatherv", "scatterv", "allgatherv", "alltoallv"};
  constexpr std::string_view of_neighbors[] = {"neighbor_allgatherv", "neighbor_alltoallv"};
  if (name == "barrier" || name == "agree") return {true, false, false};
  if (name == "replicated_cotangent") return {true, true, true, true};
  for (const std::string_view each : alike)
    if (name == each) return {true, true, true};
  for (const std::string_view each : ragged)
    if (name == each) return {true, true, false, false, true};
  for (const std::string_view each : of_neighbors)
    if (name == each) return {true, true, false, false, true, true};
  return {};
}

inline std::int64_t hashed(std::string_view text) {  // FNV-1a
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return static_cast<std::int64_t>(hash);
}

// Of what a buffer holds: as numbers, of which -0 is 0 and any two NaN are alike. XLA_FFI_DataType: F32, F64, C64,
// C128.
template <class T>
std::int64_t hashed_numbers(const Buffer& buffer, Count numbers) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (Count i = 0; i < numbers; ++i) {
    T x = static_cast<const T*>(buffer.data)[i];
    if (x != x) x = std::numeric_limits<T>::quiet_NaN();
    x += T{0};
    std::uint64_t word = 0;
    std::memcpy(&word, &x, sizeof x);
    hash = (hash ^ word) * 1099511628211ULL;
    hash ^= hash >> 32;
  }
  return static_cast<std::int64_t>(hash);
}
inline constexpr int kFloat32 = 11, kFloat64 = 12, kComplex64 = 15, kComplex128 = 18;
inline std::int64_t hashed_values(const Buffer& buffer) {
  if (buffer.code == kFloat32) return hashed_numbers<float>(buffer, buffer.elements);
  if (buffer.code == kComplex64) return hashed_numbers<float>(buffer, 2 * buffer.elements);
  if (buffer.code == kFloat64) return hashed_numbers<double>(buffer, buffer.elements);
  if (buffer.code == kComplex128) return hashed_numbers<double>(buffer, 2 * buffer.elements);
  const auto bytes = static_cast<std::size_t>(buffer.elements * bytes_of(buffer.code));
  return hashed({static_cast<const char*>(buffer.data), bytes});
}

// How large it is, in words: ranks that compute alike, but in another order, differ in the last digits.
template <class T>
std::string size_of_numbers(const Buffer& buffer, Count numbers) {
  double sum = 0;
  for (Count i = 0; i < numbers; ++i) sum += std::abs(static_cast<double>(static_cast<const T*>(buffer.data)[i]));
  char text[64];
  std::snprintf(text, sizeof text, ", sum of magnitudes %.17g", sum);
  return text;
}
inline std::string size_of_values(const Buffer& buffer) {
  if (buffer.code == kFloat32) return size_of_numbers<float>(buffer, buffer.elements);
  if (buffer.code == kComplex64) return size_of_numbers<float>(buffer, 2 * buffer.elements);
  if (buffer.code == kFloat64) return size_of_numbers<double>(buffer, buffer.elements);
  if (buffer.code == kComplex128) return size_of_numbers<double>(buffer, 2 * buffer.elements);
  return "";
}

// What a rank is about to do, in numbers. One that it does not know agrees with any.
inline constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::min();
inline constexpr const char* kFields[] = {
    "the operation", "dtype", "count", "op", "root", "the order", "the value of the cotangent"};
inline constexpr std::size_t kFieldCount = sizeof kFields / sizeof *kFields, kValue = kFieldCount - 1;
static_assert(kFieldCount == kFacts);
using Fingerprint = std::array<std::int64_t, kFacts>;

// What is known of all ranks, rank 0's first.
class Fingerprints {
 public:
  explicit Fingerprints(int ranks) : all(static_cast<std::size_t>(ranks)) {}

  // In which fields ranks differ, in words; of different operations nothing else can be compared.
  std::string differences() const {
    if (!others(0).empty()) return kFields[0];
    std::string names;
    for (std::size_t field = 1; field < kFieldCount; ++field)
      if (!others(field).empty()) names += (names.empty() ? "" : ", ") + std::string(kFields[field]);
    return names;
  }
  // Which ranks have another value than the first that has one.
  std::string others(std::size_t field) const {
    std::string ranks;
    std::int64_t first = kUnknown;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const std::int64_t value = all[rank][field];
      if (first == kUnknown) first = value;
      if (value != first && value != kUnknown) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return ranks;
  }

  std::vector<Fingerprint> all;
};

inline constexpr int kInt64 = 5;  // XLA_FFI_DataType

// What each rank says.
inline constexpr std::size_t kText = 400;
template <class F>
std::vector<std::string> exchanged(std::string mine, std::size_t ranks, const F& tell) {
  mine.resize(kText, '\0');
  mine.back() = '\0';
  std::vector<char> all(kText * ranks);
  tell(mine.data(), all.data(), kText, kBytes);
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank) texts.emplace_back(all.data() + rank * kText);
  return texts;
}

inline std::string disagreement(const Communicator& comm, const std::string& differs,
                                const std::vector<std::string>& texts) {
  std::string message = "the ranks of " + comm.name + " do not do the same; they disagree on " + differs + ":";
  for (const std::string& each : texts) message += "\n  " + each;
  return message;
}

// What may lead to it, and what to do.
inline std::string advice(const std::string& differs) {
  if (differs == kFields[0])
    return "\nEvery rank must make the same calls, in the same order. Look for a branch or a loop that depends on the "
           "rank "
           "or on its data, and for an exception that some ranks have caught.";
  std::string text = "\nThese must be the same on every rank.";
  if (differs.find(kFields[2]) != std::string::npos)
    text += " For different numbers of elements there are Gatherv, Scatterv, Allgatherv and Alltoallv.";
  if (differs.find(kFields[5]) != std::string::npos)
    text += " The order is that of reproducible=True, or of a scan's derivative.";
  return text;
}

inline constexpr const char* kUnharmed = "\nNobody has communicated, and the communicator can be used on.";

inline std::string unlinked(const Communicator& comm) {
  const std::lock_guard lock(raised_mutex);
  return comm.unlinked;
}

// Where differentiation has passed an operation by on some ranks only, the others do its derivative alone. `after`: how
// many collectives came before each of `unlinked`, -1 where there is none.
inline std::string missing_link(const std::vector<std::string>& unlinked, const std::vector<std::int64_t>& after) {
  const std::int64_t latest = *std::max_element(after.begin(), after.end());
  std::string text;
  for (std::size_t rank = 0; rank < unlinked.size(); ++rank)
    if (after[rank] == latest) text += "\n  " + unlinked[rank];
  if (latest < 0 || *std::min_element(after.begin(), after.end()) == latest) return "";
  return "\nPerhaps a derivative runs on some ranks only. Before, differentiation has passed by" + text +
         "\nLet the operands, templates too, depend on what is differentiated on every rank, or pass a token that does "
         "(docs/differentiation.md).";
}

// Throws on every rank if the ranks are not about to do the same. `tell` gathers what ranks have: (from, to, elements,
// code).
template <class F>
void compare(const Communicator& comm, const Fingerprint& mine, std::string text, const F& tell) {
  Fingerprints known(comm.size);
  tell(mine.data(), known.all.data(), kFieldCount, kInt64);
  const std::string differs = known.differences();
  if (differs.empty()) return;
  const std::vector<std::string> texts = exchanged(text, known.all.size(), tell);
  std::string message = disagreement(comm, differs, texts);
  if (differs == kFields[0]) {
    std::vector<std::int64_t> after(known.all.size());
    tell(&comm.unlinked_after, after.data(), 1, kInt64);
    message += missing_link(exchanged(unlinked(comm), known.all.size(), tell), after);
  }
  if (differs != kFields[kValue])
    message += advice(differs);
  else
    message +=
        "\nOn rank " + known.others(kValue) +
        " it is not what it is on rank 0. The result of Allreduce(..., replicated=True) is one value that all ranks "
        "share: use it in the same way on all ranks, or leave replicated out, and cotangents are added up. Where only "
        "the last digits differ, ranks compute alike in other ways: under jit here and not there, or on other "
        "processors.";
  throw Failure(message + kUnharmed);
}

template <class H>
void Call<H>::remember_unlinked() {
  if (!checking.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(raised_mutex);
  comm_.unlinked = describe(), comm_.unlinked_after = comm_.agreed;
}

template <class H>
auto Call<H>::teller() {
  return [this](const void* from, void* to, Count elements, int code) {
    const H type = handle_as<H>(datatype_of(code)->handle);
    const Elements n{elements};
    if (mpi.Allgather(from, n, type, to, n, type, handle_as<H>(of_checks())) != 0)
      throw Failure("checking mode: the ranks could not tell each other what they do");
  };
}

template <class H>
std::array<std::int64_t, kFacts> Call<H>::fingerprint(const Significance& what) const {
  // Of a scatter all ranks know how much comes here, and of all else how much is here.
  const std::string_view name(frame_.operation);
  const bool scatters = name == "scatter" || name == "iscatter";
  const Buffer& data = scatters && has_result() ? frame_.results[0] : payload();
  return {hashed(frame_.operation) + at_.says,  what.data ? data.code : 0,
          what.count ? data.elements : 0,       at_.has_op ? hashed(reductions.at(at_.op).name) : 0,
          at_.has_root ? at_.root : -1,         2 * at_.reverse + at_.ordered,
          what.values ? hashed_values(data) : 0};
}

template <class H>
void Call<H>::check_agreement(const Significance& what) {
  if (!what.collective || comm_.two_groups || comm_.size < 2) return;
  compare(comm_, fingerprint(what), describe() + (what.values ? size_of_values(payload()) : ""), teller());
  if (what.parts) check_parts(what.edges);
  ++comm_.agreed;
}

// Throws on every rank if one is about to send another (over an edge of the topology) what that does not expect.
template <class H>
void Call<H>::check_parts(bool edges) {
  const std::string_view name(frame_.operation);
  const Parts& to = name == "scatterv"              ? in_if_root()
                    : name == "gatherv"             ? in_to_root()
                    : name == "allgatherv"          ? in_to_all()
                    : name == "neighbor_allgatherv" ? all_to_edges()
                    : edges                         ? to_edges()
                                                    : in_parts();
  const Parts& from = name == "scatterv"  ? out_from_root()
                      : name == "gatherv" ? out_if_root()
                      : edges             ? from_edges()
                                          : out_parts();
  // Of each part two numbers: how many elements, and what they are if they travel as bytes.
  const auto described = [](const Parts& parts, const List& kinds, const std::vector<int>* numbers) {
    std::vector<Count> all;
    for (std::size_t i = 0; i < parts.counts.values.size(); ++i) {
      const std::size_t kind = numbers != nullptr ? static_cast<std::size_t>((*numbers)[i]) : i;
      all.push_back(parts.counts.values[i]);
      all.push_back(kind < kinds.size ? kinds.data[kind] : 0);
    }
    return all;
  };
  const std::vector<Count> mine = described(to, at_.sendkinds, edges ? &out_edges() : nullptr),
                           expected = described(from, at_.recvkinds, edges ? &in_edges() : nullptr);
  std::vector<Count> comes(expected.size());
  const H type = handle_as<H>(datatype_of(kInt64)->handle);
  int code = 0;
  if (edges) {
    const auto pairs = [&](std::size_t numbers) {
      TypedParts<H, Count> typed;
      for (std::size_t i = 0; i < numbers; i += 2) typed.add(types_, 2, static_cast<Count>(i), type, sizeof(Count));
      return typed;
    };
    const auto there = pairs(mine.size()), here = pairs(comes.size());
    code = mpi.Neighbor_alltoallw(mine.data(), data(there.counts), data(there.places), data(there.types), comes.data(),
                                  data(here.counts), data(here.places), data(here.types), graph());
  } else {
    code = mpi.Alltoall(mine.data(), Elements{2}, type, comes.data(), Elements{2}, type, handle_as<H>(of_checks()));
  }
  if (code != 0) throw Failure("checking mode: the ranks could not tell each other how much they send");
  std::string wrong;
  for (std::size_t i = 0; i < comes.size(); i += 2) {
    const Datatype *has = datatype_of(static_cast<int>(comes[i + 1])),
                   *wants = datatype_of(static_cast<int>(expected[i + 1]));
    const bool other = comes[i + 1] != 0 && expected[i + 1] != 0 && comes[i + 1] != expected[i + 1];
    if (comes[i] == expected[i] && !other) continue;
    wrong += (wrong.empty() ? ": " : "; ") + std::string(edges ? "its neighbor " : "rank ") +
             std::to_string(edges ? in_edges()[i / 2] : static_cast<int>(i / 2)) + " sends it ";
    if (other && has != nullptr && wants != nullptr)
      wrong += has->name + " where it expects " + wants->name;
    else
      wrong += std::to_string(comes[i] / datatype().per_element) + " elements where it expects " +
               std::to_string(expected[i] / datatype().per_element);
  }
  const std::int64_t is_wrong = !wrong.empty();
  std::vector<std::int64_t> anything_wrong(static_cast<std::size_t>(comm_.size));
  const auto tell = teller();
  tell(&is_wrong, anything_wrong.data(), 1, kInt64);
  if (std::count(anything_wrong.begin(), anything_wrong.end(), 0) == comm_.size) return;
  const std::vector<std::string> texts = exchanged(describe() + wrong, anything_wrong.size(), tell);
  throw Failure(disagreement(comm_, "what they send each other", texts) + kUnharmed);
}

// Of a nonblocking collective, what ranks are about to do is on its way together with it, and is compared when somebody
// waits.
template <class H>
struct Agreement {
  struct Told {
    Fingerprint numbers;
    char text[kText] = {};
  };

  Told mine;
  std::vector<Told> all;
  H request{};
  bool ended = false;
  std::string differs;  // in words; empty: the ranks do the same, as far as is known
};

template <class H>
int Call<H>::tell_later() {
  const Significance what = significance(std::string_view(frame_.operation).substr(1));
  // The duplicate is made at a blocking collective: a start waits for nobody.
  if (!what.collective || comm_.two_groups || comm_.size < 2 || !comm_.has_checks) return 0;
  agreement_ = std::make_shared<Agreement<H>>();
  agreement_->mine.numbers = fingerprint(what);
  describe().copy(agreement_->mine.text, kText - 1);
  agreement_->all.resize(static_cast<std::size_t>(comm_.size));
  const H type = handle_as<H>(datatype_of(kBytes)->handle);
  const Elements n{sizeof agreement_->mine};
  return mpi.Iallgather(&agreement_->mine, n, type, agreement_->all.data(), n, type, handle_as<H>(of_checks()),
                        &agreement_->request);
}

template <class H>
bool Call<H>::told() {
  if (agreement_ == nullptr || agreement_->ended) return true;
  Agreement<H>& agreement = *agreement_;
  int flag = 0;
  Status status;
  const int code = mpi.Test(&agreement.request, &flag, &status);
  agreement.ended = flag != 0 || code != 0;
  if (flag == 0 || code != 0) return agreement.ended;
  Fingerprints known(comm_.size);
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < known.all.size(); ++rank) {
    known.all[rank] = agreement.all[rank].numbers;
    texts.emplace_back(agreement.all[rank].text);
  }
  if (const std::string differs = known.differences(); !differs.empty())
    agreement.differs = disagreement(comm_, differs, texts) +
                        "\nThese are under way, and MPI may not be able to end them: use another communicator.";
  return true;
}

template <class H>
std::string Call<H>::differs() const {
  return agreement_ == nullptr ? "" : agreement_->differs;
}

// Likewise for a method of mpi4py's own, of which only this is known.
template <class H>
void Call<H>::check_operation() {
  if (comm_.two_groups || comm_.size < 2) return;
  Fingerprint mine;
  mine.fill(kUnknown);
  mine[0] = hashed(frame_.operation);
  compare(comm_, mine, describe(), teller());
}

}  // namespace jaxcomm
