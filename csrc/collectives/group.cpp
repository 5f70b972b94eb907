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
bool Group::operate(const Running& run, Body&& body) {
  check_usable(run.call);
  guarded(run, std::ref(body));  // by reference: a larger std::function would allocate
  return run.call.part == Part::Whole;
}

void Group::guarded(const Running& /*run*/, const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

bool Group::barrier(const Call& call) {
  const Running run{call, record_of(call)};
  return operate(run, [&] { do_barrier(run); });
}

bool Group::reduce(const Call& call, const Reducing& job) {
  check_supported(job.reduction.kind, call.dtype);
  check_possible(call.dtype, job.reduction);
  const Running run{call, record_of(call, job.in.count(), job.reduction, job.root)};
  return operate(run, [&] { do_reduce(run, job); });
}

bool Group::reduce_scatter(const Call& call, const Scattering& job) {
  check_supported(job.reduction.kind, call.dtype);
  check_possible(call.dtype, job.reduction);
  check_reduce_scatter(job, size());
  const size_t sum = std::accumulate(job.counts.begin(), job.counts.end(), size_t{0});
  const Running run{call, record_of(call, sum, job.reduction, -1), fingerprint_of(job.counts)};
  return operate(run, [&] { do_reduce_scatter(run, job); });
}

bool Group::exchange(const Call& call, const ExchangePlan& plan) {
  CallRecord record = record_of(call);
  record.root = plan.root;
  if (plan.movement == Movement::Broadcast) record.count = plan.buffer().bytes / size_of(call.dtype);
  const Running run{call, record};
  return operate(run, [&] { do_exchange(run, plan); });
}

bool Group::all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  return reduce(call, Reducing{in == out ? to : from, &to, reduction});
}

bool Group::all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) {
  const Pieces data(pieces, size_of(call.dtype));
  return reduce(call, Reducing{data, &data, reduction});
}

bool Group::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction, int root) {
  check_root(root, size());
  const size_t element = size_of(call.dtype);
  const Pieces to(out, count, element);
  const Pieces from(const_cast<void*>(in), count, element);
  return reduce(call, Reducing{from, rank() == root ? &to : nullptr, reduction, root});
}

}  // namespace ours
