#include "backend/device/device_transfer.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <system_error>

#include "backend/errors.h"
#include "common/background_thread.h"
#include "common/interrupts.h"

namespace ours {

namespace {

/// How often the device is queried while something waits for it.
constexpr std::chrono::microseconds kPoll{50};

/// The most pinned memory that is kept for later transfers: allocating it takes much longer than using it.
constexpr size_t kMostKept = size_t{64} << 20;
constexpr size_t kSmallest = 4096;

size_t pinned_size(size_t bytes) {
  size_t size = kSmallest;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

DeviceTransfers::WorkPtr DeviceTransfers::make(const TransferRequest& request, int rank) {
  context_->use(request.tensor.device());
  return c10::make_intrusive<DeviceTransferWork>(request, rank, status_, context_);
}

void DeviceTransfers::start(const WorkPtr& work) {
  work->set_started();
  const Stage first = work->sends() ? Stage::Device : Stage::Message;
  const auto item = std::make_shared<Item>(Item{work, nullptr, first, {}, {}});
  try {
    item->pinned = take_pinned(work->memory().bytes);
    // Done at once, so that receives are matched in the order of the calls.
    if (!work->sends()) post(item);
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw AbortedError("the process group was shut down");
    if (!running_) {
      start_background_thread("ours_transfer", [self = shared_from_this()] { self->run(); });
    }
    running_ = true;
    items_.push_back(item);
    changed_.notify_all();
    return;
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);  // the message may end at this moment
    if (!item->error) item->error = std::current_exception();
  }
  end(item);
  if (error_type_of(item->error) == c10d::ErrorType::SUCCESS) work->rethrow();
}

bool DeviceTransfers::busy() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(items_.begin(), items_.end(), [](const ItemPtr& item) { return !item->work->done(); });
}

void DeviceTransfers::close() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void DeviceTransfers::wait_closed(std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  if (thread_ == std::this_thread::get_id()) return;
  changed_.wait_until(lock, Deadline::after(limit).at(), [&] { return !running_; });
}

void DeviceTransfers::run() {
  Lock lock(mutex_);
  thread_ = std::this_thread::get_id();
  while (!items_.empty() || !closed_) {
    lock.unlock();
    std::vector<ItemPtr> ended = advance_all();
    for (const ItemPtr& item : ended) end(item);
    lock.lock();
    for (const ItemPtr& item : ended) items_.remove(item);
    if (!ended.empty()) {
      changed_.notify_all();
      // The last reference may go here, and with it tensors of Python, so not under the lock.
      lock.unlock();
      ended.clear();
      lock.lock();
      continue;
    }
    const bool polls = std::any_of(items_.begin(), items_.end(), [](const ItemPtr& item) {
      return item->stage != Stage::Message || item->message_ended;
    });
    if (polls) {
      changed_.wait_for(lock, kPoll);
    } else {
      changed_.wait(lock);
    }
  }
  running_ = false;
  changed_.notify_all();
}

std::vector<DeviceTransfers::ItemPtr> DeviceTransfers::advance_all() {
  Lock lock(mutex_);
  const std::vector<ItemPtr> items(items_.begin(), items_.end());
  lock.unlock();
  std::vector<ItemPtr> ended;
  for (const ItemPtr& item : items) {
    try {
      if (advance(item)) ended.push_back(item);
    } catch (...) {
      item->error = std::current_exception();
      ended.push_back(item);
    }
  }
  return ended;
}

bool DeviceTransfers::advance(const ItemPtr& item) {
  DeviceTransferWork& work = *item->work;
  if (item->stage == Stage::Message) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!item->message_ended) return false;
    }
    if (item->error || work.sends()) return true;
    item->stage = Stage::Device;
  }
  if (item->stage == Stage::Device) {
    if (!may_start(*item)) return false;
    item->stage = Stage::Copy;
    copy(*item);
  }
  if (!item->copied->reached()) return false;
  if (!work.sends()) return true;
  if (!is_first_to_send(*item)) return false;
  item->stage = Stage::Message;
  post(item);
  return false;
}

bool DeviceTransfers::may_start(const Item& item) {
  if (item.work->order_->reached()) return true;
  const std::string failure = context_->host().failure();
  if (!failure.empty()) throw AbortedError(failure);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw AbortedError("the process group was shut down with transfers under way");
  }
  if (item.work->limit_->passed()) {
    throw TimeoutError(std::string("the work on the device that ") + name_of(item.work->op_) +
                       " comes after was not done within " + std::to_string(item.work->limit_->timeout().count()) +
                       " ms. Raise the timeout if that may take longer");
  }
  return false;
}

bool DeviceTransfers::is_first_to_send(const Item& item) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const ItemPtr& other : items_) {
    if (other.get() == &item) return true;
    const DeviceTransferWork& work = *other->work;
    const bool same = work.sends() && work.peer_ == item.work->peer_ && work.tag_ == item.work->tag_;
    if (same && other->stage != Stage::Message && !other->error) return false;
  }
  return true;
}

void DeviceTransfers::copy(Item& item) {
  const DeviceTransferWork& work = *item.work;
  Device& device = context_->accelerator();
  const StreamHandle stream = context_->transfer_stream();
  const Span memory = work.memory();
  if (work.sends()) {
    device.copy(item.pinned.get(), memory.data, memory.bytes, stream);
  } else {
    device.copy(memory.data, item.pinned.get(), memory.bytes, stream);
    const c10::StreamGuard guard(context_->torch_stream(stream));
    work.output_.commit();
  }
  item.copied = device.make_event();
  item.copied->record(stream);
}

void DeviceTransfers::post(const ItemPtr& item) {
  const DeviceTransferWork& work = *item->work;
  const std::shared_ptr<PointToPoint> messages = messages_.lock();
  if (!messages) throw AbortedError("the process group is gone");
  void* const data = item->pinned.get();
  const size_t bytes = work.memory().bytes;
  if (work.sends()) {
    messages->send({data, bytes}, work.dtype_, work.peer_, work.tag_, work.limit_, on_end(item));
  } else {
    messages->recv({data, bytes}, work.dtype_, work.peer_, work.tag_, work.limit_, on_end(item));
  }
}

TransferDone DeviceTransfers::on_end(const ItemPtr& item) {
  return [self = shared_from_this(), item](const Transfer& transfer) -> TransferCallbacks {
    std::lock_guard<std::mutex> lock(self->mutex_);
    if (!item->error) item->error = transfer.error();
    item->work->source_.store(transfer.source());
    item->message_ended = true;
    self->changed_.notify_all();
    return nullptr;
  };
}

void DeviceTransfers::end(const ItemPtr& item) noexcept {
  const WorkPtr& work = item->work;
  if (!item->error) {
    give_back(work->memory().bytes, std::move(item->pinned));
  } else if (item->stage == Stage::Copy) {
    context_->release_after_failure(item->pinned);
    context_->release_after_failure(std::make_shared<at::Tensor>(work->input_));
    context_->release_after_failure(std::make_shared<Output>(work->output_));
  }
  work->complete(item->error);
  if (!work->has_callbacks()) return;
  const auto call = [work] { work->run_callbacks(); };
  try {
    // The callbacks may wait for other transfers.
    start_background_thread("ours_callbacks", call);
  } catch (const std::system_error&) {
    call();
  }
}

std::shared_ptr<void> DeviceTransfers::take_pinned(size_t bytes) {
  const size_t size = pinned_size(bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& free = pinned_[size];
    if (!free.empty()) {
      std::shared_ptr<void> memory = std::move(free.back());
      free.pop_back();
      pinned_bytes_ -= size;
      return memory;
    }
  }
  return context_->accelerator().pinned_memory(size);
}

void DeviceTransfers::give_back(size_t bytes, std::shared_ptr<void> pinned) {
  const size_t size = pinned_size(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  if (pinned_bytes_ + size > kMostKept) return;
  pinned_bytes_ += size;
  pinned_[size].push_back(std::move(pinned));
}

}  // namespace ours
