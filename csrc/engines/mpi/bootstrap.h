#pragma once

#include <memory>

#include "engines/mpi_meeting.h"

namespace ours::mpi {

/// Plays the launcher for MPICH and its relatives, Intel MPI for one, where nobody started the ranks for MPI.
///
/// Those processes find each other through PMI-1: each one writes lines such as "cmd=put key=K value=V" to a
/// descriptor that its launcher left it, and the launcher answers. Here, a thread of the process answers itself, and
/// what others have to know goes through the group's keys. Every rank counts as a node of its own.
class Bootstrap {
 public:
  /// From now on, MPI_Init finds its launcher here.
  explicit Bootstrap(const MpiMeeting& meeting);

  /// MPI_Init has returned: all that follows is answered without the other ranks, which may be gone by then, and their
  /// keys.
  ~Bootstrap();
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

 private:
  struct State;

  int client_ = -1;
  std::shared_ptr<State> state_;
};

}  // namespace ours::mpi
