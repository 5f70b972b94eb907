#include "backend/lane.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <vector>

#include "backend/argument_checks.h"
#include "backend/device/device_call.h"
#include "backend/errors.h"
#include "backend/joining/connect.h"
#include "collectives/straggler_ledger.h"
#include "common/error.h"
#include "common/options.h"

namespace ours {

namespace {

/// How long the end of a group or program waits for a running callback.
constexpr std::chrono::milliseconds kCallbackPatience{5000};

/// How long the end of a program waits for all abort hooks. A hook that still runs Python when the interpreter goes
/// crashes the process, which hides how it ended; PyTorch's, which writes a trace, takes seconds, and more where many
/// ranks share few cores.
constexpr std::chrono::seconds kHookPatience{60};

/// How long the end of a program waits for peers that have yet to join the last operations of its devices.
constexpr std::chrono::milliseconds kLastPatience{5000};

/// All lanes of this process, with the status of their groups, which abort hooks that run keep longer. Never
/// destroyed, since threads may outlive static destructors.
struct Registry {
  struct Known {
    std::weak_ptr<Lane> lane;
    std::weak_ptr<GroupStatus> status;
  };

  std::mutex mutex;
  std::vector<Known> lanes;  // guarded by mutex

  static Registry& instance() {
    static Registry* const registry = new Registry;
    return *registry;
  }

  void add(const std::shared_ptr<Lane>& lane) {
    const std::lock_guard<std::mutex> lock(mutex);
    lanes.erase(std::remove_if(lanes.begin(), lanes.end(), [](const auto& known) { return known.status.expired(); }),
                lanes.end());
    lanes.push_back({lane, lane->status});
  }
};

}  // namespace

Lane::Lane(std::shared_ptr<GroupStatus> state, std::shared_ptr<Group> ranks, std::shared_ptr<PointToPoint> p2p)
    : status(std::move(state)),
      queue(std::make_shared<CommQueue>(std::make_shared<StragglerLedger>(ranks->rank(), ranks->size()),
                                        options().comm_thread_affinity, options().comm_nice)),
      group(std::move(ranks)),
      messages(std::move(p2p)),
      devices(std::make_shared<DeviceContext>(group)),
      transfers(std::make_shared<DeviceTransfers>(messages)) {}

std::shared_ptr<Lane> Lane::open(const Meeting& meeting, std::shared_ptr<GroupStatus> status) {
  Connections made = connect_ranks(meeting);
  std::shared_ptr<Lane> lane(new Lane(std::move(status), std::move(made.group), std::move(made.messages)));
  lane->status->add_connection(lane->group);
  Registry::instance().add(lane);
  return lane;
}

Lane::~Lane() {
  if (status->is_forked_child()) {
    static_cast<void>(new auto(std::make_tuple(status, queue, group, messages, devices, transfers)));
  } else {
    close();
  }
}

// ---- what runs over it

uint64_t Lane::next_number(const Callback* callback) const {
  const uint64_t count = queue->last_sequence() + 1;
  return callback == nullptr ? count : status->number_in_callback(callback->origin(), count);
}

c10::intrusive_ptr<CollectiveWork> Lane::start(Collective collective, const GroupNames& names,
                                               const Callback* callback) {
  const std::chrono::milliseconds timeout = collective.timeout;
  const at::Device device = collective.behind
                                ? *collective.behind
                                : common_device(name_of(collective.op), collective.inputs, collective.outputs);
  std::unique_lock<std::recursive_mutex> order;
  if (!device.is_cpu()) {
    if (!collective.behind) connect_device(device, timeout, names, callback);
    order = std::unique_lock<std::recursive_mutex>(devices->order());
  }
  const uint64_t number = next_number(callback);
  std::unique_ptr<DeviceCall> on_device;
  if (!device.is_cpu()) {
    on_device = device_call(collective, {collective.op, collective.dtype, number, Deadline::after(timeout)});
  }
  // A rank alone waits for nobody, so a thread would gain nothing. A device's work, though, the caller need not wait
  // for.
  const bool may_run_here = !on_device && (group->size() == 1 || (!collective.async_op && options().inline_calls));
  const auto flight =
      status->record({names, collective.op, number, collective.inputs, collective.outputs, std::nullopt}, timeout);
  auto work = c10::make_intrusive<CollectiveWork>(std::move(collective), group, queue, status);
  work->set_flight(flight);
  if (callback != nullptr) work->set_origin(callback->origin());
  const bool captured = on_device && on_device->is_captured();
  if (on_device) work->set_device_call(std::move(on_device));
  if (captured) {
    order.unlock();  // hooks may call the group
    work->complete_captured();
  } else {
    queue->submit(work, may_run_here ? CommQueue::Next::Waits : CommQueue::Next::GoesOn);
  }
  return work;
}

void Lane::refuse(Op op, const std::string& why, const Callback* callback) {
  // What peers capture has no number.
  if (devices->is_capturing()) return;
  Collective refused;
  refused.op = op;
  refused.body = [why](Group&, const Call&) { throw InvalidArgument(why); };
  auto work = c10::make_intrusive<CollectiveWork>(std::move(refused), group, queue, status);
  if (callback != nullptr) work->set_origin(callback->origin());
  queue->submit(work, options().inline_calls ? CommQueue::Next::RunsIt : CommQueue::Next::GoesOn);
}

c10::intrusive_ptr<OursWork> Lane::post(TransferRequest request, const GroupNames& names) {
  request.sequence = transfer_count_.fetch_add(1) + 1;
  const std::chrono::milliseconds timeout = status->timeouts.get();
  const auto work = with_torch_errors(status->where(), [&]() -> c10::intrusive_ptr<TransferWork> {
    const at::Device device = request.tensor.device();
    if (device.is_cpu()) return c10::make_intrusive<TransferWork>(request, messages, status);
    devices->check_alive({request.op, DType::UInt8, request.sequence, Deadline::after(timeout)});
    devices->use(device);
    return c10::make_intrusive<DeviceTransferWork>(request, messages, status, devices, transfers);
  });
  const bool sends = request.op == Op::Send;
  const Tensors tensors{request.tensor};
  work->set_flight(status->record({names, request.op, request.sequence, sends ? tensors : Tensors(),
                                   sends ? TensorLists() : TensorLists{tensors}, request.peer},
                                  timeout));
  work->start();
  return work;
}

std::unique_ptr<DeviceCall> Lane::device_call(const Collective& collective, const Call& call) const {
  return with_torch_errors(status->where(), [&]() -> std::unique_ptr<DeviceCall> {
    // Where streams wait they hear of no error: of a group that has failed the caller has to hear now.
    if (!group->failure().empty()) status->told = true;
    devices->check_alive(call);
    const char* const name = name_of(collective.op);
    if (collective.behind) {
      devices->use(*collective.behind);
      return std::make_unique<HostCall>(devices, name, HostCall::Where::OnHost);
    }
    auto enqueues = std::dynamic_pointer_cast<EnqueueGroup>(devices->made_group());
    if (!enqueues || options().check == CheckTime::Before) {
      return std::make_unique<HostCall>(devices, name, HostCall::Where::OnDevice);
    }
    return std::make_unique<EnqueuedCall>(devices, std::move(enqueues), collective.body, call);
  });
}

void Lane::connect_device(at::Device device, std::chrono::milliseconds timeout, const GroupNames& names,
                          const Callback* callback) {
  with_torch_errors(status->where(), [&] { devices->use(device); });
  if (devices->made_group()) return;
  // In the order of the collectives, as all that ranks do together. The host waits.
  Collective meeting;
  meeting.body = [devices = devices](Group&, const Call& call) { devices->make_group(call); };
  meeting.op = Op::Barrier;
  meeting.async_op = false;
  meeting.timeout = timeout;
  start(std::move(meeting), names, callback)->wait();
}

// ---- how it ends

void Lane::abort(const std::string& reason) const {
  status->set_aborted();
  group->abort(reason);
  devices->abort(reason);
}

void Lane::drain(Deadline deadline) const noexcept {
  try {
    if (!devices->device() || status->error() != c10d::ErrorType::SUCCESS || !group->failure().empty()) return;
    queue->wait_idle(std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Clock::now()));
  } catch (const std::exception& e) {
    TORCH_WARN("cannot wait for the last operations of a process group: ", e.what());
  }
}

void Lane::close() const noexcept {
  status->set_closed();
  try {
    // wait() may have returned before the operation failed.
    if (devices->enqueues() && !group->failure().empty() && !status->told.exchange(true)) {
      TORCH_WARN("a process group was destroyed after a failure that no call had reported: ", group->failure());
    }
    if (queue->busy()) {
      abort("the group was destroyed, or the process exited, while operations were still pending");
    }
    messages->close();
    transfers->close();
    devices->leave();
    group->leave();
    queue->stop();
  } catch (const std::exception& e) {
    TORCH_WARN("cannot close a process group cleanly: ", e.what());
  }
}

void Lane::wait_closed() const noexcept {
  try {
    queue->wait_stopped(kCallbackPatience);
    transfers->wait_closed(kCallbackPatience);  // it hands callbacks over to the messages
    messages->wait_closed(kCallbackPatience);
  } catch (const std::exception& e) {
    TORCH_WARN("cannot wait for the threads of a closed process group: ", e.what());
  }
}

void Lane::close_all() noexcept {
  std::vector<std::shared_ptr<Lane>> lanes;
  std::vector<std::shared_ptr<GroupStatus>> statuses;
  {
    Registry& registry = Registry::instance();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    for (const auto& known : registry.lanes) {
      auto status = known.status.lock();
      if (!status || status->is_forked_child()) continue;
      statuses.push_back(std::move(status));
      if (auto lane = known.lane.lock()) lanes.push_back(std::move(lane));
    }
    registry.lanes.clear();
  }
  // All are closed before any is waited for, since a callback of one may wait for another.
  const Deadline deadline = Deadline::after(kLastPatience);
  for (const auto& lane : lanes) lane->drain(deadline);
  for (const auto& lane : lanes) lane->close();
  for (const auto& lane : lanes) lane->wait_closed();
  const Deadline end_of_hooks = Deadline::after(kHookPatience);
  for (const auto& status : statuses) {
    if (status->wait_for_abort_hooks(end_of_hooks)) continue;
    TORCH_WARN("an abort hook of a process group still runs after ", kHookPatience.count(),
               " s. The program ends all the same, which may crash it if the hook uses Python");
  }
}

}  // namespace ours
