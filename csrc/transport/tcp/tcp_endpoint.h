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
#include "transport/group_failure.h"
#include "transport/key_values.h"
#include "transport/tcp/tcp_call_state.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_connections.h"
#include "transport/tcp/tcp_engine_payloads.h"
#include "transport/tcp/tcp_failure_propagation.h"
#include "transport/tcp/tcp_poller.h"
#include "transport/wait.h"

namespace ours {

/// How a rank waits for the network: awake for the time that a peer on a fast network takes to answer, and asleep if
/// it takes longer.
WaitPolicy tcp_wait_policy();

/// Releases a lock for as long as it lives.
class WithoutLock {
 public:
  explicit WithoutLock(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;
  ~WithoutLock() { lock_.lock(); }

 private:
  std::unique_lock<std::mutex>& lock_;
};

/// Moves everything of a mesh forward, and finds out what is wrong. The connections for control (failures, farewells)
/// are always read, those for data only as far as their data is wanted.
///
/// All functions but wake() must be called with the lock held. Those that take a Lock release it while they wait, so
/// another thread may have moved things when they return. They throw the group's failure.
class TcpEndpoint final : private TcpConnections::Owner {
 public:
  using Lock = std::unique_lock<std::mutex>;
  using What = std::function<std::string()>;  ///< a call in words, for messages

  /// State that the endpoint shares with its mesh.
  struct Shared {
    Shared(TcpSelf self, std::shared_ptr<KeyValues> keys)
        : self(std::move(self)), card{machine_id(), 0, {}, 1, {}}, keys(std::move(keys)) {}
    TcpSelf self;
    TcpCard card;  ///< what this rank publishes
    const std::shared_ptr<KeyValues> keys;
    const Clock::time_point made = Clock::now();
    GroupFailure failure;
    std::atomic<bool> left{false};
    std::atomic<int> waiting{0};  ///< threads that wait for peers without being in a call
  };

  /// Listens, and writes the addresses to shared.card. `on_failure` is called whenever the group has failed; it must
  /// not wait. Throws Error.
  TcpEndpoint(Shared& shared, const TcpConfig& config, std::function<void()> on_failure);

  void set_engine(std::shared_ptr<Engine> engine, size_t least_bytes);
  /// In a forked child: leaks the engine, which belongs to the parent.
  void abandon_engine() { [[maybe_unused]] const TcpEnginePayloads* parents = payloads_.release(); }
  /// From any thread, without the lock: ends the sleep of a waiting thread.
  void wake() noexcept { poller_.wake(); }

  TcpConnections& connections() { return connections_; }
  TcpCallState& calls() { return calls_; }
  /// Null where payloads follow their headers.
  TcpEnginePayloads* payloads() { return payloads_.get(); }

  /// Makes sure that there will be connections to the peer. Waits for its address.
  void reach(Lock& lock, int rank, Deadline deadline, const What& what);
  /// Waits until something happens, `limit` at most.
  void sleep(Lock& lock, Clock::duration limit) { poller_.sleep(lock, limit); }
  /// Lets a moment pass in which the thread stays awake. Returns false when it should sleep instead.
  bool stay_awake(Lock& lock, Awake& awake);
  /// Lets signal handlers run. If one raises an error, that fails the group.
  void check_interrupts(Lock& lock, Interrupts& interrupts, const What& what);

  /// Moves everything as far as possible without waiting. Returns true if anything moved.
  bool progress();
  /// Throws Error if this rank has left, and PeerError if a rank that is needed is gone.
  void check();

  /// Begins a call of this rank, and compares it with what the peers have said of theirs.
  void begin_call(const TcpCallState::Facts& facts);
  /// Ends the call. `cut_off`: it has not ended as it should, and nothing may refer to its memory any more.
  void end_call(bool cut_off) noexcept;

  /// Records the failure, tells the peers at once and throws it. If the group has failed before, throws that failure.
  [[noreturn]] void raise(FailureKind kind, const std::string& message) override;
  /// Records an error with its kind, without throwing.
  void fail(const std::exception_ptr& error) noexcept;
  /// Fails the group because that rank sent bytes that make no sense.
  [[noreturn]] void garbage(int peer, const char* fault) override;
  /// Tells the peers, including those that connect later, that this rank does not make the call of that number.
  void refuse(uint64_t number, const std::string& why);
  /// In a group that failed: tells the peers that connect, until this rank has left, and then closes everything.
  void propagate_failure(Lock& lock);
  /// Whether nobody uses the connections.
  bool is_idle() const;
  /// If so, offers the peers to close them. Returns how many may be closed soon.
  size_t park() { return is_idle() ? connections_.park() : 0; }
  /// Tells the peers that this rank leaves, and closes everything.
  void say_farewell() noexcept;

  /// Says where those ranks are in their programs (see roll_call()), as far as it is known where they can be asked.
  /// Takes at most kAskingTime, with the lock.
  std::string call_roll(const std::vector<uint32_t>& ranks) const;
  /// "rank 2 (host node1, pid 4711), rank 3", from what is already known of them.
  std::string names_of(const std::vector<uint32_t>& ranks) const;
  Culprits culprits(const std::vector<uint32_t>& ranks) const { return {names_of(ranks), call_roll(ranks)}; }
  /// The ranks for which this rank waits. These may themselves be waiting, so when half of the time has passed, ranks
  /// tell their neighbours for which ranks they wait, and pass on what they are told.
  std::vector<uint32_t> causes();
  void declare_waiting();

 private:
  void check_data(int peer, const FrameHeader& header) override;
  void hear(int peer, const FrameHeader& header, const std::string& payload) override;
  void receive_by_engine(int peer, const FrameHeader& header, void* to, size_t* done) override;
  void opened(int rank) override;
  bool is_done_with(int rank) const override { return propagation_.has_told(rank); }
  [[noreturn]] void lost(int rank, const std::string& how) override;

  TcpCard await_card(Lock& lock, int rank, Deadline deadline, const What& what);
  void check_payloads();
  /// `message` says how the calls of this rank and `peer` differ; nothing happens if it is empty.
  void raise_mismatch(int peer, const std::string& message);
  void record(FailureKind kind, const std::string& message);
  void tell_all(const FrameHeader& header, const std::string& payload);
  void close() noexcept;

  Shared& shared_;
  const std::function<void()> on_failure_;
  TcpPoller poller_;
  TcpConnections connections_;
  TcpFailurePropagation propagation_;
  TcpCallState calls_;
  Clock::time_point contended_until_{};  ///< until then another thread computes on this rank's core
  /// The last member, because its engine may wake the endpoint until it is gone.
  std::unique_ptr<TcpEnginePayloads> payloads_;
};

}  // namespace ours
