#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace ours {

/// Moves the data of a group's messages between nodes in place of the mesh's own data connections: MPI, or another
/// backend of torch.distributed. The mesh stays what it is: its connections carry the header of each message, so all
/// checks of what is called, the order of messages, agreements, and the news of failures do not depend on the engine.
///
/// Calls come from one thread at a time.
class Engine {
 public:
  /// One message on its way. Destroying it ends it: its memory is not touched afterwards, whatever became of it.
  class Transfer {
   public:
    virtual ~Transfer() = default;

    /// Whether the memory may be used again. Never waits. Throws Error where the transfer failed.
    virtual bool done() = 0;
  };

  virtual ~Engine() = default;

  /// "mpi (Open MPI 5.0.11)", "gloo": for messages.
  virtual std::string name() const = 0;

  /// Begins to send to `peer`, a rank of the group, and never waits. `number` is that of the message among those of
  /// this rank to `peer`; each is received with the same number, and in their order. Once the peer has it, what the
  /// peer answers may be received to the same place, even before done() says that the transfer is over.
  virtual std::unique_ptr<Transfer> send(int peer, uint32_t number, const void* data, size_t bytes) = 0;

  /// Begins to receive what `peer` has begun to send, of just as many bytes.
  virtual std::unique_ptr<Transfer> receive(int peer, uint32_t number, void* data, size_t bytes) = 0;

  /// What an engine with threads of its own calls, from any thread and never while send(), receive(), done() or a
  /// destructor run, when a transfer may have become done.
  virtual void set_waker(std::function<void()> wake) = 0;

  /// Whether transfers only move while somebody asks done(), so that who waits for one must not sleep.
  virtual bool polls() const = 0;

  /// The group has failed, or left: nothing more is sent or received. Never waits for peers.
  virtual void close() noexcept = 0;
};

}  // namespace ours
