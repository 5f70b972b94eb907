#include "collectives/group.h"

#include <algorithm>
#include <numeric>

#include "common/error.h"

namespace ours {

namespace {

void check_reduce_scatter(const Scattering& job, int size) {
  const auto ranks = static_cast<size_t>(size);
  if (job.inputs.size() == ranks && job.counts.size() == ranks) return;
  throw InvalidArgument("reduce_scatter got " + std::to_string(job.inputs.size()) + " inputs and " +
                        std::to_string(job.counts.size()) + " counts in a group of " + std::to_string(ranks) +
                        " ranks; give one of each a rank");
}

/// A fingerprint of a list of sizes, for ranks to compare: lists with the same sum have different ones. Equal sizes
/// have 0, since the sum alone determines them.
uint64_t fingerprint_of(const std::vector<size_t>& counts) {
  if (std::all_of(counts.begin(), counts.end(), [&](size_t count) { return count == counts[0]; })) return 0;
  uint64_t fingerprint = 0;
  for (const size_t count : counts) fingerprint = fingerprint * 0x9E3779B97F4A7C15u + count;
  return fingerprint;
}

}  // namespace

template <class Body>
void Group::operate(const Running& run, Body&& body) {
  check_usable(run.call);
  guarded(run, std::ref(body));  // by reference: a larger std::function would allocate
}

void Group::guarded(const Running& /*run*/, const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

void Group::barrier(const Call& call) {
  const Running run{call, record_of(call)};
  operate(run, [&] { do_barrier(run); });
}

Running Group::checked(const Call& call, const Reducing& job) const {
  check_supported(job.reduction.kind, call.dtype);
  check_possible(call.dtype, job.reduction);
  return {call, record_of(call, job.in.count(), job.reduction, job.root)};
}

void Group::reduce(const Call& call, const Reducing& job) {
  const Running run = checked(call, job);
  operate(run, [&] { do_reduce(run, job); });
}

bool Group::begin_reduce(const Call& call, const Reducing& job) {
  const Running run = checked(call, job);
  check_usable(call);
  return do_begin_reduce(run, job);
}

void Group::reduce_scatter(const Call& call, const Scattering& job) {
  check_supported(job.reduction.kind, call.dtype);
  check_possible(call.dtype, job.reduction);
  check_reduce_scatter(job, size());
  const size_t sum = std::accumulate(job.counts.begin(), job.counts.end(), size_t{0});
  const Running run{call, record_of(call, sum, job.reduction, -1), fingerprint_of(job.counts)};
  operate(run, [&] { do_reduce_scatter(run, job); });
}

void Group::exchange(const Call& call, const ExchangePlan& plan) {
  CallRecord record = record_of(call);
  record.root = plan.root;
  if (plan.movement == Movement::Broadcast) record.count = plan.buffer().bytes / size_of(call.dtype);
  const Running run{call, record};
  operate(run, [&] { do_exchange(run, plan); });
}

void Group::all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  reduce(call, Reducing{in == out ? to : from, &to, reduction});
}

bool Group::begin_all_reduce(const Call& call, void* data, size_t count, const Reduction& reduction) {
  const Pieces all(data, count, size_of(call.dtype));
  return begin_reduce(call, Reducing{all, &all, reduction});
}

void Group::all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) {
  const Pieces data(pieces, size_of(call.dtype));
  reduce(call, Reducing{data, &data, reduction});
}

void Group::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction, int root) {
  check_root(root, size());
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  reduce(call, Reducing{from, rank() == root ? &to : nullptr, reduction, root});
}

}  // namespace ours
