#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/other_failures.h"
#include "common/whereabouts.h"
#include "transport/called.h"
#include "transport/node/gate_tree.h"
#include "transport/node/node_heap.h"
#include "transport/node/own_cores.h"
#include "transport/wait.h"

// The layout of the shared segment of one group on one node. Everything here is read by other processes, so it is
// plain memory with lock-free atomics; sizes follow from (ranks, chunk, ring) alone.
//
//   SegmentHeader | RankBlock[ranks] | Opening[2] | Gate[2][gates] | tables[ranks] | stages[ranks] |
//   channels[ranks][ranks]
//
// A rank writes the data of its own block, table, stage and outgoing channels; of others it touches only counters, and
// leaves results at the stages of those that help it to reduce over the network. A gate is written by the two that come
// to it, and an opening by the last of all. The failure record in the header is written once, by the first rank that
// fails.

namespace ours {

constexpr size_t kCacheLine = 64;
constexpr uint64_t kSegmentMagic = 0x6f7572735f736567;  // "ours_seg"
constexpr uint32_t kSegmentVersion = 25;

/// The number of ranks that a RankBlock has room to blame.
constexpr size_t kMostBlamed = 8;

/// A call that a rank did not make, because its arguments had no meaning there.
struct Refusal {
  std::atomic<uint64_t> seq;  ///< 0: none
  char why[504];
};

/// How many refusals of a rank can be read. Peers look within milliseconds, so one would do for most programs.
constexpr size_t kRefusals = 4;

/// When a rank of the group made the call.
struct NodeArrival {
  int32_t rank;     ///< its number in the group; -1: none
  uint32_t called;  ///< microseconds of the steady clock, without the upper half
};

constexpr NodeArrival kNobody{-1, 0};

/// What some ranks say of their data, in sum.
struct Exchanged {
  uint64_t balance;  ///< of what they send and expect in an exchange (ExchangePlan::balance())
  uint64_t longest;  ///< bytes of its longest message
  uint32_t lenders;  ///< how many have published where in their memory the others may read their data
  uint32_t in_heap;  ///< how many have published where in the heap the others may use it
};

/// What a rank shows with a synchronisation, and all ranks together.
struct Shown {
  /// A digest of the records of their calls (see digest_of()).
  uint64_t digest;
  /// The two of these ranks that came last to the call.
  NodeArrival last[2];
  Exchanged exchanged;
  /// Whether the digests of the ranks that show this differ.
  bool differ;
  /// Whether the node's first rank wants memory to be lent in the next operation like this one (see LendChoice).
  bool lend_next;
  /// Whether one of them knows of a rank that was asked to stop (see StopNotice).
  bool stop;
};

/// What a rank leaves in its block when it arrives at a synchronisation.
struct alignas(2 * kCacheLine) Arrival {
  /// Number of the last synchronisation of this parity at which the rank has arrived.
  std::atomic<uint32_t> number;
  /// The core on which the rank was when it began its last collective.
  std::atomic<int32_t> core;
  /// What the rank called. The others read it if something differs.
  CallRecord record;
  /// The rank's part of a message that is short enough.
  alignas(16) std::byte data[192];
};

/// Where two come together on their way through a synchronisation (see GateTree).
struct alignas(2 * kCacheLine) Gate {
  /// The number of the synchronisation, and who has come (see Came).
  std::atomic<uint64_t> came;
  /// What the first of them shows, in the same cache line.
  Shown first;
  /// What the second shows, if it comes while the first is still writing.
  alignas(kCacheLine) Shown second;
};

/// What all wait for. Processors fetch neighbouring lines along, and these are polled while others come to the gates.
struct alignas(2 * kCacheLine) Opening {
  /// Number of the last synchronisation of this parity for which all ranks have come to the last gate.
  SleepWord passed;
  /// What they all show together.
  Shown shown;
};

struct alignas(alignof(Arrival)) RankBlock {
  /// By parity of the synchronisations.
  Arrival arrival[2];
  /// Bumped by any peer that has put something into one of this rank's channels, or taken something out.
  alignas(kCacheLine) SleepWord doorbell;
  /// For monitored_barrier: how many this rank has reached and, on rank 0, how many it has judged.
  alignas(kCacheLine) SleepWord monitor;
  /// The core on which a thread waits for messages; -1: none does. It changes with each wait, so it lies beside what is
  /// rarely used.
  std::atomic<int32_t> core_of_messages;
  /// By parity: the number of BufferParts that make up the rank's buffer, if it has published them. They are in its
  /// stage.
  alignas(kCacheLine) uint64_t parts[2];
  /// Whether the rank has measured that it is faster to write what ranks share around their caches.
  std::atomic<bool> around_is_faster;
  /// The ranks outside the node for which this rank waits, as numbers in the group, and the call in which it waits;
  /// -1 ends a shorter list. Errors of its node's ranks blame those.
  std::atomic<uint64_t> blame_call;
  std::atomic<int32_t> blamed[kMostBlamed];
  std::atomic<uint32_t> state;  ///< RankState
  char reason[kMaxReason];      ///< why it has left (see other_failures.h)
  int32_t pid;
  uint64_t start;  ///< of the process (see process_watch.h)
  char host[64];
  /// A number, and the address in the rank's own memory where it lies too: a rank that finds it there can read that
  /// memory.
  uint64_t mark;
  uint64_t mark_at;
  /// Whether the rank can read the memory of all others.
  std::atomic<bool> reads_all;
  ShownHeap heap;
  AskedProcess whereabouts;
  CoreShare cores;
  int32_t socket;  ///< on which the rank may run; -1: on several, or unknown
  /// The last calls that this rank refused; the slots are used in turn.
  Refusal refusals[kRefusals];
};

/// A part of a rank's buffer: where it lies in the rank's heap (see NodeHeap), or in the rank's own memory.
struct BufferPart {
  uint64_t at;
  uint64_t bytes;
};

enum RankState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2 };

struct SegmentHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t ranks;
  uint64_t nonce[2];
  uint64_t chunk_bytes;
  uint64_t ring_bytes;
  uint64_t direct;                         ///< whether ranks may read one another's memory
  uint64_t domains;                        ///< how many (see NodeConfig)
  alignas(kCacheLine) SleepWord attached;  ///< number of ranks that have attached
  /// How many shares of the current reduction in the heap have been taken.
  alignas(kCacheLine) std::atomic<uint64_t> shares_taken;

  /// The first failure of the group. 0: none; 1: being written; 2: readable.
  alignas(kCacheLine) std::atomic<uint32_t> failure_state;
  uint32_t failure_kind;
  char failure_message[3000];
};

/// A stream of bytes from one rank to another. Positions count all bytes ever moved.
struct ChannelHead {
  alignas(kCacheLine) std::atomic<uint64_t> written;
  alignas(kCacheLine) std::atomic<uint64_t> read;
  /// How many messages the reader has read from the writer's memory.
  std::atomic<uint64_t> taken;
  /// Whether the writer's memory may have changed before the reader took the message there.
  alignas(kCacheLine) std::atomic<bool> withdrawn;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "channels need lock-free 64-bit atomics");
static_assert(sizeof(Arrival) == 4 * kCacheLine && sizeof(Gate) == 2 * kCacheLine);
static_assert(offsetof(Gate, first) + sizeof(Shown) <= kCacheLine, "who comes to a gate touches one cache line");
static_assert(offsetof(Opening, shown) + sizeof(Shown) <= kCacheLine,
              "who passes the last gate touches one cache line");
static_assert(std::is_standard_layout_v<RankBlock> && std::is_standard_layout_v<SegmentHeader>);

/// Offsets into the segment (bytes). Pure arithmetic.
struct NodeLayout {
  size_t ranks;
  size_t chunk_bytes;  ///< bytes that a rank publishes per synchronisation
  size_t ring_bytes;   ///< capacity of a channel

  size_t blocks() const { return align(sizeof(SegmentHeader)); }
  size_t openings() const { return blocks() + ranks * sizeof(RankBlock); }
  size_t opening(size_t parity) const { return openings() + parity * sizeof(Opening); }
  size_t gates() const { return opening(2); }
  size_t gate(size_t number, size_t parity) const {
    return gates() + (parity * GateTree(ranks).gates() + number) * sizeof(Gate);
  }
  size_t tables() const { return align(gate(0, 2)); }
  /// For each rank and parity: bytes sent to each rank, and expected from each; and, if the rank lends its memory,
  /// where they are.
  size_t table_bytes() const { return align_line(3 * ranks * sizeof(uint64_t)); }
  size_t table(size_t rank, size_t parity) const { return tables() + (2 * rank + parity) * table_bytes(); }

  size_t stages() const { return align(tables() + 2 * ranks * table_bytes()); }
  /// How many results a rank can show at a time: two in turn, and two that it has fetched for its domain; or the last
  /// chunks that have been through a rail.
  static constexpr size_t kResults = 4;
  /// Room for a reduced slice: a chunk divided by the ranks, rounded up to whole cache lines.
  size_t result_bytes() const { return align_line(chunk_bytes / ranks + 2 * kCacheLine); }
  /// Room for both stages and that many results.
  size_t stage_bytes(size_t results) const { return 2 * chunk_bytes + results * result_bytes(); }
  /// One cache line more than whole pages: whoever reduces reads all ranks' stages at the same place, and lines that
  /// lie equally in their pages share a few places of the first-level cache.
  size_t stage_stride() const { return align(stage_bytes(kResults)) + kCacheLine; }
  size_t stage(size_t rank, size_t parity) const { return stages() + rank * stage_stride() + parity * chunk_bytes; }
  size_t result(size_t rank, size_t number) const {
    return stages() + rank * stage_stride() + stage_bytes(number % kResults);
  }

  size_t channels() const { return align(stages() + ranks * stage_stride()); }
  size_t channel_stride() const { return align(sizeof(ChannelHead) + ring_bytes); }
  size_t channel(size_t from, size_t to) const { return channels() + (from * ranks + to) * channel_stride(); }

  size_t total() const { return channels() + ranks * ranks * channel_stride(); }

 private:
  static size_t align_line(size_t n) { return (n + kCacheLine - 1) / kCacheLine * kCacheLine; }
  static size_t align(size_t n) { return (n + 4095) / 4096 * 4096; }
};

}  // namespace ours
