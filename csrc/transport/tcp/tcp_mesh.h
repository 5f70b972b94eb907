#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/interrupts.h"
#include "common/owning_process.h"
#include "transport/key_values.h"
#include "transport/node/node_wait.h"
#include "transport/tcp/tcp_call_state.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_connections.h"
#include "transport/tcp/tcp_engine_payloads.h"
#include "transport/tcp/tcp_failure.h"
#include "transport/tcp/tcp_failure_propagation.h"
#include "transport/tcp/tcp_poller.h"

namespace ours {

/// How a rank waits for what comes over the network: awake for the time that a peer on a fast network takes to answer,
/// and asleep if it takes longer.
WaitPolicy tcp_wait_policy();

/// Releases a lock for the time of its life.
class WithoutLock {
 public:
  explicit WithoutLock(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;
  ~WithoutLock() { lock_.lock(); }

 private:
  std::unique_lock<std::mutex>& lock_;
};

/// One rank's part in a group over TCP: its connections to the other ranks, each made when it is first used, and what
/// all users of them (TcpCall, TcpMessages, TcpMonitor) must share. To a peer there is one connection for control
/// (failures, farewells), which is always read, and `plan().streams` for data, which are read as far as somebody wants
/// what they bring.
///
/// Nothing runs in the background: the threads that are in a call move everything forward. There are two exceptions: in
/// a group that failed a thread tells the peers why, and after a refused call a thread lets peers connect until this
/// rank makes another call.
///
/// The lock: all that moves is guarded by one mutex, lock(). Functions that take a Lock, or stand below "with the
/// lock", must be called while it is held. Those that take a Lock release it while they wait, so that another thread
/// may have moved things when they return. All others may be called from any thread, without the lock. While a thread
/// holds it, it must not call anything that waits for another rank or for the store, and no handler of a signal.
class TcpMesh final : public std::enable_shared_from_this<TcpMesh>, private TcpConnections::Owner {
 public:
  using Lock = std::unique_lock<std::mutex>;
  using What = std::function<std::string()>;  ///< a call in words, for messages

  /// Publishes where this rank can be reached, and waits for rank 0's terms. Throws Error, TimeoutError, SystemError.
  static std::shared_ptr<TcpMesh> join(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config,
                                       Deadline deadline);
  ~TcpMesh() override;

  /// Makes the failure of either mesh of a process that of the other, too. To be called before they are used.
  static void share_failures(const std::shared_ptr<TcpMesh>& a, const std::shared_ptr<TcpMesh>& b);

  /// Lets `engine`, which ends with the mesh, move payloads of collectives, those of at least `least_bytes`. On all
  /// ranks alike, before the mesh is used.
  void set_engine(std::shared_ptr<Engine> engine, size_t least_bytes = kLeastEngineBytes);

  /// Names all ranks, "(host node1, pid 4711)" each, for messages about those that this one never speaks to. Before the
  /// mesh is used.
  void introduce(std::vector<std::string> names);

  int rank() const { return self_.rank; }
  int size() const { return self_.size; }
  const TcpPlan& plan() const { return plan_; }
  /// What this rank published.
  const TcpCard& card() const { return card_; }
  const TcpFailure& failure() const { return failure_; }
  /// How many there are, those for control included.
  size_t connections();

  /// True in a forked child of the process that joined.
  bool in_child() const { return !owner_.is_here(); }
  bool has_left() const { return left_.load(); }
  /// Throws the group's failure; Error where this rank has left, or is a forked child of the one that joined.
  void check_usable() const;

  /// Takes in what peers have to say, without waiting; does nothing where a call does that anyway.
  void look() noexcept;
  /// Makes this the group's failure, unless there is one, frees this rank's waiter and tells the peers.
  void fail(FailureKind kind, const std::string& message) noexcept;
  /// Tells the peers that this rank does not make the call of that number, and why. Never waits: a thread tells those
  /// that are not connected yet, until this rank makes another call.
  void refuse(uint64_t number, const std::string& why) noexcept;
  /// Tells the peers that this rank will not come again, and closes all connections. Never waits; does nothing in a
  /// forked child.
  void leave() noexcept;
  /// Ends the sleep of this rank's waiter.
  void wake() noexcept { poller_.wake(); }

  /// "rank 2 (host node1, pid 4711)"
  std::string describe_self() const { return self_.describe(); }

  Lock lock() { return Lock(mutex_); }

  // ---- with the lock

  /// Makes sure that there will be connections to the peer. Waits for its address, and throws the group's failure.
  void reach(Lock& lock, int rank, Deadline deadline, const What& what);
  /// Waits until something happens, `limit` at most.
  void sleep(Lock& lock, Clock::duration limit) { poller_.sleep(lock, limit); }
  /// Lets a moment pass in which the thread stays awake. False when it should sleep instead.
  bool stay_awake(Lock& lock, Awake& awake);
  /// Lets handlers of signals run. What one raises fails the group, and is thrown as its failure.
  void check_interrupts(Lock& lock, Interrupts& interrupts, const What& what);

  /// Moves everything as far as possible without waiting. True if anything moved.
  bool progress();
  /// Whether progress() would move something.
  bool anything_ready() const { return connections_.anything_ready(); }
  /// Sends what was posted for control. False while the system has not taken all.
  bool flush_control() { return connections_.flush_control(); }
  /// Throws the group's failure, Error where this rank has left, and PeerError where somebody that is needed is gone.
  void check();

  /// The connections to a peer. Those of the first streams for control and data exist from reach() on.
  TcpStream& control(int rank) { return connections_.control(rank); }
  TcpStream& data(int rank, size_t number = 0) { return connections_.data(rank, number); }
  /// The ranks that there are connections to, or attempts to make some.
  const std::vector<int>& met() const { return connections_.met(); }
  bool has_left(int rank) const { return connections_.left(rank).has_value(); }
  /// Why nothing new will come from that rank: "left the group (..)"; null while something may.
  const char* absence(int rank) const { return connections_.absence(rank); }

  /// Begins a call of this rank: compares it with what the peers have said of theirs, and throws the group's failure.
  void begin_call(const TcpCallState::Facts& facts);
  /// `cut_off`: it has not ended as it should, and nothing may refer to its memory any more.
  void end_call(bool cut_off) noexcept;
  TcpCallState& calls() { return calls_; }
  /// Null where payloads follow their headers.
  TcpEnginePayloads* payloads() { return payloads_.get(); }

  /// Records the failure, tells the peers at once and throws it; or the failure that the group had before.
  [[noreturn]] void raise(FailureKind kind, const std::string& message) override;
  /// The same with an error, as the kind that it is, and without throwing.
  void fail_now(const std::exception_ptr& error) noexcept;
  /// What came from that rank is no frame.
  [[noreturn]] void garbage(int peer, const char* fault) override;

  /// What `rank` has said of the call of that number; empty if it has not refused it.
  std::string refusal(int rank, uint64_t number) const { return calls_.refusal(rank, number); }
  std::string describe(int rank) const { return connections_.describe(rank); }
  /// "rank 2 (host node1, pid 4711), rank 3", with what is known of them: nobody is asked for an error's sake.
  std::string names_of(const std::vector<uint32_t>& ranks) const;
  /// For whom this rank waits. The rank that it waits for may itself be waiting: when half of the time has passed,
  /// ranks tell their neighbours that they wait and for whom, and pass on what they are told, so that in the end all
  /// know the ranks that are really absent.
  std::vector<uint32_t> causes();
  void declare_waiting();

 private:
  TcpMesh(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config);

  void check_data(int peer, const FrameHeader& header) override;
  void hear(int peer, const FrameHeader& header, const std::string& payload) override;
  void receive_by_engine(int peer, const FrameHeader& header, void* to, size_t* done) override;
  void opened(int rank) override;
  bool is_done_with(int rank) const override;
  [[noreturn]] void lost(int rank, const std::string& how) override;

  TcpCard await_card(Lock& lock, int rank, Deadline deadline, const What& what);
  void check_peers();
  void check_payloads();
  void raise_mismatch(const std::string& message);
  void record(FailureKind kind, const std::string& message);
  /// Starts the thread that tells those who connect later of the failure, and then closes everything.
  void propagate_failure() noexcept;
  void let_peers_connect();
  void close_all() noexcept;

  const OwningProcess owner_;
  TcpSelf self_;
  TcpPlan plan_;
  TcpCard card_;
  const std::shared_ptr<KeyValues> keys_;
  TcpFailure failure_;
  std::atomic<bool> left_{false};
  std::atomic<bool> propagating_{false};  ///< the thread of propagate_failure() has been started, which closes all

  std::mutex mutex_;  // guards all below
  TcpPoller poller_;
  TcpConnections connections_;
  TcpFailurePropagation propagation_;
  TcpCallState calls_;
  Clock::time_point contended_until_{};  ///< until then somebody else computes on this rank's core
  bool lets_connect_ = false;            ///< there is a thread in let_peers_connect(),
  uint64_t refused_after_ = 0;           ///< which ends when calls_.count() is no longer this
  /// The last member: its engine may wake the mesh until it is gone.
  std::unique_ptr<TcpEnginePayloads> payloads_;
};

}  // namespace ours
