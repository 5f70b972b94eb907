#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "common/process_fd.h"
#include "transport/tcp/tcp_wire.h"

namespace ours {

/// One connection to a peer: frames in both directions, in the order in which they were posted, without ever waiting.
/// Frames may be posted before there is a connection. A payload is read straight to where its receiver wants it.
/// Until a receive is posted, it stays with the system, which holds the sender back.
class TcpStream {
 public:
  /// Takes what arrives.
  class Handler {
   public:
    virtual ~Handler() = default;
    /// A header of data has come, which may be early. Throws if it should not have.
    virtual void check_data(int peer, const FrameHeader& header) = 0;
    /// A header of data has come for the posted receive, and an engine brings its payload. Throws if it should not
    /// have come.
    virtual void receive_by_engine(int peer, const FrameHeader& header, void* to, size_t* done) = 0;
    /// A frame of control has come.
    virtual void hear(int peer, const FrameHeader& header, const std::string& payload) = 0;
    /// The bytes that came make no sense.
    virtual void garbage(int peer, const char* fault) = 0;
  };

  TcpStream(int peer, bool data, Handler& handler) : peer_(peer), data_(data), handler_(handler) {}

  void open(ProcessFd fd) { fd_ = std::move(fd); }
  bool is_open() const { return fd_.valid(); }
  int fd() const { return fd_.get(); }
  /// Ends the connection after what was sent has arrived.
  void finish();
  /// Sends what can be sent at once, and reads nothing.
  void send_now();

  /// The frames that the system has not taken yet, without those that hold() keeps back.
  size_t sending() const { return sends_.size(); }
  /// The frames that the system has taken to send, and those of data that were taken in.
  uint64_t sent() const { return sent_; }
  uint64_t taken() const { return taken_; }
  /// Keeps back what is posted from now on.
  void hold() { held_ = true; }
  /// Sends what was kept back.
  void release();
  /// Tells the peer that nothing more comes on this connection.
  void end_sending();
  /// Closes the connection. What is posted waits for the next one, and so does what was kept back.
  void part();

  /// `payload` must stay until all of it is in the system's hands, which increments `done`, or until forget().
  void post_send(const FrameHeader& header, const void* payload, size_t* done);
  /// The same with a payload that the stream keeps.
  void post_send(const FrameHeader& header, std::string payload);

  /// The next data frame not yet claimed goes to `to`. header.call, phase, part, total and bytes must be what comes.
  void post_receive(const FrameHeader& header, void* to, size_t* done);

  /// Drops all references to memory of callers. For groups that failed, since a frame that was begun cannot be
  /// completed.
  void forget();

  /// Sends and reads what can be moved now; returns true if anything was. Ends after a while, so that other streams
  /// get a turn.
  bool advance();
  void set_ready(bool readable, bool writable) {
    readable_ = readable_ || readable;
    writable_ = writable_ || writable;
  }
  /// Whether more could be moved at once.
  bool ready() const;

  /// A header of data that has arrived and for which nothing is posted yet, or null.
  const FrameHeader* early() const { return in_payload_ && receives_.empty() ? &header_ : nullptr; }

  /// Whether the peer sends nothing more. error() is not 0 if the connection broke, which writing may show before.
  bool ended() const { return ended_; }
  /// Whether the stream has ended, and something that was posted will never be done.
  bool starved() const { return (ended_ && has_receives() && !can_take()) || ((ended_ || error_ != 0) && has_sends()); }
  /// Whether the stream has ended, and all that came has been taken.
  bool dry() const { return ended_ && early() == nullptr && !can_take(); }
  int error() const { return error_; }
  bool has_sends() const { return !sends_.empty() || !kept_back_.empty(); }
  bool has_receives() const { return !receives_.empty(); }
  bool has_posted() const { return has_sends() || has_receives(); }

 private:
  struct Send {
    FrameHeader header;
    const std::byte* payload;
    std::string own;
    size_t* done;
    size_t sent;  ///< bytes of header and payload
  };
  struct Receive {
    FrameHeader header;
    std::byte* to;
    size_t* done;
  };

  bool write();
  bool read();
  /// Whether the buffer has enough for the next step.
  bool can_take() const;
  bool fill();
  /// How many bytes to read into the buffer after the messages of the next `receives` receives: only the header if a
  /// message is so long that the rest should go straight to its place.
  size_t room_after(size_t receives) const;
  bool take_header();
  bool take_payload();
  bool take_control();
  size_t buffered() const { return buffer_end_ - buffer_begin_; }
  void post(Send send) { (held_ ? kept_back_ : sends_).push_back(std::move(send)); }
  void broke(int error);
  void check_expected(const FrameHeader& expected) const;

  int peer_;
  bool data_;
  Handler& handler_;
  ProcessFd fd_;
  bool readable_ = false;
  bool writable_ = false;
  bool ended_ = false;
  int error_ = 0;

  std::deque<Send> sends_;
  std::deque<Send> kept_back_;
  bool held_ = false;
  std::deque<Receive> receives_;
  uint64_t sent_ = 0;
  uint64_t taken_ = 0;

  static constexpr size_t kBufferBytes = 32 * 1024;
  std::vector<std::byte> buffer_;
  size_t buffer_begin_ = 0;
  size_t buffer_end_ = 0;
  FrameHeader header_;
  bool in_payload_ = false;
  size_t received_ = 0;  ///< of the payload
  std::string control_;
};

}  // namespace ours
