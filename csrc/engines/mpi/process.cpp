#include "engines/mpi/process.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>

#include "common/error.h"

namespace ours::mpi {

namespace {

/// How often a thread that waits for another thread's call of MPI checks whether that call is given up.
constexpr std::chrono::milliseconds kStuckInterval{20};

constexpr const char* kStuck = "MPI did not come back from an earlier call in this process";
constexpr const char* kForked = "MPI cannot be used in a child that was forked after MPI was started";
constexpr const char* kEnded = "MPI has ended in this process";

bool is_initialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized != 0;
}

bool is_finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

/// Whether this is a child that was forked after MPI was started, by ourddp or by the program.
std::atomic<bool> g_forked{false};

void after_fork() {
  if (is_initialized()) g_forked = true;
}

// Forks are noticed from when this library is loaded, which the first group that uses MPI does.
[[maybe_unused]] const int g_watches_forks = pthread_atfork(nullptr, nullptr, after_fork);

const char* level_name(int level) {
  if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
  if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
  if (level == MPI_THREAD_SERIALIZED) return "MPI_THREAD_SERIALIZED";
  return "MPI_THREAD_MULTIPLE";
}

}  // namespace

void check(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(what + ": " + std::string(text, static_cast<size_t>(length)));
}

std::string library_name() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  // The name ends at the first line break or comma, and runs of blanks become one.
  std::string name;
  for (const char* at = text; *at != '\0' && *at != ',' && *at != '\n'; ++at) {
    const bool blank = *at == ' ' || *at == '\t' || *at == ':';
    if (!blank) {
      name += *at;
    } else if (!name.empty() && name.back() != ' ') {
      name += ' ';
    }
  }
  return name;
}

std::mutex ErrorsReturn::mutex_;
int ErrorsReturn::alive_ = 0;
MPI_Errhandler ErrorsReturn::before_ = MPI_ERRHANDLER_NULL;

ErrorsReturn::ErrorsReturn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (alive_++ > 0) return;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before_);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

ErrorsReturn::~ErrorsReturn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--alive_ > 0) return;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, before_);
  MPI_Errhandler_free(&before_);
}

Process& Process::get() {
  // Never destroyed, since threads may still use it while the process ends.
  static auto* process = new Process();
  return *process;
}

const char* Process::obstacle() const {
  if (g_forked) return kForked;
  if (stuck_ && serialized_) return kStuck;
  return ending_ || is_finalized() ? kEnded : nullptr;
}

void Process::begin_use() {
  ++uses_;
  // Either finalize() sees this use, or this sees that MPI is ending.
  if (!ending_) return;
  --uses_;
  throw Error(kEnded);
}

Process::Calls Process::lock(Deadline deadline) {
  for (;;) {
    if (auto calls = try_lock(kStuckInterval)) return std::move(*calls);
    if (stuck_) throw Error(kStuck);
    if (deadline.passed()) {
      throw TimeoutError("another thread of this process, which waits in MPI for other ranks, kept it busy for " +
                         std::to_string(deadline.timeout().count()) + " ms");
    }
  }
}

std::optional<Process::Calls> Process::try_lock(std::chrono::milliseconds patience) {
  if (!serialized_) return Calls();
  Calls calls(calls_, std::try_to_lock);
  if (!calls.owns_lock() && (patience.count() == 0 || !calls.try_lock_for(patience))) return std::nullopt;
  return calls;
}

std::unique_lock<std::timed_mutex> Process::lock_start(Deadline deadline) {
  std::unique_lock<std::timed_mutex> starting(starting_, deadline.at());
  if (starting.owns_lock()) return starting;
  throw TimeoutError("another thread of this process is initialising MPI, and was not done within " +
                     std::to_string(deadline.timeout().count()) +
                     " ms: all processes of the MPI job have to do so at the same time");
}

RankInfo Process::introduce(const MpiMeeting& meeting) {
  if (g_forked) throw Error(kForked);
  if (stuck_) throw Error(kStuck);
  if (is_finalized()) throw Error("MPI_Finalize has been called in this process, and MPI cannot be started again");
  RankInfo info;
  info.library = library_name();
  info.job = meeting.launcher.job;
  info.rank = meeting.launcher.rank;
  const auto starting = lock_start(meeting.deadline);
  if (!is_initialized()) {
    info.state = meeting.launcher.job.empty() ? RankInfo::State::Alone : RankInfo::State::Launched;
    return info;
  }
  read_level();
  const auto calls = lock(meeting.deadline);
  check(MPI_Comm_rank(MPI_COMM_WORLD, &info.rank), "MPI_Comm_rank");
  info.state = RankInfo::State::Running;
  if (info.job.empty()) info.job = "of one process";
  return info;
}

/// Finds out which threads may call MPI, which depends on how it was initialised.
void Process::read_level() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Query_thread(&level), "MPI_Query_thread");
  if (level < MPI_THREAD_SERIALIZED) {
    throw Error(
        "MPI was initialised with the thread level " + std::string(level_name(level)) +
        ", but groups send from threads of their own: initialise it with MPI_THREAD_MULTIPLE (MPI_Init_thread; in "
        "mpi4py that is the default), or leave that to ourddp");
  }
  serialized_ = level == MPI_THREAD_SERIALIZED;
}

void Process::initialise(const MpiMeeting& meeting, const Plan& plan) {
  const auto starting = lock_start(meeting.deadline);
  if (ready_) {
    const auto calls = lock(meeting.deadline);
    check_place(plan.ranks.at(static_cast<size_t>(meeting.rank)), plan.ranks);
    return;
  }
  if (!is_initialized()) start();
  read_level();
  const auto calls = lock(meeting.deadline);
  check_place(plan.ranks.at(static_cast<size_t>(meeting.rank)), plan.ranks);
  void* value = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&value), &found), "MPI_Comm_get_attr");
  constexpr int kAlwaysAllowed = 32767;
  highest_tag_ = found != 0 ? *static_cast<int*>(value) : kAlwaysAllowed;
  ready_ = true;
}

void Process::start() {
  int level = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  // This runs before what MPI's library registers for the end of the process.
  std::atexit(at_exit);
}

/// Checks that MPI sees the job that the launcher described to this process.
void Process::check_place(int expected, const std::vector<int>& ranks) {
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  if (rank == expected && *std::max_element(ranks.begin(), ranks.end()) < size) return;
  throw Error("this process was started as rank " + std::to_string(expected) + " of an MPI job, but " + library_name() +
              " takes it for rank " + std::to_string(rank) + " of " + std::to_string(size) +
              ": start the ranks by the mpirun or mpiexec of that MPI");
}

void Process::abandon(MPI_Request request, Buffer buffer) {
  const std::lock_guard<std::mutex> lock(abandoned_mutex_);
  abandoned_.push_back({request, std::move(buffer)});
}

void Process::sweep() {
  const std::lock_guard<std::mutex> guard(abandoned_mutex_);
  const auto calls = try_lock(kCallTimeout);
  if (!calls) return;
  for (auto it = abandoned_.begin(); it != abandoned_.end();) {
    int done = 0;
    if (MPI_Test(&it->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
    it = done != 0 ? abandoned_.erase(it) : std::next(it);
  }
}

void Process::at_exit() {
  Process& process = get();
  if (process.usable()) process.finalize();
}

/// Ends MPI if this library initialised it, since mpirun takes a process that ends without that for a failed one. It
/// does not while another thread uses MPI (Python does not wait for daemon threads) or a call hangs, or if a message is
/// left over: its receiver is gone or has given up, and MPI might wait for it forever.
void Process::finalize() {
  ending_ = true;
  if (stuck_ || uses_ > 0) return;
  sweep();
  if (abandoned_.empty()) MPI_Finalize();
}

}  // namespace ours::mpi
