#include "backend/coalesced_work.h"

#include <algorithm>

#include "backend/collective_work.h"
#include "common/deadline.h"

namespace ours {

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (const auto error = work->exception()) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  std::exception_ptr first;
  for (const auto& work : works_) {
    auto left = timeout;
    if (timeout.count() > 0) {
      left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Clock::now());
      left = std::max(left, std::chrono::milliseconds(1));
    }
    try {
      work->wait(left);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return true;
}

void CoalescedWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const auto tensors = work->result();
    all.insert(all.end(), tensors.begin(), tensors.end());
  }
  return all;
}

std::optional<Origin> CoalescedWork::origin() const {
  for (const auto& work : works_) {
    if (const auto* collective = dynamic_cast<const CollectiveWork*>(work.get())) return collective->origin();
  }
  return std::nullopt;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  const c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  if (works_.empty()) {
    auto combined = c10::make_intrusive<c10::ivalue::Future>(type);
    combined->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    return combined;
  }
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  auto combined = c10::make_intrusive<c10::ivalue::Future>(type, futures.get(0)->devices());
  c10::intrusive_ptr<CoalescedWork> self = c10::intrusive_ptr<CoalescedWork>::reclaim_copy(this);
  c10::collectAll(futures)->addCallback([self, combined, futures](c10::ivalue::Future& all) {
    try {
      // The error may come before the Work has one: a transfer's future fails if the peer is late, but not the
      // transfer.
      if (all.hasError()) std::rethrow_exception(all.exception_ptr());
      if (const auto error = self->exception()) std::rethrow_exception(error);
      // The current stream comes after all of them then, and callbacks come after it.
      for (size_t i = 0; i < futures.size(); ++i) futures.get(i)->wait();
      combined->markCompleted(c10::IValue(self->result()));
    } catch (...) {
      combined->setErrorIfNeeded(std::current_exception());
    }
  });
  return combined;
}

void Coalescing::start() {
  // An exception may have cut a batch short, so that nothing ended it. Its Works are dropped outside the lock.
  std::vector<WorkPtr> stale;
  const std::lock_guard<std::mutex> lock(mutex_);
  stale.swap(works_[std::this_thread::get_id()]);
  collects_ = true;
}

bool Coalescing::add(const WorkPtr& work) {
  if (!collects_) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = works_.find(std::this_thread::get_id());
  if (found == works_.end()) return false;
  found->second.push_back(work);
  return true;
}

Coalescing::WorkPtr Coalescing::end() {
  std::vector<WorkPtr> works;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = works_.find(std::this_thread::get_id());
    TORCH_CHECK(found != works_.end(), "endCoalescing() was called without startCoalescing()");
    works = std::move(found->second);
    works_.erase(found);
    collects_ = !works_.empty();
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

}  // namespace ours
