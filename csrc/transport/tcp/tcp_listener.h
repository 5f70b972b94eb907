#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/network_interfaces.h"
#include "common/owning_process.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_handshake.h"

namespace ours {

/// Where a process waits for the peers of all its groups. Those that connect are strangers until they have proved which
/// rank of which group they are, and then belong to that group's mesh. There is room for all connections that the
/// groups can have and some more. When it is taken, a stranger that has said nothing for a while makes way for the next
/// one, and the others wait in the system's queue.
///
/// It keeps some descriptors for the time when there are no others, so that ranks which connect then can be told why
/// they cannot.
///
/// The threads that move a mesh serve the others as well. Only once the process has left a group, a thread of its own
/// does, so that peers hear that the group is not here even while the process makes no calls. All functions may be
/// called from any thread, and wait for nothing but each other.
class TcpListener : public std::enable_shared_from_this<TcpListener> {
 public:
  /// A mesh, as its peers find it here.
  struct Place {
    Place(uint32_t number, std::function<void()> wake) : number(number), wake(std::move(wake)) {}
    const uint32_t number;
    const std::function<void()> wake;
    std::atomic<bool> has_arrived{false};  ///< there are some in `arrived`

   private:
    friend class TcpListener;  // all with its lock
    bool knows_self = false;
    TcpSelf self;
    std::vector<TcpHandshake> arrived;
  };

  /// One of this process for such a configuration, with others who hold it. It listens at the addresses of the
  /// interfaces that `config` asks for. Throws Error.
  static std::shared_ptr<TcpListener> of(const TcpConfig& config, const std::string& congestion);

  TcpListener(const TcpConfig& config, const std::string& congestion);

  /// The number of meshes that share it.
  size_t places();
  const std::vector<SocketAddress>& addresses() const { return own_.addresses; }
  /// How many of them, from the first on, share the data.
  size_t paths() const { return own_.paths; }
  /// A descriptor that can be read when there may be something to do.
  int fd() const { return epoll_.get(); }

  /// Lets peers find a mesh. `wake` is called whenever one has arrived, until close(); it must not wait.
  std::shared_ptr<Place> open(std::function<void()> wake);
  /// The secret of the mesh is known, and so are its peers. Those that came earlier have been kept waiting.
  void admit(Place& place, const TcpSelf& self);
  /// Takes the peers that have arrived; their handshakes await a verdict.
  std::vector<TcpHandshake> take_arrived(Place& place);
  void close(const std::shared_ptr<Place>& place) noexcept;

  /// Whether there is something to do although the descriptor does not say so.
  bool is_busy() const { return busy_.load(std::memory_order_acquire); }
  /// Accepts connections and goes on with the handshakes of strangers. Returns 0, or, if there is no descriptor for the
  /// next connection, the error that says so.
  int serve();

  /// Closes one of the descriptors that are kept. Returns false if there is none.
  bool give_up_spare();

  /// Ends the connection of the stranger that has been here for longest. Returns false if there is none.
  bool send_stranger_away();

 private:
  struct Stranger {
    TcpHandshake handshake;
    Clock::time_point arrived;
  };

  void keep_spares();
  /// Starts the thread, with the lock.
  void attend() noexcept;
  void serve_until_closed();
  /// Lets a stranger know that it may come again: one whose group is not here hears the connection end instead.
  static void cut_off(const Stranger& stranger);
  int accept_from_queue(int listener);
  bool make_room();
  /// Goes on with a stranger. Returns false if it is none any more.
  bool advance(Stranger& stranger, Clock::time_point now);

  const OwningProcess owner_;
  ProcessFd epoll_;
  std::vector<ProcessFd> listeners_;
  OwnAddresses own_;
  std::atomic<bool> busy_{false};

  std::mutex mutex_;  // guards all below, and the insides of places
  uint32_t last_number_ = 0;
  std::map<uint32_t, std::shared_ptr<Place>> places_;
  std::vector<ProcessFd> spares_;
  ProcessFd end_;  ///< ends the sleep of the thread; valid while there is one
  std::list<Stranger> strangers_;
  bool queue_left_ = false;  ///< some connections could not be accepted yet
};

}  // namespace ours
