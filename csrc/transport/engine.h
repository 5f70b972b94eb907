#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace ours {

/// Moves the payloads of a group's messages between nodes: MPI, or another backend of torch.distributed. The mesh's own
/// connections still carry the headers, so checks, the order of messages and the propagation of failures do not depend
/// on the engine. Calls come from one thread at a time.
class Engine {
 public:
  /// One message on its way. Destroying it ends it: its memory is not touched afterwards.
  class Transfer {
   public:
    virtual ~Transfer() = default;

    /// Whether the memory may be used again. Never waits. Throws Error if the transfer failed.
    virtual bool done() = 0;
  };

  virtual ~Engine() = default;

  /// "mpi (Open MPI 5.0.11)", "gloo": for error messages.
  virtual std::string name() const = 0;

  /// Begins to send to `peer`, a rank of the group, and never waits. `number` counts the messages from this rank to
  /// `peer`; each is received with the same number, and in their order. Once the peer has the message, its answer may
  /// be received to the same memory, even before done() says that the transfer is over.
  virtual std::unique_ptr<Transfer> send(int peer, uint32_t number, const void* data, size_t bytes) = 0;

  /// Begins to receive the message of that length that `peer` has begun to send.
  virtual std::unique_ptr<Transfer> receive(int peer, uint32_t number, void* data, size_t bytes) = 0;

  /// An engine with threads of its own calls `wake` when a transfer may have become done, from any thread, but never
  /// while send(), receive(), done() or a destructor runs.
  virtual void set_waker(std::function<void()> wake) = 0;

  /// Whether transfers move only while done() is called, so that a thread that waits for one must not sleep.
  virtual bool polls() const = 0;

  /// Called when the group has failed or left: nothing more is sent or received. Never waits for peers.
  virtual void close() noexcept = 0;
};

}  // namespace ours
