#include "engines/c10d/c10d_engine.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>

#include "common/background_thread.h"
#include "common/error.h"

namespace ours {

namespace {

/// The mesh enforces the deadlines and has better error messages, so no wait for the backend ends by itself.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

/// Tags have at most 31 bits. Few messages are under way at a time, so that they stay distinct.
int tag_of(uint32_t number) { return static_cast<int>(number & 0x3fffffff); }

/// An error's message, without the stack trace in torch's errors.
std::string text_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs != nullptr ? torchs->what_without_backtrace() : error.what();
}

at::Tensor tensor_at(void* data, size_t bytes) {
  return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte));
}

at::Tensor new_tensor(size_t bytes) { return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte)); }

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

void abort_work(const WorkPtr& work) noexcept {
  try {
    work->abort();
  } catch (const std::exception&) {
    // Most Works cannot be aborted, but their memory is their own.
  }
}

}  // namespace

/// A message, shared by its Transfer and the thread that waits for it.
struct C10dEngine::Job {
  enum State { Waiting, Done, Failed };

  std::vector<at::Tensor> tensors;
  WorkPtr work;          // guarded by the line's mutex
  void* copy = nullptr;  ///< where to copy what has arrived; null if it arrives in place
  std::string fault;     ///< set before `state`
  std::atomic<State> state{Waiting};
};

struct C10dEngine::Waker {
  std::mutex mutex;
  std::function<void()> wake;  // guarded by mutex

  void operator()() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (wake) wake();
  }
};

/// The messages to or from one peer, and the thread that waits for them in order.
class C10dEngine::Line : public std::enable_shared_from_this<Line> {
 public:
  explicit Line(std::shared_ptr<Waker> waker) : waker_(std::move(waker)) {}

  void start() {
    start_background_thread("ours-engine", [self = shared_from_this()] { self->wait_for_all(); });
  }

  void add(std::shared_ptr<Job> job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }

  /// Ends the job. With `surely`, returns only when nothing touches its memory any more.
  void drop(const std::shared_ptr<Job>& job, bool surely) {
    WorkPtr work;
    std::unique_lock<std::mutex> lock(mutex_);
    std::swap(work, job->work);
    for (auto one = jobs_.begin(); one != jobs_.end(); ++one) {
      if (*one != job) continue;
      jobs_.erase(one);
      break;
    }
    const bool waited_for = current_ == job;
    lock.unlock();
    if (work && job->state.load() == Job::Waiting) abort_work(work);
    work.reset();
    if (!waited_for || !surely) return;
    lock.lock();
    changed_.wait(lock, [&] { return current_ != job; });
  }

  /// Lets the thread end as soon as the wait that it is in ends.
  void close() {
    std::deque<std::shared_ptr<Job>> jobs;
    WorkPtr work;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      std::swap(jobs, jobs_);
      if (current_) work = current_->work;
      changed_.notify_all();
    }
    if (work) abort_work(work);
  }

 private:
  void wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closed_ || !jobs_.empty(); });
      if (closed_) return;
      current_ = std::move(jobs_.front());
      jobs_.pop_front();
      WorkPtr work = current_->work;
      lock.unlock();
      const std::string fault = wait_for(*work);
      // The last reference to the Work keeps its memory in use, so it is dropped before the end is reported.
      work.reset();
      lock.lock();
      finish(*current_, fault);
      current_.reset();
      changed_.notify_all();
      lock.unlock();
      (*waker_)();
      lock.lock();
    }
  }

  static std::string wait_for(c10d::Work& work) {
    try {
      return work.wait(kForever) ? "" : "it was aborted";
    } catch (const std::exception& e) {
      const std::string text = text_of(e);
      return text.empty() ? "an error without a message" : text;
    }
  }

  static void finish(Job& job, const std::string& fault) {
    job.fault = fault;
    job.work.reset();
    job.state.store(fault.empty() ? Job::Done : Job::Failed);
  }

  const std::shared_ptr<Waker> waker_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;  // guarded by mutex_
  std::shared_ptr<Job> current_;           // guarded by mutex_
  bool closed_ = false;                    // guarded by mutex_
};

class C10dEngine::Transfer final : public Engine::Transfer {
 public:
  Transfer(std::shared_ptr<Line> line, std::shared_ptr<Job> job, bool in_place)
      : line_(std::move(line)), job_(std::move(job)), in_place_(in_place) {}
  ~Transfer() override { line_->drop(job_, in_place_); }

  bool done() override {
    const Job::State state = job_->state.load();
    if (state == Job::Failed) throw Error(job_->fault);
    if (state == Job::Waiting) return false;
    const at::Tensor& tensor = job_->tensors.front();
    if (job_->copy != nullptr) std::memcpy(job_->copy, tensor.const_data_ptr(), tensor.nbytes());
    return true;
  }

 private:
  const std::shared_ptr<Line> line_;
  const std::shared_ptr<Job> job_;
  const bool in_place_;
};

C10dEngine::C10dEngine(std::string name, c10::intrusive_ptr<c10d::Backend> backend, bool ends_at_once)
    : name_(std::move(name)),
      ends_at_once_(ends_at_once),
      backend_(std::move(backend)),
      waker_(std::make_shared<Waker>()) {}

C10dEngine::~C10dEngine() { close(); }

c10d::Backend& C10dEngine::backend() const {
  if (!backend_) throw Error("it is closed");
  return *backend_;
}

void C10dEngine::set_waker(std::function<void()> wake) {
  const std::lock_guard<std::mutex> lock(waker_->mutex);
  waker_->wake = std::move(wake);
}

std::unique_ptr<Engine::Transfer> C10dEngine::send(int peer, uint32_t number, const void* data, size_t bytes) {
  auto job = std::make_shared<Job>();
  // Backends only read what they send.
  at::Tensor tensor = ends_at_once_ ? tensor_at(const_cast<void*>(data), bytes) : new_tensor(bytes);
  if (!ends_at_once_) std::memcpy(tensor.mutable_data_ptr(), data, bytes);
  job->tensors = {std::move(tensor)};
  job->work = backend().send(job->tensors, peer, tag_of(number));
  return follow(peer, true, std::move(job));
}

std::unique_ptr<Engine::Transfer> C10dEngine::receive(int peer, uint32_t number, void* data, size_t bytes) {
  auto job = std::make_shared<Job>();
  job->tensors = {ends_at_once_ ? tensor_at(data, bytes) : new_tensor(bytes)};
  if (!ends_at_once_) job->copy = data;
  job->work = backend().recv(job->tensors, peer, tag_of(number));
  return follow(peer, false, std::move(job));
}

std::unique_ptr<Engine::Transfer> C10dEngine::follow(int peer, bool sends, std::shared_ptr<Job> job) {
  if (!job->work) throw Error("it gives nothing to wait for");
  auto found = lines_.find({peer, sends});
  if (found == lines_.end()) {
    auto line = std::make_shared<Line>(waker_);
    line->start();
    found = lines_.emplace(std::make_pair(peer, sends), std::move(line)).first;
  }
  found->second->add(job);
  return std::make_unique<Transfer>(found->second, std::move(job), ends_at_once_);
}

void C10dEngine::close() noexcept {
  set_waker(nullptr);
  for (const auto& one : lines_) one.second->close();
  lines_.clear();
  if (!backend_ || ends_at_once_) {
    backend_.reset();
    return;
  }
  try {
    start_background_thread("ours-engine-end", [backend = backend_]() mutable { backend.reset(); });
    backend_.reset();
  } catch (const std::exception&) {
    // The backend's end may take long, so without a thread it is left to the end of the process.
    [[maybe_unused]] const c10d::Backend* left_over = backend_.release();
  }
}

}  // namespace ours
