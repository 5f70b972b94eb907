#pragma once

#include <cstddef>
#include <vector>

#include "collectives/hierarchical/rail_slices.h"
#include "common/dtype.h"
#include "kernels/reduce.h"
#include "transport/node/node_layout.h"
#include "transport/tcp/tcp_call.h"

namespace ours {

/// One rail of an all-reduce between nodes: one rank of each node, all with their nodes' partial sums of the same
/// slices. Several chunks are under way at a time.
class Rail {
 public:
  struct Job {
    std::vector<int> peers;  ///< the rail's rank on each node
    int node;                ///< this rank's place among them
    int rail;
    int reader;  ///< the node that gets the results; -1: all nodes
    DType dtype;
    DType travels;        ///< the type on the wire: dtype, or a 16-bit type if that is float32
    Reduction reduction;  ///< the result of between_nodes()
    RailSlices slices;
  };

  Rail(TcpCall& tcp, Job job);
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;
  virtual ~Rail() = default;

  /// How many chunks may be under way: chunk t - window() must be done() before slot(t) is filled, and used before
  /// the next one is. A chunk may need the others of its window to begin before it is done().
  ///
  /// With three, the parts of one chunk travel while the results of another do. A larger window was slower when four
  /// ranks shared a cache.
  static constexpr size_t window() { return 3; }

  /// How many slots there are at most: chunk t is still read in its slot while that of t + window() is filled.
  static constexpr size_t most_slots() { return window() + 1; }

  /// A rail works in slots() places of slice_bytes(), which begin `stride` bytes apart, and in work_bytes() besides.
  size_t slots() const { return slots_; }
  size_t slice_bytes() const { return slice_bytes_; }
  size_t work_bytes() const { return slots_ * slot_work_bytes_; }
  void use(std::byte* slices, size_t stride, std::byte* work) {
    slices_ = slices;
    stride_ = stride;
    work_ = work;
  }

  /// The place of the node's partial sums of a chunk's slice, and of the results once it is done().
  std::byte* slot(size_t chunk) const { return slices_ + (chunk % slots_) * stride_; }

  /// Goes on as far as the data that has come in allows.
  virtual void advance() = 0;
  /// Whether the next chunk may be begun now.
  virtual bool may_begin() const = 0;
  /// Begins the next chunk, whose partial sums are in its slot.
  virtual void begin() = 0;
  /// Whether a chunk's results, or those of its parts that this rank gets, are in its slot, and nothing of it is
  /// still to be sent.
  virtual bool done(size_t chunk) = 0;

 protected:
  static size_t whole_lines(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

  size_t nodes() const { return job_.peers.size(); }

  std::byte* work(size_t chunk) const { return work_ + (chunk % slots_) * slot_work_bytes_; }

  /// The elements of a chunk's slice that belong to a node.
  Slice part_of(size_t chunk, size_t node) const {
    return job_.slices.part_of(chunk, job_.rail, static_cast<int>(node), static_cast<int>(nodes()));
  }

  TcpCall& tcp_;
  const Job job_;
  const size_t element_;  ///< bytes
  const size_t chunks_;
  const size_t slots_;
  const size_t slice_bytes_;
  size_t slot_work_bytes_ = 0;  ///< what the kind of rail needs for each chunk besides its slice

 private:
  std::byte* slices_ = nullptr;
  size_t stride_ = 0;
  std::byte* work_ = nullptr;
};

}  // namespace ours
