// Many arrays in one call: the leaves of a pytree. Small ones of one element type travel together, packed into one
// message; a large one goes by itself, from where it is to where it shall be.
//
// A payload may consist of blocks, one for each rank (or edge): then so does the packed one, and each of its blocks has
// a block of every leaf.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "call.hpp"
#include "requests.hpp"

namespace jaxcomm {

// As a Frame: for each of the operation's operands the leaves, then the traced scalars; the leaves of the result, if
// this rank gets one, then the envelope, if there is to be one.
struct Tree {
  std::vector<Buffer> operands, results;
  Attributes attributes;
  Status* status = nullptr;
};

// How a leaf's elements are spread over blocks: in proportion to these numbers.
class Blocks {
 public:
  explicit Blocks(List weights) : weights_(weights) {
    for (std::size_t i = 0; i < weights.size; ++i) total_ += weights.data[i];
  }
  std::size_t count() const { return weights_.size; }
  Count of(Count elements, std::size_t block) const {
    return total_ > 0 ? elements / total_ * weights_.data[block] : 0;
  }
  // What does not depend on the number of blocks, so that all ranks come to the same decision by it.
  Count unit(Count elements) const { return total_ > 0 ? elements / total_ : elements; }

 private:
  List weights_;
  Count total_ = 0;
};

class Packed {
 public:
  Packed(const std::vector<Buffer>& leaves, Blocks blocks) : leaves_(leaves), blocks_(blocks) {
    bytes_ = static_cast<std::size_t>(bytes_of(leaves.front().code));
    if (bytes_ == 0) throw Failure("an element type of XLA has no MPI datatype");
    for (const Buffer& leaf : leaves) elements_ += leaf.elements;
    memory_.reset(std::malloc(std::max<std::size_t>(static_cast<std::size_t>(elements_) * bytes_, 1)));
    if (memory_ == nullptr) throw Failure("no memory to pack a tree of " + std::to_string(elements_) + " elements");
  }
  Buffer buffer() const { return {memory_.get(), elements_, leaves_.front().code}; }
  void pack() {
    each([](char* packed, char* leaf, std::size_t bytes) { std::memcpy(packed, leaf, bytes); });
  }
  void unpack() {
    each([](char* packed, char* leaf, std::size_t bytes) { std::memcpy(leaf, packed, bytes); });
  }

 private:
  template <class F>
  void each(F move) {
    auto* packed = static_cast<char*>(memory_.get());
    std::vector<std::size_t> done(leaves_.size(), 0);
    for (std::size_t block = 0; block < blocks_.count(); ++block)
      for (std::size_t i = 0; i < leaves_.size(); ++i) {
        const auto bytes = static_cast<std::size_t>(blocks_.of(leaves_[i].elements, block)) * bytes_;
        if (bytes > 0) move(packed, static_cast<char*>(leaves_[i].data) + done[i], bytes);
        done[i] += bytes, packed += bytes;
      }
  }

  std::vector<Buffer> leaves_;
  Blocks blocks_;
  std::size_t bytes_ = 0;
  Count elements_ = 0;
  Memory memory_;
};

// Which leaves go together, in an order that all ranks agree on.
inline std::vector<std::vector<int>> groups_of(const Tree& tree, int leaves) {
  std::vector<std::vector<int>> groups;
  std::vector<int> of_kind(static_cast<std::size_t>(leaves), -1);
  const Blocks blocks(tree.attributes.in_blocks);
  for (int i = 0; i < leaves; ++i) {
    const Buffer& leaf = tree.operands[static_cast<std::size_t>(i)];
    const Count bytes = blocks.unit(leaf.elements) * bytes_of(leaf.code);
    int& group = of_kind[static_cast<std::size_t>(tree.attributes.kinds.data[i])];
    if (bytes > tree.attributes.bucket) {
      groups.push_back({i});
    } else if (group < 0) {
      group = static_cast<int>(groups.size());
      groups.push_back({i});
    } else {
      groups[static_cast<std::size_t>(group)].push_back(i);
    }
  }
  return groups;
}

inline std::vector<Buffer> chosen(const std::vector<Buffer>& from, const std::vector<int>& which, int offset) {
  std::vector<Buffer> out;
  for (const int i : which) out.push_back(from[static_cast<std::size_t>(offset + i)]);
  return out;
}

// What is said of the leaves must fit what is there, as nobody else looks at it.
inline void check_leaves(const Tree& tree, int data_operands) {
  const Attributes& at = tree.attributes;
  const auto here = static_cast<std::int64_t>(tree.operands.size());
  const auto kinds = static_cast<std::int64_t>(at.kinds.size), ops = static_cast<std::int64_t>(at.ops.size);
  bool fits = at.leaves >= 0 && at.leaves <= here && at.leaves * data_operands <= here &&
              here - at.leaves * data_operands <= kMostBuffers && kinds >= at.leaves && (ops == 0 || ops >= at.leaves);
  for (std::int64_t i = 0; fits && i < at.leaves; ++i) fits = at.kinds.data[i] >= 0 && at.kinds.data[i] < at.leaves;
  if (!fits)
    throw Failure("a tree of " + std::to_string(at.leaves) + " leaves does not fit the arrays that came with it");
}

// Runs an operation on all leaves. `run` is that of a Frame: it returns something with a `code`. A message that fails
// does not keep the others back: other ranks take part in them, and what was sent must be received. The first failure
// counts.
template <class F>
auto run_tree(Tree& tree, int data_operands, F run) {
  using Outcome = decltype(run(std::declval<Frame&>()));
  check_leaves(tree, data_operands);
  const int leaves = static_cast<int>(tree.attributes.leaves);
  Frame known;
  known.attributes = tree.attributes;
  for (std::size_t i = static_cast<std::size_t>(leaves * data_operands); i < tree.operands.size(); ++i)
    known.operands[known.n_operands++] = tree.operands[i];
  read_traced(known);
  const bool has_results = static_cast<int>(tree.results.size()) >= leaves;
  const bool receives = known.attributes.has_source;
  std::int32_t envelope[3] = {};
  Outcome first;
  for (const std::vector<int>& group : groups_of(tree, leaves)) {
    Frame frame;
    frame.attributes = known.attributes, frame.status = tree.status;
    if (known.attributes.ops.size > 0) frame.attributes.op = known.attributes.ops.data[group.front()];
    std::vector<Packed> operands, results;
    const bool alone = group.size() == 1;
    for (int operand = 0; operand < data_operands; ++operand) {
      const std::vector<Buffer> parts = chosen(tree.operands, group, operand * leaves);
      if (alone) {
        frame.operands[frame.n_operands++] = parts.front();
        continue;
      }
      operands.emplace_back(parts, Blocks(tree.attributes.in_blocks)).pack();
      frame.operands[frame.n_operands++] = operands.back().buffer();
    }
    if (has_results) {
      const std::vector<Buffer> parts = chosen(tree.results, group, 0);
      if (!alone) results.emplace_back(parts, Blocks(tree.attributes.out_blocks));
      frame.results[frame.n_results++] = alone ? parts.front() : results.back().buffer();
    }
    if (receives) frame.results[frame.n_results++] = {envelope, 3, 0};
    Outcome outcome = run(frame);
    const bool done = outcome.code != Failure::kNotFromMpi;
    if (receives && outcome.code == 0 && envelope[2] >= 0 && envelope[0] != constants.proc_null)
      outcome = {Failure::kNotFromMpi, std::string(frame.operation) + ": a message for " +
                                           std::to_string(group.size()) + " leaves of a tree is shorter than they are"};
    if (outcome.code != 0) {
      if (first.code == 0) first = outcome;
      if (!done || (receives && from_anyone(known.attributes))) break;
      continue;
    }
    if (receives) {
      // What is left comes from where the first part came.
      known.attributes.source = envelope[0], known.attributes.recvtag = envelope[1];
    }
    for (Packed& result : results) result.unpack();
  }
  if (receives && tree.results.size() > static_cast<std::size_t>(has_results ? leaves : 0))
    std::memcpy(tree.results.back().data, envelope, sizeof envelope);
  return first;
}

}  // namespace jaxcomm
