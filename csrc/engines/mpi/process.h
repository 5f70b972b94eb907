#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engines/mpi/buffers.h"
#include "engines/mpi_meeting.h"
#include "engines/mpi_plan.h"

namespace ours::mpi {

/// Throws Error for what an MPI function returned, unless that is success. `what`: what was tried.
void check(int code, const std::string& what);

/// "Open MPI v5.0.11". May be called before MPI is initialised.
std::string library_name();

/// No call of MPI takes so long, except for those that wait for other ranks.
constexpr std::chrono::milliseconds kCallTimeout{100};

/// While one lives, errors of calls with MPI_COMM_WORLD are returned, which else end the process unless the program
/// arranged for something else: that is what the last one that lives leaves again.
class ErrorsReturn {
 public:
  ErrorsReturn();
  ~ErrorsReturn();
  ErrorsReturn(const ErrorsReturn&) = delete;
  ErrorsReturn& operator=(const ErrorsReturn&) = delete;

 private:
  static std::mutex mutex_;
  static int alive_;
  static MPI_Errhandler before_;
};

/// MPI in this process. There is one, and it cannot be had again once it has ended.
class Process {
 public:
  static Process& get();

  /// What this process says of itself to the other ranks. Throws Error where MPI cannot be used any more, and
  /// TimeoutError where another thread initialises it all the time.
  Word introduce(const MpiMeeting& meeting);

  /// Initialises MPI, unless that has happened. All processes of the job have to do so before it returns. Who waits for
  /// it says gave_up() if it takes too long.
  void initialise(const MpiMeeting& meeting, const Plan& plan);

  /// MPI did not come back from initialising, or from making a group: neither is tried again, and MPI is not ended.
  /// Groups that have been made go on, unless MPI takes one call at a time.
  void gave_up() { stuck_ = true; }

  /// Held around calls of MPI; empty where MPI takes calls from several threads at a time.
  using Calls = std::unique_lock<std::timed_mutex>;

  /// Waits while another thread calls MPI. Throws Error where that one does not come back, and TimeoutError.
  Calls lock(Deadline deadline);

  /// The same for who must not wait for long, as the making of a group may last: nothing if the other thread takes
  /// longer.
  std::optional<Calls> try_lock(std::chrono::milliseconds patience);

  /// Why MPI may not be called, for messages, or null: in a forked child, after MPI has ended, while a call hangs and
  /// MPI takes one at a time.
  const char* obstacle() const;
  bool usable() const { return obstacle() == nullptr; }

  /// Said of what MPI does for this process, a message or the making of a group, from before its first call until after
  /// its last: MPI is not ended meanwhile. Throws Error if it is being ended.
  void begin_use();
  void end_use() noexcept { --uses_; }

  /// Takes what belongs to a message that cannot be recalled: it is kept until MPI is done with it.
  void abandon(MPI_Request request, Buffer buffer);

  int highest_tag() const { return highest_tag_; }

 private:
  Process() = default;

  std::unique_lock<std::timed_mutex> lock_start(Deadline deadline);
  static void start();
  void read_level();
  static void check_place(int expected, const std::vector<int>& ranks);
  void sweep();
  static void at_exit();
  void finalize();

  struct Abandoned {
    MPI_Request request;
    Buffer buffer;
  };

  std::timed_mutex starting_;
  std::timed_mutex calls_;
  std::atomic<bool> stuck_{false};
  std::atomic<bool> serialized_{false};
  std::atomic<bool> ending_{false};
  std::atomic<int> uses_{0};
  bool ready_ = false;
  int highest_tag_ = 0;

  std::mutex abandoned_mutex_;
  std::list<Abandoned> abandoned_;
};

/// A use of MPI: see Process::begin_use().
class Use {
 public:
  Use() { Process::get().begin_use(); }
  ~Use() { end(); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  void end() noexcept {
    if (!std::exchange(ended_, true)) Process::get().end_use();
  }

 private:
  bool ended_ = false;
};

}  // namespace ours::mpi
