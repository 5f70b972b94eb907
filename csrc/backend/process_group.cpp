#include "backend/process_group.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/joining/store_keys.h"
#include "backend/symmetric/symmetric_group.h"
#include "collectives/select.h"
#include "common/error.h"
#include "common/interrupts.h"
#include "common/listed.h"
#include "common/options.h"
#include "common/stop_request.h"

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

/// torch.distributed.distributed_c10d.SHRINK_ABORT
constexpr int kShrinkAbort = 1;

using OptionsPtr = c10::intrusive_ptr<ProcessGroupOurs::Options>;

/// Copies the options that every backend has from `given`, or from `parent` if nothing is given.
OptionsPtr child_options(const c10::intrusive_ptr<c10d::Backend::Options>& given,
                         const ProcessGroupOurs::Options& parent) {
  const c10d::Backend::Options& from = given ? *given : static_cast<const c10d::Backend::Options&>(parent);
  auto options = c10::make_intrusive<ProcessGroupOurs::Options>(from.timeout);
  options->group_name = from.group_name;
  const auto* own = dynamic_cast<const ProcessGroupOurs::Options*>(&from);
  options->selection = own != nullptr && !own->selection.empty() ? own->selection : parent.selection;
  return options;
}

/// Tells a child the global ranks of its members, which are ranks `members` of the parent, if they are known.
void name_members(ProcessGroupOurs::Options& child, const ProcessGroupOurs::Options& parent,
                  const std::vector<int>& members) {
  const auto& parents = parent.global_ranks_in_group;
  child.merged = parent.merged;
  if (parent.merged) return;
  for (const int member : members) {
    child.global_ranks_in_group.push_back(parents.empty() ? static_cast<uint64_t>(member)
                                                          : parents.at(static_cast<size_t>(member)));
  }
}

/// Makes a group with a connection of its own to the store, since the rendezvous waits, and the parent may use the
/// given connection meanwhile.
c10::intrusive_ptr<c10d::Backend> make_child(const StorePtr& store, int rank, int size, OptionsPtr options) {
  StorePtr own = with_torch_errors("", [&] {
    try {
      return connect_anew(store, Deadline::after(options->timeout));
    } catch (const Error&) {
      throw_interrupt();
      throw;
    }
  });
  return c10::make_intrusive<ProcessGroupOurs>(std::move(own), rank, size, std::move(options));
}

/// The callback that the calling thread runs, if what it starts in a group of that size needs a lane of its own;
/// otherwise null.
const Callback* current_callback(int size) {
  // A single rank has nobody to agree with.
  return size > 1 ? Callback::current() : nullptr;
}

}  // namespace

ProcessGroupOurs::ProcessGroupOurs(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options)
    : Backend(rank, size), store_(std::move(store)), options_(std::move(options)), meeting_store_(store_) {
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " in a group of size ", size,
                    ": the rank must be between 0 and size - 1");
  init();
  warn_of_stray_variables();
  // Checked before the ranks wait for each other.
  with_torch_errors("", [this] { return Selection::parse(options_->selection); });
  handle_.rank = rank;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (options_->enable_reconfigure) {
    // Alone, so that all parts are there.
    open(c10::make_intrusive<c10d::HashStore>(), 0, 1, options_->timeout);
    status_->set_without_ranks();
    return;
  }
#endif
  open(store_, rank, size, options_->timeout);
  handle_.joined = true;
}

void ProcessGroupOurs::open(const StorePtr& store, int rank, int size, Milliseconds timeout) {
  auto status = std::make_shared<GroupStatus>(options_->timeout, describe_group(*options_));
  status->callbacks = std::make_shared<CallbackOrder>(options_->group_name, global_ranks());
  status->flights = FlightLog::make({rank_, global_ranks()});
  if (status_) {
    status->abort_hooks.add_all(status_->abort_hooks);
    status->abort_hooks.remove(kFlightHook);
    status->completion_hooks.add_all(status_->completion_hooks);
    status->on_completion = status_->on_completion;
  }
  if (status->flights) {
    status->abort_hooks.add(kFlightHook, [flights = status->flights.get()] { flights->dump(); });
  }
  const std::string name = options_->group_name.empty() ? "the process group" : "group '" + options_->group_name + "'";
  const Meeting meeting{store, rank, size, timeout, name, options_->selection};
  lane_ = Lane::open(meeting, status);
  status_ = std::move(status);
  callback_lanes_ = std::make_unique<CallbackLanes>(lane_, meeting);
  allocator_ = HeapAllocator::make(lane_->group);
}

std::vector<uint64_t> ProcessGroupOurs::global_ranks() const {
  std::vector<uint64_t> ranks = options_->global_ranks_in_group;
  if (ranks.empty() && !options_->merged) {  // PyTorch's default group
    ranks.resize(static_cast<size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  return ranks;
}

std::unordered_map<std::string, uint64_t> ProcessGroupOurs::getMemoryStats() {
  status_->check_caller();
  MemoryUse sum;
  const auto add = [&sum](const MemoryUse& use) {
    sum.segment += use.segment;
    sum.tensors += use.tensors;
  };
  for (const auto& lane : all_lanes()) add(lane->group->memory_use());
  if (const auto windows = this->windows()) add(windows->memory_use());
  return {{"segment", sum.segment}, {"tensors", sum.tensors}};
}

// ---- life cycle

std::vector<std::shared_ptr<Lane>> ProcessGroupOurs::all_lanes() const {
  std::vector<std::shared_ptr<Lane>> all = callback_lanes_->all();
  all.push_back(lane_);
  return all;
}

void ProcessGroupOurs::shutdown() {
  if (status_->is_forked_child()) return;
  // A signal handler runs nothing, as that might have to wait for what it has interrupted.
  if (failure().empty() && !in_signal_handler()) drain_queues();
  const auto all = all_lanes();
  for (const auto& lane : all) lane->close();
  for (const auto& lane : all) lane->wait_closed();
  if (const auto windows = this->windows()) windows->leave();
  throw_interrupt();
}

void ProcessGroupOurs::drain_queues() {
  do {
    lane_->queue->drain();
    // These come after the callbacks on what was queued, which may have started more.
    for (const auto& lane : callback_lanes_->all()) {
      if (was_interrupted()) return;
      lane->queue->drain();
    }
  } while (!was_interrupted() && status_->callbacks->await_handed_over());
}

bool ProcessGroupOurs::heard_stop() {
  status_->check_caller();
  if (size_ == 1) return stop_requested();
  StopRecord& stops = lane_->queue->stops();
  const uint64_t last = stops.last_called();
  if (!stops.has_ended(last)) lane_->queue->drain();
  throw_interrupt();
  return stops.told_by(last);
}

void ProcessGroupOurs::waitForPendingWorks() {
  if (status_->is_forked_child() || in_signal_handler()) return;  // as shutdown(), before which torch calls this
  drain_queues();
  throw_interrupt();
}

void ProcessGroupOurs::abort() {
  if (status_->is_forked_child()) return;
  abort_all("abort() was called");
}

void ProcessGroupOurs::abort_all(const char* reason) {
  lane_->abort(reason);
  for (const auto& lane : callback_lanes_->all()) lane->abort(reason);
  if (const auto windows = this->windows()) windows->abort(reason);
}

std::shared_ptr<SymmetricGroup> ProcessGroupOurs::windows() {
  const std::lock_guard<std::mutex> lock(windows_mutex_);
  return windows_;
}

void ProcessGroupOurs::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  status_->timeouts.set(timeout);
}

c10d::ErrorType ProcessGroupOurs::getError() {
  const c10d::ErrorType error = status_->error();
  if (error != c10d::ErrorType::SUCCESS || status_->is_forked_child()) return error;
  // Nothing has failed here, but a peer may have ended the group.
  return failure().empty() ? error : c10d::ErrorType::REMOTE_ERROR;
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ProcessGroupOurs::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  status_->completion_hooks.add(id, [hook = std::move(hook)](uint64_t key, float duration_ms) {
    hook(c10d::CompletionHookArgs{key, duration_ms});
  });
}
#endif

void ProcessGroupOurs::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, "this process group has an on-completion hook already; register one only");
  TORCH_CHECK(lane_->queue->last_sequence() == 0, "register the on-completion hook before the first collective");
  // Shared, since the hook may own Python objects, which cannot be copied without the GIL.
  auto shared = std::make_shared<std::function<void(std::shared_ptr<c10d::WorkInfo>)>>(std::move(hook));
  onCompletionHook_ = [shared](std::shared_ptr<c10d::WorkInfo> info) { (*shared)(std::move(info)); };
  status_->on_completion = onCompletionHook_;
}

// ---- calls

ProcessGroupOurs::WorkPtr ProcessGroupOurs::launch(Collective collective) {
  status_->check_usable();
  if (collective.timeout.count() < 0) collective.timeout = status_->timeouts.get();
  const bool async_op = collective.async_op;
  const Op op = collective.op;
  const Callback* const callback = current_callback(size_);
  Lane& lane = callback == nullptr ? *lane_ : callback_lanes_->lane_of(*callback, op, collective.timeout);
  auto work = or_refuse(op, [&] { return lane.start(std::move(collective), names(), callback); });
  // Completion hooks identify Works by their keys, and compiled graphs register tensors with their Works.
  if (coalescing_.add(work) || async_op || !status_->completion_hooks.empty()) return work;
  if (c10d::allow_inflight_collective_as_graph_input()) return work;
  // For PyTorch no Work means one that is done. Saving a Python object and a call matters for a small collective.
  work->wait();
  return nullptr;
}

void ProcessGroupOurs::refuse(Op op, const std::string& why) {
  if (status_->is_forked_child() || status_->is_closed() || in_signal_handler()) return;
  const Callback* const callback = current_callback(size_);
  Lane& lane = callback == nullptr ? *lane_ : callback_lanes_->lane_of(*callback, op, status_->timeouts.get());
  lane.refuse(op, why, callback);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::post(Op op, const Tensors& tensors, int peer, int tag) {
  status_->check_usable();
  try {
    WorkPtr work = lane_->post(describe_transfer(caller(op), op, tensors, peer, tag), names());
    coalescing_.add(work);
    return work;
  } catch (const c10::ValueError& e) {
    throw_misuse(e);
  }
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::barrier(const c10d::BarrierOptions& opts) {
  std::optional<at::Device> device = lane_->devices->device();
  if (!device) device = getBoundDeviceId();
  return launch(Op::Barrier, describe_barrier, opts, device);
}

void ProcessGroupOurs::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  c10d::BarrierOptions waiting = opts;
  waiting.asyncOp = false;
  const WorkPtr work = launch(Op::MonitoredBarrier, describe_monitored_barrier, waiting, wait_all_ranks);
  if (work) work->wait();
}

void ProcessGroupOurs::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu()) return;
  status_->check_usable();
  lane_->connect_device(device, status_->timeouts.get(), names(), nullptr);
}

// ---- other groups

c10::intrusive_ptr<c10d::Backend> ProcessGroupOurs::split(const StorePtr& store, const std::vector<int>& ranks,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  status_->check_usable();
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  auto options = child_options(opts, *options_);
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "split: rank ", rank, " is not in this group of ", size_, " ranks");
  }
  name_members(*options, *options_, ranks);
  return make_child(store, static_cast<int>(found - ranks.begin()), static_cast<int>(ranks.size()), std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupOurs::merge(const StorePtr& store,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                          const int& rank, const int& size) {
  auto options = child_options(opts, *options_);
  options->merged = true;
  return make_child(store, rank, size, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupOurs::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  TORCH_CHECK(!status_->is_forked_child(), "a forked child cannot shrink its parent's process group");
  TORCH_CHECK(!status_->is_without_ranks(), "a process group without ranks cannot shrink: call reconfigure() first");
  auto options = child_options(opts_override, *options_);
  // Its ranks before reconfigure() may have shrunk more often, or as others do now.
  std::string name = handle_.uuid ? "reconfigure/" + uuid() + '/' : "";
  name += "shrink/" + std::to_string(shrinks_++);
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) != ranks_to_exclude.end()) {
      name += "-" + std::to_string(rank);
    } else {
      members.push_back(rank);
    }
  }
  const auto found = std::find(members.begin(), members.end(), rank_);
  TORCH_CHECK_VALUE(found != members.end(), "shrink: rank ", rank_,
                    " is in ranks_to_exclude; only the ranks that remain may call shrink_group()");
  name_members(*options, *options_, members);
  // Without that flag, operations under way, which may wait for an excluded rank, have until their timeout to end.
  if ((shrink_flags & kShrinkAbort) != 0) abort_all("shrink_group() was called with SHRINK_ABORT");
  return make_child(c10::make_intrusive<c10d::PrefixStore>(name, store_), static_cast<int>(found - members.begin()),
                    static_cast<int>(members.size()), std::move(options));
}

}  // namespace ours
