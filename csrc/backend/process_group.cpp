#include "backend/process_group.h"

#include <limits>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/coalesced_work.h"
#include "backend/device/enqueued_call.h"
#include "backend/device/host_call.h"
#include "backend/errors.h"
#include "backend/joining/connect.h"
#include "backend/profiling.h"
#include "backend/tensors.h"
#include "collectives/select.h"
#include "common/error.h"
#include "common/interrupts.h"
#include "common/listed.h"
#include "common/options.h"

namespace ours {

namespace {

/// The id of our own abort hook, which runs last because writing a trace takes long.
constexpr int64_t kFlightHook = std::numeric_limits<int64_t>::max();

/// Warns once in a process, which reads the variables once.
void warn_of_stray_variables() {
  static const bool kWarned = [] {
    for (const std::string& complaint : stray_variables(environment_names())) TORCH_WARN(complaint);
    return true;
  }();
  static_cast<void>(kWarned);
}

/// The end of every error message: the group's name, and its global ranks if they differ from its own.
std::string describe_group(const ProcessGroupOurs::Options& options) {
  const auto& ranks = options.global_ranks_in_group;
  bool same = true;
  for (size_t i = 0; i < ranks.size(); ++i) same = same && ranks[i] == i;
  if (same) return "";
  return " [in group '" + options.group_name + "', whose ranks are the global ranks " + listed(ranks) + "]";
}

}  // namespace

ProcessGroupOurs::ProcessGroupOurs(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      inline_calls_(ours::options().inline_calls) {
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " in a group of size ", size,
                    ": the rank must be between 0 and size - 1");
  init();
  warn_of_stray_variables();
  status_ = std::make_shared<GroupStatus>(options_->timeout, describe_group(*options_));
  status_->callbacks = std::make_shared<CallbackOrder>(options_->group_name, global_ranks());
  record_flights();
  queue_ = std::make_shared<CommQueue>(ours::options().comm_thread_affinity, ours::options().comm_nice);
  connect(options_->timeout);
  allocator_ = HeapAllocator::make(group_);
}

std::vector<uint64_t> ProcessGroupOurs::global_ranks() const {
  std::vector<uint64_t> ranks = options_->global_ranks_in_group;
  if (ranks.empty() && !options_->merged) {  // PyTorch's default group
    ranks.resize(static_cast<size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  return ranks;
}

void ProcessGroupOurs::record_flights() {
  status_->flights = FlightLog::make({rank_, global_ranks()});
  if (!status_->flights) return;
  status_->abort_hooks.add(kFlightHook, [flights = status_->flights.get()] { flights->dump(); });
}

void ProcessGroupOurs::connect(Milliseconds timeout) {
  const std::string name = options_->group_name.empty() ? "the process group" : "group '" + options_->group_name + "'";
  // Checked before the ranks wait for each other.
  with_torch_errors("", [this] { return Selection::parse(options_->selection); });
  Connections connections = connect_ranks({store_, rank_, size_, timeout, name, options_->selection});
  group_ = std::move(connections.group);
  point_to_point_ = std::move(connections.messages);
  devices_ = std::make_shared<DeviceContext>(group_);
  transfers_ = std::make_shared<DeviceTransfers>(devices_, point_to_point_, status_);
  status_->add_connection(group_);
  GroupRegistry::instance().add(parts());
}

ProcessGroupOurs::~ProcessGroupOurs() {
  if (status_->is_forked_child()) {
    // The parts own everything else of the group, so nothing ends here.
    parts().abandon();
  } else {
    parts().close();
  }
}

void ProcessGroupOurs::shutdown() {
  if (status_->is_forked_child()) return;
  if (group_->failure().empty()) drain_queues();
  const std::vector<GroupParts> all = all_parts();
  for (const GroupParts& part : all) part.close();
  for (const GroupParts& part : all) part.wait_closed();
  throw_interrupt();
}

void ProcessGroupOurs::drain_queues() {
  do {
    queue_->drain();
    // The lanes come after the callbacks on what was queued, which may have started more.
    for (const auto& lane : lanes()) {
      if (was_interrupted()) return;
      lane->queue_->drain();
    }
  } while (!was_interrupted() && status_->callbacks->await_handed_over());
}

void ProcessGroupOurs::waitForPendingWorks() {
  drain_queues();
  throw_interrupt();
}

void ProcessGroupOurs::abort() {
  if (status_->is_forked_child()) return;
  abort_all("abort() was called");
}

void ProcessGroupOurs::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  status_->timeouts.set(timeout);
}

c10d::ErrorType ProcessGroupOurs::getError() {
  const c10d::ErrorType error = status_->error();
  if (error != c10d::ErrorType::SUCCESS || status_->is_forked_child()) return error;
  // Nothing has failed here, but a peer may have ended the group.
  return group_->failure().empty() ? error : c10d::ErrorType::REMOTE_ERROR;
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ProcessGroupOurs::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  status_->completion_hooks.add(id, [hook = std::move(hook)](const Completion& completion) {
    hook(c10d::CompletionHookArgs{completion.key, completion.duration_ms});
  });
}
#endif

void ProcessGroupOurs::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, "this process group has an on-completion hook already; register one only");
  TORCH_CHECK(queue_->last_sequence() == 0, "register the on-completion hook before the first collective");
  // Shared, since the hook may own Python objects, which cannot be copied without the GIL.
  auto shared = std::make_shared<std::function<void(std::shared_ptr<c10d::WorkInfo>)>>(std::move(hook));
  onCompletionHook_ = [shared](std::shared_ptr<c10d::WorkInfo> info) { (*shared)(std::move(info)); };
  status_->set_on_completion(onCompletionHook_);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::launch(Collective collective) {
  status_->check_usable();
  const Milliseconds timeout = collective.timeout.count() < 0 ? status_->timeouts.get() : collective.timeout;
  const bool async_op = collective.async_op;
  const Op op = collective.op;
  const Callback* const callback = current_callback();
  ProcessGroupOurs& lane = callback == nullptr ? *this : lane_of(*callback, op, timeout);
  auto work = or_refuse(op, [&] { return lane.start(std::move(collective), timeout, callback); });
  // Completion hooks identify Works by their keys, and compiled graphs register tensors with their Works.
  if (coalesce(work) || async_op || !status_->completion_hooks.empty()) return work;
  if (c10d::allow_inflight_collective_as_graph_input()) return work;
  // For PyTorch no Work means one that is done. Saving a Python object and a call matters for a small collective.
  work->wait();
  return nullptr;
}

const Callback* ProcessGroupOurs::current_callback() const {
  // A single rank has nobody to agree with.
  return size_ > 1 ? Callback::current() : nullptr;
}

uint64_t ProcessGroupOurs::next_number(const Callback* callback) const {
  const uint64_t count = queue_->last_sequence() + 1;
  return callback == nullptr ? count : status_->number_in_callback(callback->origin(), count);
}

c10::intrusive_ptr<CollectiveWork> ProcessGroupOurs::start(Collective collective, Milliseconds timeout,
                                                           const Callback* callback) {
  const at::Device device = place_of(collective);
  std::unique_lock<std::recursive_mutex> order;
  if (!device.is_cpu()) {
    if (!collective.behind) connect_device(device, timeout, callback);
    order = std::unique_lock<std::recursive_mutex>(devices_->order());
  }
  const uint64_t number = next_number(callback);
  std::unique_ptr<DeviceCall> on_device;
  if (!device.is_cpu()) {
    on_device = device_call(collective, {collective.op, collective.dtype, number, Deadline::after(timeout)});
  }
  // A rank alone waits for nobody, so a thread would gain nothing. A device's work, though, the caller need not wait
  // for.
  const bool async_op = collective.async_op;
  const bool may_run_here = !on_device && (size_ == 1 || (!async_op && inline_calls_));
  const auto flight = trace({collective.op,
                             number,
                             options_->group_name,
                             getGroupDesc(),
                             rank_,
                             size_,
                             options_->global_ranks_in_group,
                             collective.inputs,
                             collective.outputs,
                             {}},
                            timeout);
  auto work = c10::make_intrusive<CollectiveWork>(std::move(collective), group_, queue_, status_);
  work->set_flight(flight);
  if (callback != nullptr) work->set_origin(callback->origin());
  const bool captured = on_device && on_device->is_captured();
  if (on_device) work->set_device_call(std::move(on_device));
  if (captured) {
    order.unlock();  // hooks may call the group
    work->complete_captured();
  } else {
    queue_->submit(work, may_run_here);
  }
  return work;
}

void ProcessGroupOurs::refuse(Op op, const std::string& why) {
  if (status_->is_forked_child() || status_->is_closed() || in_signal_handler()) return;
  // What peers capture has no number.
  if (devices_->is_capturing()) return;
  Collective refused{};
  refused.op = op;
  refused.body = [why](Group&, const Call&) { throw InvalidArgument(why); };
  const Callback* const callback = current_callback();
  ProcessGroupOurs& lane = callback == nullptr ? *this : lane_of(*callback, op, status_->timeouts.get());
  auto work = c10::make_intrusive<CollectiveWork>(std::move(refused), lane.group_, lane.queue_, status_);
  if (callback != nullptr) work->set_origin(callback->origin());
  lane.queue_->submit(work, inline_calls_);
}

at::Device ProcessGroupOurs::place_of(const Collective& collective) {
  if (collective.behind) return *collective.behind;
  return common_device(name_of(collective.op), collective.inputs, collective.outputs);
}

std::unique_ptr<DeviceCall> ProcessGroupOurs::device_call(const Collective& collective, const Call& call) {
  return with_torch_errors(status_->where(), [&]() -> std::unique_ptr<DeviceCall> {
    // Where streams wait they hear of no error: of a group that has failed the caller has to hear now.
    if (!devices_->host().failure().empty()) status_->told = true;
    devices_->check_alive(call);
    const char* const name = name_of(collective.op);
    if (collective.behind) {
      devices_->use(*collective.behind);
      return std::make_unique<HostCall>(devices_, name, HostCall::Where::OnHost);
    }
    auto enqueues = std::dynamic_pointer_cast<EnqueueGroup>(devices_->made_group());
    if (!enqueues || ours::options().check == CheckTime::Before) {
      return std::make_unique<HostCall>(devices_, name, HostCall::Where::OnDevice);
    }
    return std::make_unique<EnqueuedCall>(devices_, std::move(enqueues), collective.body, call);
  });
}

std::optional<FlightLog::Entry> ProcessGroupOurs::trace(const CallTrace& call, Milliseconds timeout) {
  record_call(call);
  if (!status_->flights) return std::nullopt;
  return status_->flights->issued(call, timeout);
}

bool ProcessGroupOurs::coalesce(const WorkPtr& work) {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  const auto found = coalesced_.find(std::this_thread::get_id());
  if (found == coalesced_.end()) return false;
  found->second.push_back(work);
  return true;
}

void ProcessGroupOurs::startCoalescing() {
  // An exception may have cut a batch short, so that nothing ended it. Its Works are dropped outside the lock.
  std::vector<WorkPtr> stale;
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  stale.swap(coalesced_[std::this_thread::get_id()]);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::endCoalescing() {
  std::vector<WorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(coalescing_mutex_);
    const auto found = coalesced_.find(std::this_thread::get_id());
    TORCH_CHECK(found != coalesced_.end(), "endCoalescing() was called without startCoalescing()");
    works = std::move(found->second);
    coalesced_.erase(found);
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

const at::Tensor& ProcessGroupOurs::only(const Tensors& tensors, const char* call, const char* role) {
  TORCH_CHECK_VALUE(tensors.size() == 1, call, ": expected one tensor as ", role, " but got ", tensors.size(),
                    "; a process drives one device, so pass one");
  return tensors.front();
}

void ProcessGroupOurs::check_root(int64_t root, const char* call) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, call, ": root is ", root, " in a group of ", size_,
                    " ranks; give a rank of the group, 0 to ", size_ - 1);
}

void ProcessGroupOurs::check_parts(const at::Tensor& whole, const at::Tensor& one, const char* call,
                                   const char* whole_role) const {
  TORCH_CHECK_VALUE(whole.numel() == one.numel() * size_, call, ": ", whole_role, " has ", whole.numel(),
                    " elements, but a group of ", size_, " ranks with ", one.numel(), " elements each needs ",
                    one.numel() * size_);
}

void ProcessGroupOurs::check_list_size(size_t size, const char* call, const char* role) const {
  TORCH_CHECK_VALUE(size == static_cast<size_t>(size_), call, ": ", role, " has ", size, " tensors in a group of ",
                    size_, " ranks; give one for each rank");
}

void ProcessGroupOurs::check_own_part(int64_t sent, int64_t expected, const char* call) const {
  TORCH_CHECK_VALUE(sent == expected, call, ": rank ", rank_, " gives itself an input of ", sent,
                    " elements, but its output for it has ", expected, "; give them the same size");
}

}  // namespace ours
