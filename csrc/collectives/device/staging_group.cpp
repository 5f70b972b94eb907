#include "collectives/device/staging_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ours {

StagingGroup::StagingGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, size_t kept_bytes)
    : DeviceGroupBase(std::move(host), std::move(device)),
      kept_bytes_(kept_bytes),
      stream_(this->device().make_stream()),
      copied_(this->device().make_event()) {}

std::byte* StagingGroup::room(size_t bytes) {
  const bool too_large = memory_bytes_ > kept_bytes_ && bytes < memory_bytes_ / 2;
  if (bytes > memory_bytes_ || too_large) {
    memory_.reset();  // first, since there may be no room for both
    memory_bytes_ = 0;
    memory_ = device().pinned_memory(bytes);
    memory_bytes_ = bytes;
  }
  return static_cast<std::byte*>(memory_.get());
}

void StagingGroup::copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0) device().copy(to, from, bytes, stream_->handle());
}

void StagingGroup::finish_copies(const Running& run) {
  copied_->record(stream_->handle());
  wait(*copied_, run, "a copy");
}

void StagingGroup::do_reduce(const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  const size_t count = job.in.count();
  std::byte* const data = room(count * element);
  job.in.visit(0, count,
               [&](const std::byte* piece, size_t from, size_t n) { copy(data + from * element, piece, n * element); });
  finish_copies(run);

  const Pieces on_host(data, count, element);
  host().reduce(run.call, Reducing{on_host, job.out == nullptr ? nullptr : &on_host, job.reduction, job.root});
  if (job.out == nullptr) return;

  job.out->visit(0, count,
                 [&](std::byte* piece, size_t from, size_t n) { copy(piece, data + from * element, n * element); });
  finish_copies(run);
}

void StagingGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  const size_t element = size_of(run.call.dtype);
  const size_t mine = job.counts[static_cast<size_t>(rank())];
  const size_t all = std::accumulate(job.counts.begin(), job.counts.end(), size_t{0});
  std::byte* free = room((all + mine) * element);
  std::vector<const void*> inputs;
  for (size_t r = 0; r < job.counts.size(); ++r) {
    copy(free, job.inputs[r], job.counts[r] * element);
    inputs.push_back(free);
    free += job.counts[r] * element;
  }
  finish_copies(run);

  host().reduce_scatter(run.call, inputs, job.counts, free, job.reduction);

  copy(job.out, free, mine * element);
  finish_copies(run);
}

void StagingGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  const auto me = static_cast<size_t>(rank());
  size_t leaving = 0, coming = 0;
  for (size_t r = 0; r < plan.sends.size(); ++r) {
    leaving = plan.is_common() ? std::max(leaving, plan.sent(r)) : leaving + plan.sent(r);
    coming += plan.received(r);
  }
  std::byte* free = room(leaving + coming);
  const auto bring_down = [&](const ConstSpan& from) {
    copy(free, from.data, from.bytes);
    return ConstSpan{std::exchange(free, free + from.bytes), from.bytes};
  };
  ExchangePlan on_host = plan;
  std::optional<ConstSpan> last;
  for (auto& send : on_host.sends) {
    if (!send) continue;
    if (!last || !plan.is_common()) last = bring_down(*send);
    send = last;
  }
  for (auto& receive : on_host.receives) {
    if (receive) receive->data = std::exchange(free, free + receive->bytes);
  }
  // What a rank sends to itself stays where it is, as a broadcast requires of its root.
  const bool own = plan.sends[me] && plan.receives[me];
  if (own) on_host.receives[me]->data = const_cast<void*>(on_host.sends[me]->data);
  finish_copies(run);

  host().exchange(run.call, on_host);

  for (size_t r = 0; r < plan.receives.size(); ++r) {
    const bool in_place = own && r == me && plan.sends[me]->data == plan.receives[me]->data;
    if (plan.receives[r] && !in_place) copy(plan.receives[r]->data, on_host.receives[r]->data, plan.received(r));
  }
  finish_copies(run);
}

}  // namespace ours
