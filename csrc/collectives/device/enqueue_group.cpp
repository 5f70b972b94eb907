#include "collectives/device/enqueue_group.h"

#include <exception>
#include <utility>

namespace ours {

EnqueueGroup::EnqueueGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device)
    : DeviceGroupBase(std::move(host), std::move(device)),
      own_stream_(this->device().make_stream()),
      before_(this->device().make_event()) {}

EnqueueGroup::Enqueued EnqueueGroup::enqueue(const Call& call, StreamHandle after, const std::function<void()>& body) {
  Enqueued enqueued;
  std::exception_ptr misuse;
  check_usable(call);
  DeviceGroupBase::guarded({call, record_of(call)}, [&] {
    before_->record(after);
    before_->block(stream());
    captured_ = captured_ || device().is_capturing(stream());
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
    enqueued.done->record(stream());
  });
  if (misuse) std::rethrow_exception(misuse);
  return enqueued;
}

void EnqueueGroup::watch(const Call& call, const Enqueued& enqueued) {
  check_peers(call);
  try {
    for (const Claim& claim : enqueued.claims) compare(call, claim);
    await(call, *enqueued.done);
  } catch (...) {
    fail_operation();
    check_peers(call);
    throw;
  }
}

void EnqueueGroup::guarded(const Running& run, const std::function<void()>& body) {
  if (enqueued_ != nullptr) return body();
  DeviceGroupBase::guarded(run, [&] {
    body();
    const auto done = device().make_event();
    done->record(stream());
    await(run.call, *done);
  });
}

void EnqueueGroup::claim(const Running& run, Words sizes) {
  Claim made{run.record, run.fingerprint, std::move(sizes)};
  if (enqueued_ == nullptr) return compare(run.call, made);
  enqueued_->claims.push_back(std::move(made));
}

void EnqueueGroup::compare(const Call& call, const Claim& claim) const {
  if (size() == 1) return;
  CallRecord record = claim.record;
  record.seq = call.seq;
  // Named after this call of the body, which may make several.
  const Call part{static_cast<Op>(record.op), static_cast<DType>(record.dtype), call.seq, call.deadline};
  const std::vector<Words> opened = open_call(host(), {part, record, claim.fingerprint}, claim.sizes);
  if (!claim.sizes.empty()) check_tables(opened, record);
}

void EnqueueGroup::await(const Call& call, DeviceEvent& done) {
  const auto look_around = [&] {
    check_peers(call);
    check_engine();
  };
  wait_reached(done, call.deadline, look_around,
               std::string("the device's part of ") + name_of(call.op) + " number " + std::to_string(call.seq) +
                   " on rank " + std::to_string(rank()));
}

}  // namespace ours
