#include "collectives/device/enqueue_group.h"

#include <exception>
#include <utility>

#include "device/deferred_release.h"

namespace ours {

EnqueueGroup::EnqueueGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device)
    : DeviceGroupBase(std::move(host), std::move(device)),
      own_stream_(this->device().make_stream()),
      stream_(own_stream_->handle()),
      before_(this->device().make_event()) {}

EnqueueGroup::Enqueued EnqueueGroup::enqueue(const Call& call, StreamHandle after, const std::function<void()>& body) {
  Enqueued enqueued;
  std::exception_ptr misuse;
  guarded(call, [&] {
    before_->record(after);
    before_->block(stream_);
    enqueued_ = &enqueued;
    try {
      body();
    } catch (const InvalidArgument&) {
      misuse = std::current_exception();
    } catch (...) {
      enqueued_ = nullptr;
      throw;
    }
    enqueued_ = nullptr;
    if (misuse && !enqueued.claims.empty()) std::rethrow_exception(misuse);
    enqueued.done = device().make_event();
    enqueued.done->record(stream_);
  });
  if (misuse) std::rethrow_exception(misuse);
  return enqueued;
}

void EnqueueGroup::watch(const Call& call, const Enqueued& enqueued) {
  check_peers(call);
  try {
    for (const Claim& claim : enqueued.claims) compare(call, claim);
    await(call, *enqueued.done, [this] { unless_busy([this] { check_engine(); }); });
  } catch (...) {
    fail_operation();
    check_peers(call);
    throw;
  }
}

void EnqueueGroup::run(const Call& call, const Claim& claim, const std::function<void()>& give) {
  if (enqueued_ != nullptr) {
    enqueued_->claims.push_back(claim);
    return give();
  }
  guarded(call, [&] {
    compare(call, claim);
    give();
    const auto done = device().make_event();
    done->record(stream_);
    await(call, *done, [this] { check_engine(); });
  });
}

void EnqueueGroup::compare(const Call& call, Claim claim) const {
  if (size() == 1) return;
  claim.record.seq = call.seq;
  const std::vector<Words> opened = open_call(host(), call, claim.record, claim.words, claim.fingerprint);
  if (!claim.words.empty()) SizeTables(opened).check(claim.record);
}

void EnqueueGroup::await(const Call& call, DeviceEvent& done, const std::function<void()>& check_engine) const {
  const auto look_around = [&] {
    check_peers(call);
    check_engine();
  };
  wait_reached(done, call.deadline, look_around,
               std::string("the device's part of ") + name_of(call.op) + " number " + std::to_string(call.seq) +
                   " on rank " + std::to_string(rank()));
}

void EnqueueGroup::leave_stream_behind() noexcept {
  release_when([] { return false; }, std::move(own_stream_));
}

}  // namespace ours
