#include "support/fake_nccl.h"

#include <atomic>

namespace ours::testing {

/// Where the ranks of a communicator meet: what each was given, and a barrier.
struct FakeNccl::Meeting {
  explicit Meeting(int ranks) : batches(static_cast<size_t>(ranks)), aborted(batches.size()) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Batch> batches;
  size_t arrived = 0;
  uint64_t round = 0;
  std::vector<bool> aborted;  ///< by rank: each ends only what it waits for itself

  /// False where the rank has aborted.
  bool sync(size_t rank) {
    std::unique_lock<std::mutex> lock(mutex);
    const uint64_t mine = round;
    if (++arrived == batches.size()) {
      arrived = 0;
      ++round;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return aborted[rank] || round != mine; });
    return !aborted[rank];
  }
};

NcclId FakeNccl::make_id() {
  static std::atomic<int> next{0};
  NcclId id{};
  const int number = ++next;
  std::memcpy(id.data(), &number, sizeof(number));
  return id;
}

void FakeNccl::init(int ranks, const NcclId& id, int rank, NcclComm& comm) {
  static std::mutex mutex;
  static std::map<NcclId, std::weak_ptr<Meeting>> meetings;
  const std::lock_guard<std::mutex> lock(mutex);
  meeting_ = meetings[id].lock();
  if (meeting_ == nullptr) meetings[id] = meeting_ = std::make_shared<Meeting>(ranks);
  rank_ = rank;
  comm = meeting_.get();
}

bool FakeNccl::ready(NcclComm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw DeviceError(failure_);
  return ++asked_ % 2 == 0;
}

void FakeNccl::abort(NcclComm) noexcept {
  end("abort");
  const std::lock_guard<std::mutex> lock(meeting_->mutex);
  meeting_->aborted[static_cast<size_t>(rank_)] = true;
  meeting_->changed.notify_all();
}

void FakeNccl::count(const char* name) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_[name];
}

void FakeNccl::end(const char* name) noexcept {
  if (on_end_) on_end_();
  count(name);
}

void FakeNccl::add(const Operation& operation, const char* name, NcclPlace at) {
  count(name);
  batch_.push_back(operation);
  stream_ = at.stream;
  if (!grouped_) run(std::exchange(batch_, {}), stream_);
}

void FakeNccl::end_group() {
  grouped_ = false;
  if (!batch_.empty()) run(std::exchange(batch_, {}), stream_);
}

namespace {

std::pair<DType, size_t> element_of(NcclType type) {
  static constexpr DType kTypes[] = {DType::Int8,   DType::UInt8,   DType::Int32,   DType::UInt32,  DType::Int64,
                                     DType::UInt64, DType::Float16, DType::Float32, DType::Float64, DType::BFloat16};
  const DType dtype = kTypes[static_cast<int>(type)];
  return {dtype, size_of(dtype)};
}

ReduceKind kind_of(NcclOp op) {
  static constexpr ReduceKind kKinds[] = {ReduceKind::Sum, ReduceKind::Product, ReduceKind::Max, ReduceKind::Min,
                                          ReduceKind::Avg};
  return kKinds[static_cast<int>(op)];
}

}  // namespace

/// What `rank` gets of its operation number `index`; the number of a message counts those of the same pair.
std::vector<char> FakeNccl::result_of(const Meeting& meeting, int rank, size_t index) {
  const Batch& mine = meeting.batches[static_cast<size_t>(rank)];
  const Operation& own = mine[index];
  const size_t element = element_of(own.type).second, bytes = own.count * element;
  if (own.kind == Kind::Send || (own.kind == Kind::Reduce && own.peer != rank)) return {};
  if (own.kind == Kind::Receive) {
    for (const Operation& sent : meeting.batches[static_cast<size_t>(own.peer)]) {
      if (sent.kind != Kind::Send || sent.peer != rank) continue;
      if (sent.count != own.count) throw DeviceError("a message is not as long as its receiver expects");
      return {static_cast<const char*>(sent.in), static_cast<const char*>(sent.in) + bytes};
    }
    throw DeviceError("nobody sends what is to be received");
  }
  std::vector<const void*> inputs;
  std::vector<char> result;
  for (const Batch& batch : meeting.batches) {
    const Operation& other = batch.at(index);
    if (other.kind != own.kind || other.count != own.count || other.op != own.op) {
      throw DeviceError("the ranks call different operations");
    }
    const auto* in = static_cast<const char*>(other.in);
    if (own.kind == Kind::AllGather) result.insert(result.end(), in, in + bytes);
    inputs.push_back(own.kind == Kind::ReduceScatter ? in + static_cast<size_t>(rank) * bytes : in);
  }
  if (own.kind == Kind::AllGather) return result;
  if (own.kind == Kind::Broadcast) {
    const auto* in = static_cast<const char*>(inputs[static_cast<size_t>(own.peer)]);
    return {in, in + bytes};
  }
  result.resize(bytes);
  const auto ranks = static_cast<int>(inputs.size());
  ours::reduce(result.data(), inputs.data(), ranks, own.count, element_of(own.type).first, {kind_of(own.op), ranks, 1});
  return result;
}

void FakeNccl::run(const Batch& batch, StreamHandle stream) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;  // what others do with it does not end
  }
  device_->run(stream, [meeting = meeting_, rank = rank_, batch] {
    const auto me = static_cast<size_t>(rank);
    meeting->batches[me] = batch;
    if (!meeting->sync(me)) return;
    std::vector<std::vector<char>> results;
    for (size_t i = 0; i < batch.size(); ++i) results.push_back(result_of(*meeting, rank, i));
    // All have read what others may now write over.
    if (!meeting->sync(me)) return;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (!results[i].empty()) std::memcpy(batch[i].out, results[i].data(), results[i].size());
    }
    meeting->sync(me);
  });
}

}  // namespace ours::testing
