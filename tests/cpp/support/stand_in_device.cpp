#include "support/stand_in_device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "common/shared_memory.h"
#include "support/cuda_on_cpu.h"

namespace ours::testing {
namespace {

/// How often this thread is in apart_from_captures().
thread_local int apart = 0;

}  // namespace

namespace {

/// Only this many bytes are filled; the rest takes no pages of the host until it is used.
constexpr size_t kMostFilled = size_t{1} << 20;

struct Shared {
  pid_t pid;
  int fd;
  void* address;
};
static_assert(sizeof(Shared) <= sizeof(MemoryHandle), "it has to fit");

/// The place of each piece of memory that this process can share. Never destroyed: memory may be dropped at the very
/// end.
struct Registry {
  std::mutex mutex;
  std::map<const void*, const SharedMemory*> all;
};

Registry& registry() {
  static auto* const kRegistry = new Registry;
  return *kRegistry;
}

std::shared_ptr<void> pointer_into(std::shared_ptr<SharedMemory> memory) {
  void* const data = memory->data();
  return {data, [memory = std::move(memory)](void* address) {
            const std::lock_guard<std::mutex> lock(registry().mutex);
            registry().all.erase(address);
          }};
}

/// Memory that other processes can map, whose beginning is filled with `fill`.
std::shared_ptr<void> shared_memory(size_t bytes, unsigned char fill) {
  auto memory = SharedMemory::create(bytes == 0 ? 1 : bytes);
  if (fill != 0) std::memset(memory->data(), fill, std::min(memory->bytes(), kMostFilled));
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().all[memory->data()] = memory.get();
  }
  return pointer_into(std::move(memory));
}

}  // namespace

class StandInStream : public DeviceStream {
 public:
  explicit StandInStream(std::shared_ptr<StandInDevice> device) : device_(std::move(device)) {}
  ~StandInStream() override { device_->forget(this); }
  StreamHandle handle() const override { return const_cast<StandInStream*>(this); }

 private:
  std::shared_ptr<StandInDevice> device_;
};

class StandInEvent : public DeviceEvent {
 public:
  explicit StandInEvent(std::shared_ptr<StandInDevice> device) : device_(std::move(device)) {}

  void record(StreamHandle stream) override {
    auto point = std::make_shared<StandInPoint>();
    captured_ = device_->is_capturing(stream);
    device_->push("record", stream, [point] { point->reach(); });
    point_ = std::move(point);
  }
  bool reached() override {
    device_->state_->check_alive();
    return point_ == nullptr || point_->reached();
  }
  void block(StreamHandle stream) override {
    const auto wait = [point = point_] {
      if (point != nullptr) point->wait();
    };
    if (captured_) device_->set_capturing(stream, true);
    device_->push("block", stream, wait);
  }

 private:
  std::shared_ptr<StandInDevice> device_;
  std::shared_ptr<StandInPoint> point_;
  bool captured_ = false;
};

StandInDevice::StandInDevice(const StandInOptions& options) : options_(options) {
  queues_.push_back(std::make_unique<StandInQueue>(state_));
  streams_[nullptr] = queues_.front().get();
}

std::shared_ptr<StandInDevice> StandInDevice::make(const StandInOptions& options) {
  return std::shared_ptr<StandInDevice>(new StandInDevice(options));
}

// The queues end when they have done what they were given.
StandInDevice::~StandInDevice() = default;

bool StandInDevice::reaches(const std::string& identity) const {
  return options_.reaches_others || identity == options_.identity;
}

std::unique_ptr<DeviceStream> StandInDevice::make_stream() {
  state_->check("make_stream");
  auto stream = std::make_unique<StandInStream>(std::static_pointer_cast<StandInDevice>(Device::shared_from_this()));
  const std::lock_guard<std::mutex> lock(mutex_);
  StandInQueue* queue = nullptr;
  const auto used = [&](const StandInQueue* one) {
    return std::any_of(streams_.begin(), streams_.end(), [&](const auto& entry) { return entry.second == one; });
  };
  for (const auto& one : queues_) {
    const bool shared = options_.one_queue && one != queues_.front();
    if (shared || (!used(one.get()) && one->idle())) queue = one.get();
  }
  if (queue == nullptr) queue = queues_.emplace_back(std::make_unique<StandInQueue>(state_)).get();
  streams_[stream->handle()] = queue;
  return stream;
}

std::unique_ptr<DeviceEvent> StandInDevice::make_event() {
  state_->check("make_event");
  return std::make_unique<StandInEvent>(std::static_pointer_cast<StandInDevice>(Device::shared_from_this()));
}

bool StandInDevice::is_capturing(StreamHandle stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capturing_.count(stream) != 0;
}

void StandInDevice::apart_from_captures(const std::function<void()>& body) const {
  ++apart;
  const std::shared_ptr<void> back(nullptr, [](void*) { --apart; });
  body();
}

void StandInDevice::check_no_capture() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!capturing_.empty() && apart == 0) throw DeviceError("this would break the capture of a stream");
}

std::shared_ptr<void> StandInDevice::make_pinned(size_t bytes) {
  state_->check("pinned_memory");
  return freed_after_a_look(shared_memory(bytes, 0));
}

std::shared_ptr<void> StandInDevice::make_memory(size_t bytes) {
  state_->check("memory");
  return freed_after_a_look(shared_memory(bytes, 0xa5));
}

std::shared_ptr<void> StandInDevice::freed_after_a_look(std::shared_ptr<void> memory) const {
  void* const data = memory.get();
  return {data, [memory = std::move(memory), state = state_](void*) mutable {
            state->pause("free");
            memory.reset();
          }};
}

MemoryHandle StandInDevice::share(const void* memory) {
  state_->check("share");
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().all.find(memory);
  if (found == registry().all.end()) throw DeviceError("share: this is not the beginning of memory of the device");
  const Shared shared{::getpid(), found->second->fd(), found->second->data()};
  MemoryHandle handle{};
  std::memcpy(handle.data(), &shared, sizeof(shared));
  return handle;
}

std::shared_ptr<void> StandInDevice::map(const MemoryHandle& handle) {
  state_->check("map");
  Shared shared{};
  std::memcpy(&shared, handle.data(), sizeof(shared));
  if (shared.pid == ::getpid()) return {shared.address, [](void*) {}};
  try {
    return pointer_into(SharedMemory::open(descriptor_path(shared.pid, shared.fd)));
  } catch (const SystemError& e) {
    throw DeviceError(std::string("map: ") + e.what());
  }
}

StandInQueue& StandInDevice::queue_of(StreamHandle stream) const {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) throw DeviceError("the stand-in device has no such stream");
  return *found->second;
}

void StandInDevice::push(const char* call, StreamHandle stream, std::function<void()> work) {
  state_->check(call);
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_of(stream).push(std::move(work));
}

void StandInDevice::forget(StreamHandle stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.erase(stream);
  capturing_.erase(stream);
}

void StandInDevice::copy(void* to, const void* from, size_t bytes, StreamHandle stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto work = [=, before = before_copies_] {
    if (before != nullptr) before->wait();
    if (bytes != 0) std::memcpy(to, from, bytes);
  };
  lock.unlock();
  push("copy", stream, work);
}

void StandInDevice::reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count,
                           DType dtype, const Reduction& reduction, StreamHandle stream) {
  const auto work = [=] { reduce_on_cpu(results, sources, count, dtype, reduction); };
  push("reduce", stream, work);
}

void StandInDevice::run(StreamHandle stream, std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_of(stream).push(std::move(work));
}

void StandInDevice::synchronize(StreamHandle stream) {
  auto point = std::make_shared<StandInPoint>();
  run(stream, [point] { point->reach(); });
  const auto limit = Deadline::after(std::chrono::minutes(1));
  while (!point->reached()) {
    if (limit.passed()) {
      std::fprintf(stderr, "a stream of the stand-in device was not done within a minute\n");
      std::abort();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

std::shared_ptr<StandInPoint> StandInDevice::stop(StreamHandle stream) {
  const auto point = std::make_shared<StandInPoint>();
  run(stream, [point] { point->wait(); });
  return {point.get(), [point](StandInPoint* dropped) { dropped->reach(); }};
}

std::shared_ptr<StandInPoint> StandInDevice::stop_copies() {
  const auto point = std::make_shared<StandInPoint>();
  const std::lock_guard<std::mutex> lock(mutex_);
  before_copies_ = point;
  return {point.get(), [point](StandInPoint* dropped) { dropped->reach(); }};
}

void StandInDevice::set_capturing(StreamHandle stream, bool capturing) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capturing) {
    capturing_.insert(stream);
  } else {
    capturing_.clear();
  }
}

}  // namespace ours::testing
