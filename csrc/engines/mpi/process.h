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

/// Throws Error if `code`, which an MPI function has returned, is not success. `what`: what was tried.
void check(int code, const std::string& what);

/// The name of the MPI library, such as "Open MPI v5.0.11". May be called before MPI is initialised.
std::string library_name();

/// Longer than any call of MPI takes, except for those that wait for other ranks.
constexpr std::chrono::milliseconds kCallTimeout{100};

/// While an object of this class exists, calls with MPI_COMM_WORLD return their errors, which otherwise end the process
/// unless the program has set another handler. The last object restores that handler.
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

/// MPI in this process. There is one, which cannot be started again after it has ended.
class Process {
 public:
  static Process& get();

  /// What this process reports to the other ranks. Throws Error if MPI cannot be used any more, and TimeoutError if
  /// another thread is initialising it until the deadline.
  RankInfo introduce(const MpiMeeting& meeting);

  /// Initialises MPI, unless that has been done. It returns when all processes of the job have done so. A caller that
  /// stops waiting for it calls gave_up().
  void initialise(const MpiMeeting& meeting, const Plan& plan);

  /// Says that MPI did not return from initialising, or from making a group. Neither is tried again, and MPI is not
  /// ended. Existing groups go on, unless MPI takes only one call at a time.
  void gave_up() { stuck_ = true; }

  /// Held during calls of MPI; empty if MPI takes calls from several threads at once.
  using Calls = std::unique_lock<std::timed_mutex>;

  /// Waits while another thread calls MPI. Throws Error if that thread's call is given up, and TimeoutError.
  Calls lock(Deadline deadline);

  /// For callers that must not wait as long as the making of a group may take: nothing if the other thread takes longer
  /// than `patience`.
  std::optional<Calls> try_lock(std::chrono::milliseconds patience);

  /// Why MPI may not be called, for messages, or null: in a forked child, after MPI has ended, or while a call hangs
  /// and MPI takes only one at a time.
  const char* obstacle() const;
  bool usable() const { return obstacle() == nullptr; }

  /// Surrounds everything for which MPI is used, such as a message or the making of a group, from before its first call
  /// until after its last: MPI is not ended meanwhile. Throws Error if MPI is being ended.
  void begin_use();
  void end_use() noexcept { --uses_; }

  /// Keeps the memory of a message that cannot be recalled until MPI has finished with it.
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

/// Surrounds a use of MPI: see Process::begin_use().
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
