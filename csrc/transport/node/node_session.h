#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/error.h"
#include "common/interrupts.h"
#include "common/owning_process.h"
#include "common/process_watch.h"
#include "common/shared_memory.h"
#include "transport/node/domains.h"
#include "transport/node/node_failure.h"
#include "transport/node/node_heap.h"
#include "transport/node/node_layout.h"
#include "transport/roll_call.h"
#include "transport/wait.h"

namespace ours {

/// The leader's memory cannot be reached from here, so the two ranks do not share a node.
class NotSameNode : public Error {
 public:
  using Error::Error;
};

/// What the leader decides for all ranks (their environments may differ).
struct NodeConfig {
  size_t chunk_bytes;
  size_t ring_bytes;
  bool direct = true;  ///< whether ranks may read one another's memory, where the system allows it
  size_t domains = 0;  ///< into how many the ranks are divided; 0: by the sockets on which they run

  /// From OURS_CHUNK_BYTES, OURS_DIRECT and OURS_DOMAINS, with defaults for `ranks`.
  static NodeConfig from_options(int ranks);
};

/// What a rank of a group that spans several nodes does while it waits for its node's ranks.
class NodeLookout {
 public:
  virtual ~NodeLookout() = default;

  /// Called about every 50 ms with the ranks of the node that are awaited. Throws to end the wait.
  virtual void look_around(const std::vector<int>& absent) = 0;

  /// The ranks to blame for a wait that has taken too long: those ranks of the node, or those that they wait for.
  virtual Culprits culprits(const std::vector<int>& absent) = 0;
};

/// One group's ranks on one node, and the shared memory between them. The leader creates the segment and publishes its
/// address(); the others open it, and must find a nonce from the address in the mapping.
class NodeSession {
 public:
  /// The leader's side. Rank numbers are positions in the group, 0 <= rank < size; any of them can lead.
  static std::shared_ptr<NodeSession> create(int rank, int size, const NodeConfig& config,
                                             std::shared_ptr<ProcessHeaps> heaps = ProcessHeaps::here());

  /// The others' side. Throws NotSameNode with the reason if the address leads to no memory shared with its leader.
  static std::shared_ptr<NodeSession> open(int rank, int size, const std::string& address);

  /// A rank of the group whose segment is `memory`. Ranks that are threads of one process may share a mapping, and have
  /// heaps of their own.
  NodeSession(int rank, int size, std::shared_ptr<SharedMemory> memory,
              std::shared_ptr<ProcessHeaps> heaps = ProcessHeaps::here());
  NodeSession(const NodeSession&) = delete;
  NodeSession& operator=(const NodeSession&) = delete;
  ~NodeSession();

  /// What the others need to open() this segment: one line of printable text.
  std::string address() const;

  /// Waits until all ranks have attached. Calls `poll` (may throw) about every 50 ms meanwhile. Throws TimeoutError
  /// that names the absent ranks. What is thrown becomes the failure of the group.
  void wait_attached(Deadline deadline, const std::function<void()>& poll);

  /// Tells the peers that this rank has left. Never blocks; does nothing in a forked child.
  void leave() noexcept;

  /// Leaves a note for the peers that this rank will not make call number `call`, and why. Never blocks.
  void refuse(uint64_t call, const std::string& why) noexcept;

  /// The reason that `rank` has left for not making the call of that number; empty if it has left none.
  std::string refusal(int rank, uint64_t call) const;

  /// True in a forked child of the process that joined the group; it must not touch the group.
  bool in_child() const;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const NodeLayout& layout() const { return layout_; }
  const WaitPolicy& wait_policy() const { return wait_policy_; }
  /// Whether there is a core for each rank.
  bool have_own_cores() const { return have_own_cores_; }
  const Domains& domains() const { return domains_; }
  /// Makes all ranks one domain. Must be called before the session is used.
  void unite() { domains_ = Domains::equal(size_, 1); }
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  NodeFailure& failure() { return *failure_; }
  NodeHeap& heap() const { return *heap_; }

  SegmentHeader& header() const { return *at<SegmentHeader>(0); }
  RankBlock& block(int rank) const { return *at<RankBlock>(layout_.blocks() + rank * sizeof(RankBlock)); }
  RankBlock& self() const { return block(rank_); }
  Gate& gate(size_t number, size_t parity) const { return *at<Gate>(layout_.gate(number, parity)); }
  Opening& opening(size_t parity) const { return *at<Opening>(layout_.opening(parity)); }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(memory_->data() + offset);
  }

  /// Makes the node's ranks a part of a larger group, in which they are ranks `numbers`. Must be called before other
  /// threads use the session.
  void widen(std::vector<int> numbers) { numbers_ = std::move(numbers); }

  /// Synchronisations consult `lookout`, which may be null, until the next call.
  void set_lookout(NodeLookout* lookout) { lookout_ = lookout; }
  NodeLookout* lookout() const { return lookout_; }

  /// The rank's number in the group.
  int number_of(int rank) const { return numbers_.empty() ? rank : numbers_[static_cast<size_t>(rank)]; }

  /// Whether `rank` can read the memory of all others.
  bool reads_all(int rank) const { return block(rank).reads_all.load(std::memory_order_acquire); }
  /// Whether all ranks can.
  bool all_read() const;

  /// Copies bytes at that address of the memory of `rank`, which has to leave them alone meanwhile. `what` names the
  /// operation. Throws PeerError if the rank is gone.
  void read(int rank, void* to, uint64_t from, size_t bytes, const std::function<std::string()>& what);

  /// "rank 2 (host node1, pid 4711)"
  std::string describe(int rank) const;

  /// Says where those ranks are in their programs (see roll_call()).
  std::string call_roll(const std::vector<int>& ranks) const;

  /// The reason why `rank` will never arrive, as the end of a sentence ("died", "left the group ..."), or null while
  /// it may.
  const char* absence(int rank) const;

  /// Why `rank`, which has left, may have done so, as the end of an error (see describe_reason()).
  std::string reason(int rank) const;

  /// Lets signal handlers run. If one raises an error, that fails the group and is thrown as its failure. `what` is
  /// under way.
  void check_interrupts(Interrupts& interrupts, const std::function<std::string()>& what);

  /// Fails the group and throws PeerError: `rank` will never arrive, because of `why` (see absence()). `what` names the
  /// operation that was waiting. If a rank has died, the error names that one instead.
  [[noreturn]] void lost(int rank, const char* why, const std::string& what);

 private:
  void attach();
  Domains find_domains() const;
  /// Whether this rank finds the marks of all others in their memory.
  bool finds_all_marks() const;
  bool has_died(int rank) const;

  int rank_;
  int size_;
  std::shared_ptr<SharedMemory> memory_;
  NodeLayout layout_{};
  WaitPolicy wait_policy_;
  bool have_own_cores_ = false;
  Domains domains_;
  std::unique_ptr<NodeHeap> heap_;
  std::unique_ptr<NodeFailure> failure_;
  std::vector<ProcessWatch> watches_;
  uint64_t mark_ = 0;  ///< for others to read
  const Clock::time_point made_ = Clock::now();
  std::atomic<bool> leaving_{false};
  size_t refusals_ = 0;       ///< how many refuse() has made
  std::vector<int> numbers_;  ///< in the group, where it is larger than the node
  NodeLookout* lookout_ = nullptr;
  OwningProcess owner_;
};

}  // namespace ours
