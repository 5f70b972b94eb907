#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/deadline.h"
#include "common/interrupts.h"
#include "common/owning_process.h"
#include "transport/key_values.h"
#include "transport/node/node_wait.h"
#include "transport/tcp/tcp_carried.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_congestion.h"
#include "transport/tcp/tcp_failure.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_stream.h"

namespace ours {

/// How a rank waits for what comes over the network: awake for the time that a peer takes to answer on a fast one.
/// Whatever takes longer is worth a sleep.
WaitPolicy tcp_wait_policy();

/// One rank's connections to the other ranks of its group, each made when it is first used. To a peer there is one
/// connection for control (failures, farewells), which is read always, and `plan().streams` for data, which are read
/// as far as somebody wants it.
///
/// Nothing runs in the background: whoever is in a call (TcpCall) moves everything forward. Only where the group has
/// failed, a thread of its own, the herald, tells the peers why, those that come later too.
///
/// Either of two ranks may connect to the other. Where both do at once, the lower one's connection counts.
class TcpMesh final : public std::enable_shared_from_this<TcpMesh>, private TcpStream::Handler {
 public:
  /// Publishes where this rank can be reached, and waits for rank 0's terms. Throws Error, TimeoutError, SystemError.
  static std::shared_ptr<TcpMesh> join(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config,
                                       Deadline deadline);
  ~TcpMesh() override;

  /// Makes the failure of either mesh of a process that of the other, too. To be called before they are used.
  static void share_failures(const std::shared_ptr<TcpMesh>& a, const std::shared_ptr<TcpMesh>& b);

  /// Lets `engine`, which ends with the mesh, carry payloads of collectives, those of at least `least_bytes`. On all
  /// ranks alike, before the mesh is used.
  void set_engine(std::shared_ptr<Engine> engine, size_t least_bytes = kCarriedBytes);

  /// Tells who the ranks are, "(host node1, pid 4711)" each, for messages about those that this one never speaks to.
  /// Before the mesh is used.
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
  bool in_child() const;

  /// Throws the group's failure; Error where this rank has left, or is a forked child of the one that joined.
  void check_usable() const;

  /// Takes in what peers have to say, without waiting; does nothing where a call does that anyway.
  void look() noexcept;

  /// Makes this the group's failure, unless there is one, frees this rank's waiter and tells the peers. From any
  /// thread.
  void fail(FailureKind kind, const std::string& message) noexcept;

  /// Tells the peers that this rank does not make the call of that number, and why. Never waits: a thread tells those
  /// that are not connected yet, until this rank makes another call.
  void refuse(uint64_t number, const std::string& why) noexcept;

  /// What `rank` has said of the call of that number; empty if it has said nothing. Only during a call of this rank.
  std::string refusal(int rank, uint64_t number);

  /// Tells the peers that this rank will not come again, and closes all connections. Never waits; does nothing in a
  /// forked child.
  void leave() noexcept;

  /// "rank 2 (host node1, pid 4711)"
  std::string describe_self() const;

  /// The same of any rank, as far as it is known. Only during a call of this rank.
  std::string describe(int rank);

 private:
  friend class TcpCall;
  friend class TcpMessages;
  friend class TcpMonitor;
  using Lock = std::unique_lock<std::mutex>;

  // What epoll calls everything that is no open stream.
  static constexpr uint64_t kWakeToken = 0;
  static constexpr uint64_t kListenerToken = 1;
  static constexpr uint64_t kHandshakeToken = 2;

  // The word of a dying rank takes another connection than its data.
  static constexpr std::chrono::milliseconds kGrace{300};

  /// The efforts to connect one stream.
  struct Attempt {
    std::optional<TcpHandshake> handshake;
    Clock::time_point next;  ///< when to begin, or to give up what has begun
    size_t address = 0;
    size_t refused = 0;  ///< of this round's addresses
    int rounds = 0;      ///< in which all addresses were tried
    std::string tried;   ///< in the last round
  };
  struct Slot {
    Slot(int peer, bool data, TcpStream::Handler& handler) : stream(peer, data, handler) {}
    TcpStream stream;
    std::unique_ptr<Attempt> attempt;
    bool inbound = false;  ///< a handshake that the peer began was accepted
  };
  struct Agreement {
    uint64_t call;
    uint32_t round;
    Signature signature;
  };
  struct Refused {
    uint64_t number;
    std::string why;
  };
  struct Peer {
    std::vector<std::unique_ptr<Slot>> slots;  ///< control first
    std::vector<SocketAddress> addresses;      ///< empty until its card is read
    std::string name;                          ///< "(host node1, pid 4711)", or empty
    std::vector<Agreement> agreements;         ///< not asked for yet
    std::deque<Refused> refusals;              ///< the last ones
    bool awaited = false;                      ///< one that has not come is asked for
    bool expected = false;                     ///< data that no receive is posted for is waited for
    bool needed = false;                       ///< by this rank, which connects if the peer does not
    bool left = false;
    bool told = false;  ///< of this rank's failure
    uint64_t monitor = 0;
    uint64_t waiting_call = 0;                ///< the last call in which it said that it waits,
    std::vector<uint32_t> causes;             ///< and for whom
    std::optional<Clock::time_point> broken;  ///< when a data stream ended
  };
  struct Incoming {
    TcpHandshake handshake;
    Clock::time_point arrived;
  };

  TcpMesh(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config);
  void listen(const TcpConfig& config);

  // Moving things (tcp_mesh.cpp). All with mutex_ held.
  Peer& peer(int rank);
  /// To all other ranks at once.
  size_t most_connections() const { return static_cast<size_t>(size() - 1) * static_cast<size_t>(self_.streams); }
  Slot& slot(int rank, int stream) { return *peer(rank).slots[static_cast<size_t>(stream)]; }
  bool progress();
  bool anything_ready() const;
  /// Gives to the system what was posted for control. False while it has not taken all.
  bool said_all();
  /// Waits for an event, `limit` at most, with mutex_ released.
  void sleep(Lock& lock, Clock::duration limit);
  void apply(uint64_t token, uint32_t events);
  void watch(int fd, uint64_t token, bool known);
  /// The same for a moment that is too short for the system's timers.
  static void doze(Lock& lock);
  void wake() noexcept;
  /// Throws PeerError if somebody that is needed is gone.
  void check_peers();
  [[noreturn]] void lost(int rank, const std::string& how);
  /// Lets handlers of signals run, with mutex_ released. What one raises fails the group, and is thrown as its failure.
  void check_interrupts(Lock& lock, Interrupts& interrupts, const std::function<std::string()>& what);

  // Connecting (tcp_connect.cpp).
  void need(int rank, Lock& lock, Deadline deadline, const std::function<std::string()>& what);
  void read_card(int rank, Lock& lock, Deadline deadline, const std::function<std::string()>& what);
  std::string await_card(int rank, Lock& lock, Deadline deadline, const std::function<std::string()>& what);
  void accept_all();
  void accept_from_queue(int listener);
  bool has_room_for_stranger();
  bool advance_incoming();
  bool admit(TcpHandshake& handshake);
  bool advance_attempts();
  bool advance_attempt(int rank, int stream);
  void begin_missing(int rank);
  /// Ends the handshake, if there is one, so `reason` may not be a part of it.
  void next_address(int rank, int stream, const std::string& reason, bool refused);
  void open(int rank, int stream, TcpHandshake& handshake);
  /// Makes the lack the failure of the group; where there is one, frees a descriptor if it can, so that a peer more can
  /// hear of it.
  bool lacks_descriptors(const char* purpose, int error);
  /// Looks at the connections whose congestion control may still change.
  void settle_congestion();

  // Bad news (tcp_news.cpp).
  void check_data(int peer, const FrameHeader& header) override;
  void control(int peer, const FrameHeader& header, const std::string& payload) override;
  void receive_carried(int peer, const FrameHeader& header, void* to, size_t* done) override;
  [[noreturn]] void garbage(int peer, const char* fault) override;
  void check_carried();
  void check_agreement(int rank, const Agreement& agreement);
  void check_refusals(int rank);
  void tell_refusal(TcpStream& control, const Refused& refusal);
  void usher();
  [[noreturn]] void raise(FailureKind kind, const std::string& message);
  void tell_failure();
  void start_herald() noexcept;
  void herald();
  bool all_told();
  void close_all() noexcept;
  bool spare_descriptor();
  std::vector<uint32_t> waited_for() const;
  std::vector<uint32_t> causes() const;
  void declare_waiting();
  /// With what is known of them: nobody is asked for an error's sake.
  std::string names_of(const std::vector<uint32_t>& ranks);
  [[noreturn]] void time_out(Deadline deadline, const std::string& what);

  TcpSelf self_;
  TcpPlan plan_;
  const TcpCongestion congestion_;
  TcpCard card_;
  std::shared_ptr<KeyValues> keys_;
  const OwningProcess owner_;
  TcpFailure failure_;
  std::atomic<bool> left_{false};
  std::atomic<bool> heralded_{false};
  std::atomic<int> sleepers_{0};

  std::mutex mutex_;  // guards all below
  ProcessFd epoll_;
  ProcessFd wake_;
  ProcessFd spare_;  ///< given up when descriptors run out, to tell a peer
  std::vector<ProcessFd> listeners_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::string> names_;  ///< of all ranks, or empty
  std::vector<int> met_;            ///< whose Peer there is
  std::list<Incoming> incoming_;
  std::vector<std::pair<int, TcpStream*>> open_;     ///< all open streams and whose they are
  std::unordered_map<uint64_t, TcpStream*> tokens_;  ///< the same, by what epoll calls them
  std::vector<std::pair<int, int>> attempts_;        ///< rank and stream of each attempt
  std::vector<TcpStream*> unsettled_;                ///< open streams whose congestion control may change
  uint64_t next_token_ = kHandshakeToken + 1;
  bool handshakes_moved_ = false;
  bool listeners_moved_ = true;
  bool queue_left_ = false;  ///< there was no room for all who wait to be accepted

  Clock::time_point contended_until_{};  ///< a waiting rank sleeps at once: somebody else computes on its core

  // The call that is under way.
  uint64_t calls_ = 0;
  uint64_t number_ = 0;  ///< what its users number it
  bool in_call_ = false;
  std::deque<Refused> refusals_;  ///< the last calls that this rank did not make
  bool ushers_ = false;           ///< there is a thread that lets peers connect until this rank makes another call
  uint64_t ushered_ = 0;          ///< the number of the last call before that
  Signature signature_{};
  const std::function<std::string()>* what_ = nullptr;
  const std::function<std::string(int, const Signature&)>* mismatch_ = nullptr;
  std::vector<uint32_t> declared_;
  std::vector<uint32_t> absent_;  ///< for whom this rank waits by other means than the mesh

  /// None where payloads follow their headers. The last member: its engine may wake the mesh until it is gone.
  std::unique_ptr<TcpCarried> carried_;
};

}  // namespace ours
