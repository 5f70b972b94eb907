#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <future>
#include <thread>

#include "common/error.h"
#include "engines/mpi/buffers.h"
#include "engines/mpi/process.h"
#include "engines/mpi_meeting.h"
#include "engines/mpi_plan.h"

namespace ours::mpi {

namespace {

/// How long a message waits for another thread's call of MPI. Only the making of a group takes long.
constexpr std::chrono::milliseconds kBeginTimeout = std::chrono::minutes(5);

/// Runs `call`, which may never return, in a thread of its own. Returns whether it has returned before the deadline,
/// and throws what it throws. `call` must own what it uses.
template <class Call>
bool wait_for(Call call, Deadline deadline) {
  std::packaged_task<void()> task(std::move(call));
  std::future<void> end = task.get_future();
  std::thread(std::move(task)).detach();
  if (end.wait_until(deadline.at()) != std::future_status::ready) return false;
  end.get();
  return true;
}

/// The communicator of a group, which its engine and its messages share.
class Communicator {
 public:
  Communicator(const MpiMeeting& meeting, const Plan& plan) {
    Process& process = Process::get();
    const Use use;
    const auto calls = process.lock(meeting.deadline);
    const ErrorsReturn errors;
    MPI_Group world = MPI_GROUP_NULL;
    MPI_Group members = MPI_GROUP_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    const int code = MPI_Group_incl(world, static_cast<int>(plan.ranks.size()), plan.ranks.data(), &members);
    MPI_Group_free(&world);
    check(code, "MPI_Group_incl");
    // The tag keeps groups apart that are made at the same time.
    const int tag = static_cast<int>(plan.nonce % static_cast<unsigned>(process.highest_tag()));
    const int created = MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &comm_);
    MPI_Group_free(&members);
    check(created, "MPI_Comm_create_group");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }

  /// Frees the communicator, unless a message may still be under way, which the next communicator of that number would
  /// get.
  ~Communicator() {
    Process& process = Process::get();
    if (!clean || comm_ == MPI_COMM_NULL || !process.usable()) return;
    try {
      const Use use;
      if (const auto calls = process.try_lock(kCallTimeout)) MPI_Comm_free(&comm_);
    } catch (const Error&) {
      // MPI is being ended, and the communicator with it.
    }
  }

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm comm() const { return comm_; }

  Buffers buffers;
  std::atomic<bool> clean{true};

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

/// A message in a buffer of its own. MPI may use a message's memory until it ends, but the group's memory has to be
/// free as soon as a call fails. The copies are short and in the cache.
class Message final : public Engine::Transfer {
 public:
  /// A message to send. It ends when it has been received, so that a message that nobody receives is noticed.
  Message(std::shared_ptr<Communicator> communicator, int peer, int tag, const void* data, size_t bytes)
      : communicator_(std::move(communicator)), buffer_(communicator_->buffers.take(bytes)), bytes_(bytes) {
    if (bytes > 0) std::memcpy(buffer_.memory.get(), data, bytes);
    const auto calls = Process::get().lock(Deadline::after(kBeginTimeout));
    begin(MPI_Issend(buffer_.memory.get(), static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_->comm(),
                     &request_));
  }

  Message(std::shared_ptr<Communicator> communicator, int peer, int tag, void* data, size_t bytes)
      : communicator_(std::move(communicator)),
        buffer_(communicator_->buffers.take(bytes)),
        receives_(true),
        target_(data),
        bytes_(bytes) {
    const auto calls = Process::get().lock(Deadline::after(kBeginTimeout));
    begin(MPI_Irecv(buffer_.memory.get(), static_cast<int>(bytes), MPI_BYTE, peer, tag, communicator_->comm(),
                    &request_));
  }

  ~Message() override {
    if (ended_) return;
    communicator_->clean = false;
    Process& process = Process::get();
    if (process.usable() && receives_) cancel();
    if (!ended_) process.abandon(request_, std::move(buffer_));
  }

  bool done() override {
    if (ended_) return true;
    if (const char* obstacle = Process::get().obstacle()) {
      throw Error(std::string(obstacle) + "; a message was under way");
    }
    MPI_Status status;
    if (!test(&status)) return false;
    if (receives_) take(status);
    communicator_->buffers.give_back(std::move(buffer_));
    return true;
  }

 private:
  void begin(int code) {
    ended_ = code != MPI_SUCCESS;
    if (ended_) communicator_->clean = false;
    check(code, receives_ ? "MPI_Irecv" : "MPI_Issend");
  }

  bool test(MPI_Status* status) {
    const auto calls = Process::get().try_lock(std::chrono::milliseconds(0));
    if (!calls) return false;
    int flag = 0;
    const int code = MPI_Test(&request_, &flag, status);
    ended_ = flag != 0 || code != MPI_SUCCESS;
    if (ended_) use_.end();
    if (code != MPI_SUCCESS) communicator_->clean = false;
    check(code, receives_ ? "a message did not arrive by MPI" : "a message could not be sent by MPI");
    return ended_;
  }

  void take(const MPI_Status& status) {
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    if (count != static_cast<int>(bytes_)) {
      throw Error("a message of " + std::to_string(count) + " bytes arrived by MPI instead of one of " +
                  std::to_string(bytes_));
    }
    if (bytes_ > 0) std::memcpy(target_, buffer_.memory.get(), bytes_);
  }

  /// Cancels a receive whose message has not arrived.
  void cancel() noexcept {
    const auto calls = Process::get().try_lock(kCallTimeout);
    int flag = 0;
    if (!calls || MPI_Cancel(&request_) != MPI_SUCCESS) return;
    ended_ = MPI_Test(&request_, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && flag != 0;
  }

  Use use_;
  const std::shared_ptr<Communicator> communicator_;
  Buffer buffer_;
  const bool receives_ = false;
  void* const target_ = nullptr;
  const size_t bytes_;
  MPI_Request request_ = MPI_REQUEST_NULL;
  bool ended_ = false;
};

class MpiEngine final : public Engine {
 public:
  explicit MpiEngine(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)), name_("mpi (" + library_name() + ")") {}

  std::string name() const override { return name_; }

  std::unique_ptr<Transfer> send(int peer, uint32_t number, const void* data, size_t bytes) override {
    check_open(bytes);
    return std::make_unique<Message>(communicator_, peer, tag(number), data, bytes);
  }

  std::unique_ptr<Transfer> receive(int peer, uint32_t number, void* data, size_t bytes) override {
    check_open(bytes);
    return std::make_unique<Message>(communicator_, peer, tag(number), data, bytes);
  }

  void set_waker(std::function<void()>) override {}
  bool polls() const override { return true; }
  void close() noexcept override { closed_ = true; }

 private:
  void check_open(size_t bytes) const {
    if (closed_) throw Error("nothing is sent by MPI any more: the group has ended");
    if (const char* obstacle = Process::get().obstacle()) throw Error(obstacle);
    if (bytes > INT_MAX) throw InvalidArgument("a message by MPI has at most 2 GiB");
  }

  /// Messages to the same peer with equal tags do no harm, since they stay in order.
  static int tag(uint32_t number) {
    return static_cast<int>(number % (static_cast<uint32_t>(Process::get().highest_tag()) + 1));
  }

  const std::shared_ptr<Communicator> communicator_;
  const std::string name_;
  std::atomic<bool> closed_{false};
};

/// Reports why this rank cannot take part to those of the other ranks that have not given up.
void report_failure(const MpiMeeting& meeting, const std::string& reason) {
  try {
    agree(meeting, RankInfo::failure(reason));
  } catch (const std::exception&) {
  }
}

Engine* open(const MpiMeeting& meeting) {
  Process& process = Process::get();
  RankInfo info;
  try {
    info = process.introduce(meeting);
  } catch (const TimeoutError& e) {
    report_failure(meeting, e.what());
    throw;
  } catch (const Error& e) {
    info = RankInfo::failure(e.what());
  }
  const Plan plan = agree(meeting, info);
  // Shared, since the thread below may never end.
  auto communicator = std::make_shared<std::shared_ptr<Communicator>>();
  const bool returned = wait_for(
      [meeting, plan, communicator] {
        Process::get().initialise(meeting, plan);
        *communicator = std::make_shared<Communicator>(meeting, plan);
      },
      meeting.deadline);
  if (!returned) {
    process.gave_up();
    throw TimeoutError("the ranks of " + meeting.group + " did not find each other through " + library_name() +
                       " within " + std::to_string(meeting.deadline.timeout().count()) +
                       " ms: all processes that mpirun started have to initialise MPI, and all ranks of the group "
                       "have to be alive");
  }
  return new MpiEngine(std::move(*communicator));
}

}  // namespace

}  // namespace ours::mpi

__attribute__((visibility("default"))) ours::Engine* ours::ours_open_mpi_engine(const ours::MpiMeeting& meeting) {
  return ours::mpi::open(meeting);
}
