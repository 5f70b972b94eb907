#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ours {

class TcpMesh;

/// Keeps a process's idle connections within options().idle_connections: beyond that, it lets the groups that have not
/// been used for longest offer their peers to close theirs. Nothing runs in the background: the threads that use a mesh
/// see to the others now and then, and so peers get their answers. All functions may be called from any thread.
class TcpIdle {
 public:
  static void enter(const std::shared_ptr<TcpMesh>& mesh);

  /// Somebody is about to use a mesh. Returns the number of this use among all of the process.
  static uint64_t count_use() noexcept;

  /// Lets groups offer to close their connections as long as more than `most` are idle. Returns whether some did.
  static bool see_to_others(size_t most);
};

/// The number of idle connections that a process keeps if it may have `files` open files and the option is `wanted`.
size_t idle_connections_to_keep(int64_t wanted, uint64_t files);

}  // namespace ours
