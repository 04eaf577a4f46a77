// Checking mode: before a collective the ranks tell each other what they are about to do. If that differs, every rank
// raises, and says what each is doing; since none has entered MPI's collective, the communicator goes on.
#pragma once

#include <atomic>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "call.hpp"

namespace jaxcomm {

inline std::atomic<bool> checking{false};

// What is significant in an operation, by its name. Of ragged ones, ranks know different counts.
constexpr Significance significance(std::string_view name) {
  constexpr std::string_view alike[] = {"bcast",         "gather",    "scatter", "allgather", "alltoall",
                                        "reduce",        "allreduce", "scan",    "exscan",    "reduce_scatter_block",
                                        "reduce_scatter"};
  constexpr std::string_view ragged[] = {"gatherv", "scatterv", "allgatherv", "alltoallv"};
  if (name == "barrier") return {true, false, false};
  for (const std::string_view each : alike)
    if (name == each) return {true, true, true};
  for (const std::string_view each : ragged)
    if (name == each) return {true, true, false};
  return {};
}

inline std::int64_t hashed(std::string_view text) {  // FNV-1a
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return static_cast<std::int64_t>(hash);
}

template <class H>
void Call<H>::check_agreement(const Significance& what) {
  if (!what.collective || comm_.two_groups || comm_.size < 2) return;
  constexpr const char* names[] = {"the operation", "dtype", "count", "op", "root", "the order"};
  constexpr std::size_t fields = sizeof names / sizeof *names;
  // Of a scatter all ranks know how much comes here, and of all else how much is here.
  const bool scatters = std::string_view(frame_.operation) == "scatter";
  const Buffer& data = scatters && has_result() ? frame_.results[0] : payload();
  const std::int64_t mine[fields] = {
      hashed(frame_.operation),       what.data ? data.code : 0,
      what.count ? data.elements : 0, at_.has_op ? hashed(reductions.at(at_.op).name) : 0,
      at_.has_root ? at_.root : -1,   2 * at_.reverse + at_.ordered};
  const auto size = static_cast<std::size_t>(comm_.size);
  std::vector<std::int64_t> all(fields * size);
  const auto tell = [this](const void* from, void* to, Count elements, int code) {
    const H type = handle_as<H>(datatype_of(code)->handle);
    const Elements n{elements};
    if (mpi.Allgather(from, n, type, to, n, type, handle_as<H>(of_checks())) != 0)
      throw Failure("checking mode: the ranks could not tell each other what they do");
  };
  constexpr int kInt64 = 5, kBytes = kByte;  // XLA_FFI_DataType
  tell(mine, all.data(), fields, kInt64);
  std::string differs;
  // Of different operations nothing else can be compared.
  for (std::size_t field = 0; field < fields && (field == 0 || differs != names[0]); ++field)
    for (std::size_t rank = 1; rank < size; ++rank)
      if (all[rank * fields + field] != all[field]) {
        differs += (differs.empty() ? "" : ", ") + std::string(names[field]);
        break;
      }
  if (differs.empty()) return;
  constexpr std::size_t kText = 400;
  std::string text = describe();
  text.resize(kText, '\0');
  text.back() = '\0';
  std::vector<char> texts(kText * size);
  tell(text.data(), texts.data(), kText, kBytes);
  std::string message = "the ranks of " + comm_.name + " do not do the same; they disagree on " + differs + ":";
  for (std::size_t rank = 0; rank < size; ++rank) message += "\n  " + std::string(texts.data() + rank * kText);
  throw Failure(message + "\nNobody has communicated, and the communicator can be used on.");
}

}  // namespace jaxcomm
