#pragma once

#include <string>

#include "common/own_name.h"
#include "common/process_fd.h"
#include "transport/tcp/tcp_wire.h"

namespace ours {

/// The identity of a rank in handshakes, and the secret that proves it.
struct TcpSelf {
  int rank = 0;
  int size = 1;
  int streams = 2;  ///< a peer, that for control included
  std::string host;
  int32_t pid = 0;
  SipKey secret{};

  /// The connections of a rank that is connected to all others.
  size_t most_connections() const { return static_cast<size_t>(size - 1) * static_cast<size_t>(streams); }
  /// "rank 0 (host node1, pid 4711)"
  std::string describe() const { return "rank " + std::to_string(rank) + ' ' + process_name(host, pid); }
};

Nonce draw_nonce();

/// The first messages on a new connection, at either end, without ever waiting. Each side proves that it knows the
/// secret by its answer to a random number from the other side, so an overheard answer is of no use.
class TcpHandshake {
 public:
  enum class State { Going, Done, Broken };

  /// The end that accepts.
  explicit TcpHandshake(ProcessFd fd);
  /// The end that connects, to stream `stream` of rank `to`, whose card has that number of its mesh.
  TcpHandshake(ProcessFd fd, const TcpSelf& self, int to, uint32_t mesh, int stream);

  /// Does what can be done without waiting.
  State advance();

  /// At the end that accepts: a hello for mesh() has come, which must be shown to that mesh.
  bool awaits_mesh() const { return step_ == Step::Meet; }
  uint32_t mesh() const { return mesh_; }
  void meet(const TcpSelf& self);

  /// At the end that accepts: the hello is that of a peer, and must be answered.
  bool awaits_verdict() const { return step_ == Step::Judge; }
  void answer(Verdict verdict);

  /// Whether the other side, which waits for an answer, has ended the connection.
  bool is_deserted() const;

  /// Whether there is a connection, even if only to a stranger.
  bool connected() const { return step_ != Step::Connect && !refused_; }
  /// At the end that connects: whether it has answered the challenge with its hello.
  bool said_hello() const { return said_hello_; }
  /// Whether nothing listened there, or nothing that belongs to the group.
  bool refused() const { return refused_; }

  int fd() const { return fd_.get(); }
  ProcessFd take_fd() { return std::move(fd_); }
  int peer() const { return peer_; }
  int stream() const { return stream_; }
  /// The reason why the handshake failed.
  const std::string& reason() const { return reason_; }

 private:
  enum class Step { Connect, Send, Receive, Meet, Judge, Done, Broken };

  State state() const;
  void finish_connecting();
  void write();
  void read();
  void received();
  void say(const void* message, size_t bytes, Step after);
  void hear(size_t bytes);
  void broken(const std::string& reason);

  ProcessFd fd_;
  SipKey secret_{};
  int own_rank_ = -1;
  bool accepting_;
  Step step_;
  Step after_ = Step::Receive;  ///< what follows once all is sent
  int peer_ = -1;
  int stream_ = -1;
  uint32_t mesh_ = 0;
  bool said_hello_ = false;
  bool refused_ = false;
  std::string reason_;
  Nonce challenge_{};
  Hello hello_{};
  std::string out_;
  std::string in_;
  size_t expected_ = 0;
};

}  // namespace ours
