#include "backend/flight_recorder.h"

#include "collectives/call_number.h"
#include "collectives/messages/point_to_point.h"

#if __has_include(<torch/csrc/distributed/c10d/hooks/FlightRecorderHook.hpp>)
#define OURS_RECORDS_FLIGHTS 1
#include <c10/core/Event.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <atomic>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <tuple>
#endif

namespace ours {

#ifdef OURS_RECORDS_FLIGHTS

namespace {

constexpr const char* kBackend = "ours";

std::atomic<void (*)(bool)> around_dump{nullptr};

/// An exception becomes a warning, as that of a hook does: the trace matters more.
void call_around_dump(bool begins) {
  try {
    if (const auto around = around_dump.load()) around(begins);
  } catch (const std::exception& e) {
    TORCH_WARN("the function around the dump of a trace raised: ", e.what());
  }
}

/// The number of our first group. PyTorch's hook numbers the groups that it is attached to from zero.
constexpr size_t kFirstGroup = 1 << 20;

/// With more groups than these, the recorder is searched for some that it can forget.
constexpr size_t kMostGroups = 64;

class TorchFlightLog final : public FlightLog {
 public:
  using Recorder = c10d::FlightRecorder<c10::Event>;

  TorchFlightLog(Recorder& recorder, FlightGroup group)
      : recorder_(recorder), group_(std::move(group)), pg_id_(next_pg_id().fetch_add(1)), made_(c10::getTime()) {
    // The rank is part of a dump's file name: an invented one would be another rank's.
    if (group_.global_ranks.empty()) return;
    recorder_.setRank(static_cast<int>(group_.global_ranks[static_cast<size_t>(group_.rank)]));
  }

  std::optional<Entry> issued(const CallTrace& call, std::chrono::milliseconds timeout) override {
    // Captured without the lock, since it may wait for the GIL.
    auto stack = torch::CapturedTraceback::gather(true, true, recorder_.capture_cpp_stack_);
    const std::lock_guard<std::mutex> lock(recorder_.mutex_);
    if (!introduced_) introduce(call);
    if (hooked_) return std::nullopt;
    Recorder::Entry& entry = next_entry();
    entry.traceback_.swap(stack);
    describe(entry, call, timeout);
    return Entry{entry.id_, entry.reset_epoch_, call.sequence};
  }

  void started(const Entry& entry) override {
    const std::lock_guard<std::mutex> lock(recorder_.mutex_);
    if (Recorder::Entry* found = find(entry)) {
      found->time_discovered_started_ = c10::getTime();
      if (found->isP2P_) return;
      // A call of another thread may have come in between since it was issued.
      found->collective_seq_id_ = count_of(entry.sequence);
      if (!is_in_callback(entry.sequence)) status_->lastStartedSeq = static_cast<int64_t>(entry.sequence);
    }
  }

  void completed(const Entry& entry, float duration_ms) override {
    const std::lock_guard<std::mutex> lock(recorder_.mutex_);
    Recorder::Entry* found = find(entry);
    if (found == nullptr) return;
    found->time_discovered_completed_ = c10::getTime();
    found->duration_ = duration_ms;
    found->retired_ = true;
    if (!found->isP2P_ && !is_in_callback(entry.sequence))
      status_->lastCompletedSeq = static_cast<int64_t>(entry.sequence);
  }

  void dump() override {
    static std::atomic<bool> dumped{false};
    if (!c10d::getCvarBool(c10d::TORCH_FR_DUMP_ON_TIMEOUT, true) || dumped.exchange(true)) return;
    const std::lock_guard<std::mutex> lock(dumping());
    call_around_dump(true);
    c10d::try_dump_fr_trace_file(true, c10d::getCvarBool(c10d::TORCH_INCLUDE_STACK_TRACE, true),
                                 c10d::getCvarBool(c10d::TORCH_INCLUDE_ONLY_ACTIVE, false), kBackend);
    call_around_dump(false);
  }

 private:
  using Name = std::tuple<std::string, std::string>;

  /// Held while a trace is written: PyTorch then reads the groups without its own mutex.
  static std::mutex& dumping() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }

  /// The ids of the groups that had the names last. Guarded by the recorder's mutex, and, like it, never destroyed.
  static std::map<Name, size_t>& last_owners() {
    static auto* const owners = new std::map<Name, size_t>;
    return *owners;
  }

  static std::atomic<size_t>& next_pg_id() {
    static std::atomic<size_t> next{kFirstGroup};
    return next;
  }

  /// Registers the group at its first operation. If the group also has a backend that does not record its operations,
  /// PyTorch has attached its hook to the whole group, and the hook has just recorded this operation: then the hook
  /// records everything.
  void introduce(const CallTrace& call) {
    introduced_ = true;
    name_ = {call.group.name, call.group.description};
    for (const Recorder::Entry& entry : recorder_.entries_) {
      const bool foreign = entry.pg_id_ < kFirstGroup;
      hooked_ = hooked_ || (foreign && entry.pg_name_ == name_ && entry.time_created_ >= made_);
    }
    if (hooked_) return;
    recorder_.entries_.reserve(recorder_.max_entries_);
    if (recorder_.all_pg_status_.size() > kMostGroups) forget_past_groups();
    recorder_.all_pg_status_[pg_id_] = status_;
    add_name(name_);
  }

  void add_name(const Name& name) {
    if (group_.global_ranks.empty()) return;
    recorder_.pg_name_to_ranks_[name] = group_.global_ranks;
    last_owners()[name] = pg_id_;
  }

  /// Forgets the groups that are gone, which PyTorch never does: only the recorder still has their status, and none of
  /// their entries is left.
  void forget_past_groups() {
    const std::unique_lock<std::mutex> lock(dumping(), std::try_to_lock);
    if (!lock) return;
    std::set<size_t> recent;
    for (const Recorder::Entry& entry : recorder_.entries_) recent.insert(entry.pg_id_);
    auto& statuses = recorder_.all_pg_status_;
    for (auto it = statuses.lower_bound(kFirstGroup); it != statuses.end();) {
      const bool past = it->second.use_count() == 1 && recent.count(it->first) == 0;
      it = past ? statuses.erase(it) : std::next(it);
    }
    for (auto it = last_owners().begin(); it != last_owners().end();) {
      const bool past = statuses.count(it->second) == 0;
      if (past) recorder_.pg_name_to_ranks_.erase(it->first);
      it = past ? last_owners().erase(it) : std::next(it);
    }
  }

  /// What callbacks start is numbered separately, so it appears as another group of the same ranks.
  void introduce_callbacks() {
    if (!std::get<0>(callbacks_name_).empty()) return;
    callbacks_name_ = {std::get<0>(name_) + "/callbacks", std::get<1>(name_)};
    add_name(callbacks_name_);
  }

  /// The entry to overwrite: the oldest one once the ring is full.
  Recorder::Entry& next_entry() {
    const size_t place = recorder_.next_;
    if (recorder_.entries_.size() < recorder_.max_entries_) recorder_.entries_.emplace_back();
    recorder_.next_ = (place + 1) % recorder_.max_entries_;
    Recorder::Entry& entry = recorder_.entries_[place];
    entry.id_ = recorder_.id_++;
    entry.reset_epoch_ = recorder_.reset_epoch_;
    return entry;
  }

  void describe(Recorder::Entry& entry, const CallTrace& call, std::chrono::milliseconds timeout) {
    static const thread_local std::string thread_name = c10::getThreadName();
    const OpFacts& facts = op_facts(call.op);
    const bool p2p = c10d::isP2POp(facts.type);
    const bool in_callback = !p2p && is_in_callback(call.sequence);
    if (in_callback) {
      introduce_callbacks();
    } else {
      (p2p ? transfers_ : collectives_) = call.sequence;
      if (!p2p) status_->lastEnqueuedSeq = static_cast<int64_t>(call.sequence);
    }
    entry.pg_id_ = pg_id_;
    entry.pg_name_ = in_callback ? callbacks_name_ : name_;
    entry.collective_seq_id_ = in_callback ? count_of(call.sequence) : collectives_;
    entry.p2p_seq_id_ = transfers_;
    entry.op_id_ = operations_++;
    entry.profiling_name_ = facts.flight_name;
    if (call.peer) entry.profiling_name_ += route(call, *call.peer);
    entry.start_ = entry.end_ = nullptr;
    entry.time_created_ = c10::getTime();
    entry.timeout_ms_ = timeout.count();
    entry.isP2P_ = p2p;
    entry.duration_.reset();
    entry.time_discovered_started_.reset();
    entry.time_discovered_completed_.reset();
    entry.thread_id_ = std::this_thread::get_id();
    entry.thread_name_ = thread_name;
    entry.retired_ = false;
    entry.sizes_.clear();
    entry.input_dims_.clear();
    entry.input_dtypes_.clear();
    entry.output_dims_.clear();
    entry.output_dtypes_.clear();
    for (const at::Tensor& tensor : call.inputs) {
      add_tensor(entry.sizes_, entry.input_dims_, entry.input_dtypes_, tensor);
    }
    for (const auto& list : call.outputs) {
      for (const at::Tensor& tensor : list) {
        add_tensor(entry.sizes_, entry.output_dims_, entry.output_dtypes_, tensor);
      }
    }
  }

  /// " 0->1" for a send and " 1<-0" for a receive, by which PyTorch's analyser matches them.
  static std::string route(const CallTrace& call, int peer) {
    return ' ' + std::to_string(call.group.rank) + (call.op == Op::Send ? "->" : "<-") +
           (peer == kAnySource ? "?" : std::to_string(peer));
  }

  template <class Sizes, class Dims>
  static void add_tensor(Sizes& sizes, Dims& dims, std::vector<c10::ScalarType>& dtypes, const at::Tensor& tensor) {
    dtypes.push_back(tensor.scalar_type());
    dims.push_back(tensor.dim());
    sizes.append(tensor.sizes().begin(), tensor.sizes().end());
  }

  /// Null once a later entry has overwritten it.
  Recorder::Entry* find(const Entry& entry) {
    const auto start = recorder_.reset_epoch_start_idx_.find(entry.epoch);
    if (start == recorder_.reset_epoch_start_idx_.end()) return nullptr;
    Recorder::Entry& found = recorder_.entries_[(start->second + entry.id) % recorder_.max_entries_];
    return found.id_ == entry.id && found.reset_epoch_ == entry.epoch ? &found : nullptr;
  }

  Recorder& recorder_;  // the process's, never destroyed; its mutex guards all below
  const FlightGroup group_;
  const size_t pg_id_;
  const c10::time_t made_;
  const std::shared_ptr<c10d::ProcessGroupStatus> status_ = std::make_shared<c10d::ProcessGroupStatus>();
  Name name_;
  Name callbacks_name_;  ///< empty until callbacks start something
  bool introduced_ = false;
  bool hooked_ = false;
  size_t collectives_ = 0;
  size_t transfers_ = 0;
  size_t operations_ = 0;
};

}  // namespace

bool records_flights() { return true; }

void set_around_dump(void (*around)(bool begins)) { around_dump = around; }

std::unique_ptr<FlightLog> FlightLog::make(const FlightGroup& group) {
  auto* recorder = c10d::getFlightRecorder(kBackend);
  if (recorder == nullptr || !recorder->enabled_) return nullptr;
  return std::make_unique<TorchFlightLog>(*recorder, group);
}

#else

bool records_flights() { return false; }

void set_around_dump(void (*)(bool)) {}

std::unique_ptr<FlightLog> FlightLog::make(const FlightGroup&) { return nullptr; }

#endif

}  // namespace ours
