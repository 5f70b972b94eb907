#include "backend/symmetric/window.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/process_group.h"
#include "backend/symmetric/symmetric_allocator.h"
#include "backend/tensors.h"
#include "backend/work.h"
#include "common/interrupts.h"
#include "transport/wait.h"

namespace ours {

namespace {

/// Why a rank's tensor cannot be registered.
constexpr const char* kTroubles[] = {
    nullptr, "is not on the CPU", "is not contiguous",
    "is not in symmetric memory; allocate it with torch.distributed._symmetric_memory.empty(..., device=\"cpu\")"};

/// What a rank says of its tensor. It travels as the facts of a SharedBlock.
struct TensorFacts {
  int64_t offset;  ///< bytes from the beginning of the block
  int64_t elements;
  at::ScalarType type;
  int64_t trouble;  ///< index in kTroubles; 0: none

  static TensorFacts of(const SharedBlock& shared) {
    const auto& facts = shared.facts;
    return {facts[0], facts[1], static_cast<at::ScalarType>(facts[2]), facts[3]};
  }
};

SharedBlock with_facts(std::shared_ptr<SymmetricBlock> block, const TensorFacts& facts) {
  return {std::move(block), {facts.offset, facts.elements, static_cast<int64_t>(facts.type), facts.trouble}};
}

/// A tensor that cannot be registered takes part as well, so that all ranks hear of it.
SharedBlock describe(SymmetricGroup& group, const at::Tensor& tensor) {
  const auto is_plain = [&] {
    return tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  };
  int64_t trouble = !tensor.is_cpu() ? 1 : !is_plain() ? 2 : 0;
  std::shared_ptr<SymmetricBlock> block;
  if (trouble == 0) block = find_symmetric_block(tensor.storage().data_ptr().get());
  if (block == nullptr && trouble == 0) trouble = 3;
  if (trouble != 0) return with_facts(group.make_block(0), {0, 0, at::kByte, trouble});
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const int64_t offset = tensor.numel() == 0 ? 0 : data - block->data();
  return with_facts(std::move(block), {offset, tensor.numel(), tensor.scalar_type(), 0});
}

/// What a call returns that has ended already.
OursWindow::WorkPtr ended(bool async_op) { return async_op ? completed_work() : nullptr; }

}  // namespace

struct OursWindow::Registered {
  Registered(const std::shared_ptr<NodeSession>& session, std::vector<SharedBlock> shared,
             std::vector<SharedBlock> of_signals)
      : tensors(std::move(shared)), counters(std::move(of_signals)), signals(session, data_of(counters)) {}

  TensorFacts facts_of(int64_t rank) const { return TensorFacts::of(tensors[static_cast<size_t>(rank)]); }
  std::byte* tensor_of(int64_t rank) const {
    return tensors[static_cast<size_t>(rank)].block->data() + facts_of(rank).offset;
  }

  const std::vector<SharedBlock> tensors;
  const std::vector<SharedBlock> counters;
  SignalCounters signals;
  at::Tensor own;  ///< undefined unless the window owns it
};

/// A signal that is awaited. It is taken by the thread that waits for the Work or asks whether it has ended.
class OursWindow::SignalWork final : public c10d::Work {
 public:
  SignalWork(std::shared_ptr<SymmetricGroup> group, std::shared_ptr<Registered> registered, int from,
             std::chrono::milliseconds timeout)
      : Work(group->rank(), c10d::OpType::UNKNOWN),
        group_(std::move(group)),
        registered_(std::move(registered)),
        from_(from),
        timeout_(timeout) {}

  bool isCompleted() override {
    const WithoutInterpreterLock unlocked;
    // Whoever holds it waits for the signal. In a signal handler, that may be this thread.
    const std::unique_lock<std::mutex> lock(taking_, std::try_to_lock);
    return lock.owns_lock() ? has_ended() : Work::isCompleted();
  }

  /// After a timeout, the signal can be awaited again.
  bool wait(std::chrono::milliseconds timeout) override {
    if (!Work::isCompleted()) {
      group_->check_caller();
      const WithoutInterpreterLock unlocked;
      const std::lock_guard<std::mutex> lock(taking_);
      if (!has_ended()) {
        const bool own = timeout.count() <= 0;  // kNoTimeout is 0
        group_->run([&] { registered_->signals.wait(from_, own ? timeout_ : timeout); });
        finish();
      }
    }
    if (exception()) std::rethrow_exception(exception());
    return true;
  }

  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(false, "wait_signal of a window has no future: nothing runs until its Work is waited for");
  }

 private:
  /// Takes the signal, if it is there, and now and then looks at the peer. With the lock.
  bool has_ended() {
    if (Work::isCompleted()) return true;
    bool taken = registered_->signals.take(from_);
    // To look at the peer may fail the group, which a signal handler must not.
    if (!taken && (in_signal_handler() || Clock::now() < next_look_)) return false;
    next_look_ = Clock::now() + kLookAround;
    try {
      if (!taken) group_->run([&] { taken = look_at_peer(); });
      if (taken) finish();
      return taken;
    } catch (...) {
      finish(std::current_exception());
      return true;
    }
  }

  bool look_at_peer() {
    NodeSession& session = *group_->session();
    session.failure().check();
    const char* const why = session.absence(from_);
    if (why == nullptr) return false;
    if (registered_->signals.take(from_)) return true;  // sent before that
    session.lost(from_, why, "wait_signal of a window");
  }

  const std::shared_ptr<SymmetricGroup> group_;
  const std::shared_ptr<Registered> registered_;
  const int from_;
  const std::chrono::milliseconds timeout_;
  std::mutex taking_;
  Clock::time_point next_look_{};
};

void OursWindow::tensor_register(const at::Tensor& tensor, bool owning) {
  TORCH_CHECK(!registered_, "this window has a tensor already; call tensor_deregister() first");
  auto tensors = group_->share(Op::WindowRegistration, describe(*group_, tensor));
  for (size_t r = 0; r < tensors.size(); ++r) {
    const int64_t trouble = TensorFacts::of(tensors[r]).trouble;
    TORCH_CHECK_VALUE(trouble == 0, "the tensor of rank ", r, " for a window ", kTroubles[trouble]);
  }
  const size_t bytes = tensors.size() * SignalCounters::kWordBytes;
  auto counters = group_->share(Op::WindowRegistration, {group_->make_block(bytes), {}});
  registered_ = std::make_shared<Registered>(group_->session(), std::move(tensors), std::move(counters));
  if (owning) registered_->own = tensor;
}

void OursWindow::tensor_deregister() {
  registered();
  group_->meet(Op::WindowRegistration);
  registered_.reset();
}

OursWindow::WorkPtr OursWindow::put(const at::Tensor& tensor, int64_t dst_rank, int64_t target_offset, bool async_op,
                                    const c10d::PutOptions& /*opts*/) {
  const Registered& registered = this->registered();
  check_peer(dst_rank);
  const TensorFacts there = registered.facts_of(dst_rank);
  TORCH_CHECK_VALUE(tensor.is_cpu(), "put: the tensor is on ", tensor.device(), ", the window on the CPU");
  TORCH_CHECK_VALUE(tensor.scalar_type() == there.type, "put: the tensor is ", tensor.scalar_type(),
                    ", the window of rank ", dst_rank, " ", there.type);
  const bool fits =
      target_offset >= 0 && target_offset <= there.elements && tensor.numel() <= there.elements - target_offset;
  TORCH_CHECK_VALUE(fits, "put: ", tensor.numel(), " elements at offset ", target_offset, " are not inside the ",
                    there.elements, " elements of rank ", dst_rank);
  group_->run([&] { group_->session()->failure().check(); });
  const at::Tensor source = contiguous_source(tensor);
  const size_t size = source.element_size();
  std::byte* const to = registered.tensor_of(dst_rank) + static_cast<size_t>(target_offset) * size;
  // A part of the own window may be put to where it overlaps.
  if (source.numel() > 0) std::memmove(to, source.const_data_ptr(), static_cast<size_t>(source.numel()) * size);
  return ended(async_op);
}

at::Tensor OursWindow::map_remote_tensor(int64_t rank) {
  const Registered& registered = this->registered();
  check_peer(rank);
  group_->check_caller();
  const TensorFacts there = registered.facts_of(rank);
  const auto keep = [registered = registered_](void*) {};
  return at::from_blob(registered.tensor_of(rank), {there.elements}, keep, at::TensorOptions(there.type));
}

OursWindow::WorkPtr OursWindow::signal(int64_t peer_rank, bool async_op, const c10d::SignalOptions& /*opts*/) {
  registered();
  check_peer(peer_rank);
  group_->run([&] {
    group_->session()->failure().check();
    registered_->signals.send(static_cast<int>(peer_rank));
  });
  return ended(async_op);
}

OursWindow::WorkPtr OursWindow::wait_signal(int64_t peer_rank, bool async_op, const c10d::WaitSignalOptions& opts) {
  registered();
  check_peer(peer_rank);
  const auto timeout = opts.timeout.count() > 0 ? opts.timeout : group_->timeout();
  auto work = c10::make_intrusive<SignalWork>(group_, registered_, static_cast<int>(peer_rank), timeout);
  if (async_op) return work;
  work->wait(kNoTimeout);
  return nullptr;
}

c10d::WindowAttr OursWindow::get_attr(int64_t peer_rank) {
  check_peer(peer_rank);
  return {c10d::WindowAccessType::UNIFIED};
}

const OursWindow::Registered& OursWindow::registered() const {
  TORCH_CHECK(registered_, "this window has no tensor; call tensor_register() on all ranks first");
  return *registered_;
}

void OursWindow::check_peer(int64_t rank) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < group_->size(), "rank ", rank, " is not one of the ", group_->size(),
                    " ranks of the window");
}

c10::intrusive_ptr<c10d::Window> ProcessGroupOurs::new_window(const std::optional<at::Tensor>& tensor) {
  status_->check_usable();
  TORCH_CHECK_VALUE(supportsWindow(), "a window needs ranks that share a node's memory, but these are on ",
                    node_sizes().size(), " nodes. Make a group of the ranks of each node with new_group()");
  std::shared_ptr<SymmetricGroup> group = windows();
  if (!group) {
    const WithoutInterpreterLock unlocked;
    const std::string& own = options_->group_name;
    const std::string name =
        "the windows of " + (own.empty() ? std::string("the process group") : "group '" + own + "'");
    // The ranks before reconfigure() may have come together more often.
    auto store = c10::make_intrusive<c10d::PrefixStore>("ours/windows/" + uuid(), store_);
    group = SymmetricGroup::join(Meeting{std::move(store), rank_, size_, status_->timeouts.get(), name, ""});
    const std::lock_guard<std::mutex> lock(windows_mutex_);
    windows_ = group;
  }
  auto window = c10::make_intrusive<OursWindow>(group);
  if (tensor) window->tensor_register(*tensor, true);
  return window;
}

}  // namespace ours

#endif  // C10D_BACKEND_HAS_WINDOW
