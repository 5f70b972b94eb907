#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/owning_process.h"
#include "transport/key_values.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_endpoint.h"
#include "transport/tcp/tcp_idle.h"

namespace ours {

/// One rank's part in a group over TCP. It connects to a peer when the peer is first needed.
///
/// Nothing runs in the background: the threads that are in a call (TcpCall, TcpMessages, a monitored barrier) move
/// everything forward. There are two exceptions in a mesh: in a group that failed, a thread tells the peers why, and
/// after a refused call a thread lets peers connect until this rank makes another call.
///
/// The lock: the functions of the mesh may be called from any thread, including by an abort, and take the lock
/// themselves for as long as they need it. The endpoint may be used only by a thread that holds lock(). That thread
/// must not call the mesh's functions, except those under "with the lock" and those that say so, and must not wait
/// for anything except through the endpoint.
class TcpMesh final : public std::enable_shared_from_this<TcpMesh> {
 public:
  using Lock = TcpEndpoint::Lock;

  /// Publishes where this rank can be reached, and waits for rank 0's terms. Throws Error, TimeoutError, SystemError.
  static std::shared_ptr<TcpMesh> join(int rank, int size, const std::shared_ptr<KeyValues>& keys,
                                       const TcpConfig& config, Deadline deadline);
  ~TcpMesh();

  /// Makes a failure of either mesh of a process that of the other, too. Must be called before they are used.
  static void share_failures(const std::shared_ptr<TcpMesh>& a, const std::shared_ptr<TcpMesh>& b);

  /// Lets `engine`, which ends with the mesh, move payloads of collectives that have at least `least_bytes`. Must be
  /// called in the same way on all ranks, before the mesh is used.
  void set_engine(std::shared_ptr<Engine> engine, size_t least_bytes = kLeastEngineBytes);

  /// Names all ranks for messages, "(host node1, pid 4711)" each. Must be called before the mesh is used.
  void introduce(std::vector<std::string> names);

  /// The number of open connections, including those for control.
  size_t connections();

  /// Takes in what peers have to say, without waiting; does nothing if a call does that anyway.
  void look() noexcept;

  /// When use() was called last, as a number that grows with each use of any mesh of the process.
  uint64_t last_use() const { return last_use_.load(); }
  /// The number of open connections; 0 while somebody uses them. If `looks`, first takes in what peers say of theirs.
  /// Never waits.
  size_t idle_connections(bool looks) noexcept;
  /// Unless somebody uses them, offers the peers to close the connections. Never waits. Returns how many of them have
  /// been closed, or may be soon.
  size_t park() noexcept;

  /// Says that a thread waits for peers without being in a call, for as long as it lives.
  class Waiting {
   public:
    explicit Waiting(TcpMesh& mesh) : waiting_(mesh.shared_.waiting) { ++waiting_; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() { --waiting_; }

   private:
    std::atomic<int>& waiting_;
  };

  /// Tells the peers that this rank does not make the call of that number, and why. Never waits: a thread tells those
  /// that are not connected yet, until this rank makes another call.
  void refuse(uint64_t number, const std::string& why) noexcept;

  /// Tells the peers that this rank has left, and closes all connections. Never waits; does nothing in a forked
  /// child.
  void leave() noexcept;

  // ---- with or without the lock

  int rank() const { return shared_.self.rank; }
  int size() const { return shared_.self.size; }
  const TcpPlan& plan() const { return plan_; }
  /// The addresses at which this rank can be reached, as published.
  const TcpCard& card() const { return shared_.card; }
  const GroupFailure& failure() const { return shared_.failure; }
  bool has_left() const { return shared_.left.load(); }
  /// True in a forked child of the process that joined.
  bool in_child() const { return !owner_.is_here(); }
  /// "rank 2 (host node1, pid 4711)"
  std::string describe_self() const { return shared_.self.describe(); }
  /// The same of any rank, as far as it is known.
  std::string describe(int rank) { return endpoint_.connections().describe(rank); }
  /// Throws the group's failure, and Error if this rank has left or is a forked child of the one that joined.
  void check_usable() const;
  /// Makes this the group's failure, unless there is one, frees this rank's waiter and tells the peers. Never waits.
  void fail(FailureKind kind, const std::string& message) noexcept;
  /// Does the same for an error, keeping its kind.
  void fail(const std::exception_ptr& error) noexcept;
  /// Ends the sleep of this rank's waiter.
  void wake() noexcept { endpoint_.wake(); }

  Lock lock() { return Lock(mutex_); }
  /// The same for a thread that is about to call peers.
  Lock use();

  // ---- with the lock

  TcpEndpoint& endpoint() { return endpoint_; }
  /// The reason why `rank` does not make the call of that number; empty if it has not refused it.
  std::string refusal(int rank, uint64_t number) { return endpoint_.calls().refusal(rank, number); }

 private:
  TcpMesh(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config);

  /// Calls body() with the lock if nobody uses the mesh, and does nothing otherwise. An error fails the group.
  template <class Body>
  void between_calls(Body&& body) noexcept;

  /// Starts the thread that tells peers that connect later of the failure.
  void propagate_failure() noexcept;
  void let_peers_connect();

  const OwningProcess owner_;
  TcpEndpoint::Shared shared_;
  TcpPlan plan_;
  std::atomic<uint64_t> last_use_{0};     ///< see TcpIdle::count_use()
  std::atomic<bool> propagating_{false};  ///< the thread of propagate_failure() has been started, which closes all

  std::mutex mutex_;            // guards all below
  bool lets_connect_ = false;   ///< there is a thread in let_peers_connect(),
  uint64_t refused_after_ = 0;  ///< which ends when this is no longer the number of the last call
  TcpEndpoint endpoint_;
};

}  // namespace ours
