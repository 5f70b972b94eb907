#include "support/fake_nccl.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "common/shared_memory.h"

namespace ours::testing {

using cuda::ncclInProgress;
using cuda::ncclResult_t;
using cuda::ncclSuccess;

namespace {

constexpr size_t kMostRanks = 80;
constexpr size_t kMostOperations = 256;
constexpr size_t kSlot = size_t{40} << 20;              // unused pages take no memory
constexpr auto kFailed = static_cast<ncclResult_t>(6);  // a remote process

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

/// The place where the ranks of a communicator meet, in memory that they share: a barrier, and for each rank a slot
/// with what it was given and the inputs of that.
struct FakeNccl::Meeting {
  struct Entry {
    Operation operation;
    size_t at;  ///< of its input in the slot
  };
  struct Slot {
    size_t count;
    Entry entries[kMostOperations];
  };
  struct Head {
    std::atomic<size_t> arrived;
    std::atomic<uint32_t> round;
    std::atomic<bool> aborted[kMostRanks];  ///< by rank: each ends only what it waits for itself
  };

  explicit Meeting(std::shared_ptr<SharedMemory> shared) : memory(std::move(shared)) {}
  static size_t bytes() { return (kMostRanks + 1) * kSlot; }

  Head& head() const { return *reinterpret_cast<Head*>(memory->data()); }
  std::byte* slot(size_t rank) const { return memory->data() + (rank + 1) * kSlot; }

  void write(size_t rank, const Batch& batch) const {
    auto& table = *reinterpret_cast<Slot*>(slot(rank));
    table.count = 0;
    size_t at = sizeof(Slot);
    for (const Operation& operation : batch) {
      const size_t input = operation.inputs(ranks) * element_of(operation.type).second;
      if (table.count == kMostOperations || at + input > kSlot) throw DeviceError("the fake NCCL is given too much");
      if (input != 0) std::memcpy(slot(rank) + at, operation.in, input);
      table.entries[table.count++] = {operation, at};
      at += input;
    }
  }

  /// The work that a rank was given, with the inputs where they can be read.
  Batch read(size_t rank) const {
    const auto& table = *reinterpret_cast<const Slot*>(slot(rank));
    Batch batch;
    for (size_t i = 0; i < table.count; ++i) {
      batch.push_back(table.entries[i].operation);
      batch.back().in = slot(rank) + table.entries[i].at;
    }
    return batch;
  }

  /// Returns false if the rank has aborted.
  bool sync(size_t rank) const {
    const uint32_t mine = head().round;
    if (++head().arrived == ranks) {
      head().arrived = 0;
      ++head().round;
    }
    while (!head().aborted[rank] && head().round == mine) std::this_thread::sleep_for(std::chrono::microseconds(20));
    return !head().aborted[rank];
  }

  void await_abort(size_t rank) const {
    while (!head().aborted[rank]) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  const std::shared_ptr<SharedMemory> memory;
  size_t ranks = 0;
};

FakeNccl::FakeNccl(std::shared_ptr<StandInDevice> device) : device_(std::move(device)) {
  // The path of the memory in which the ranks meet.
  get_unique_id.run = [this](NcclId* id) {
    meeting_ = std::make_shared<Meeting>(SharedMemory::create(Meeting::bytes()));
    const std::string path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(meeting_->memory->fd());
    std::memcpy(id->data(), path.data(), path.size());
    return ncclSuccess;
  };
  init.run = [this](NcclComm* comm, int ranks, const NcclId& id, int rank, cuda::ncclConfig_t*) {
    if (!meeting_) meeting_ = std::make_shared<Meeting>(SharedMemory::open(id.data()));
    meeting_->ranks = static_cast<size_t>(ranks);
    rank_ = rank;
    *comm = meeting_.get();
    return ncclInProgress;
  };
  async_error.run = [this](NcclComm, ncclResult_t* now) {
    *now = state();
    return ncclSuccess;
  };
  error_string.run = [](ncclResult_t) { return "the fake was told to fail"; };
  last_error.run = [this](NcclComm) { return failure_.c_str(); };
  finalize.run = [this](NcclComm) {
    count("finalize");
    return ncclInProgress;
  };
  destroy.run = [this](NcclComm) { return end("destroy"); };
  abort.run = [this](NcclComm) { return end("abort"); };
  group_start.run = [this] {
    grouped_ = true;
    return ncclSuccess;
  };
  group_end.run = [this] { return end_group(); };
  all_reduce.run = [this](const void* in, void* out, size_t n, NcclType type, NcclOp op, NcclComm, StreamHandle s) {
    return add("all_reduce", {Kind::AllReduce, in, out, n, type, op, -1}, s);
  };
  reduce.run = [this](const void* in, void* out, size_t n, NcclType type, NcclOp op, int root, NcclComm,
                      StreamHandle s) { return add("reduce", {Kind::Reduce, in, out, n, type, op, root}, s); };
  reduce_scatter.run = [this](const void* in, void* out, size_t n, NcclType type, NcclOp op, NcclComm, StreamHandle s) {
    return add("reduce_scatter", {Kind::ReduceScatter, in, out, n, type, op, -1}, s);
  };
  broadcast.run = [this](const void* in, void* out, size_t n, NcclType type, int root, NcclComm, StreamHandle s) {
    return add("broadcast", {Kind::Broadcast, in, out, n, type, NcclOp::Sum, root}, s);
  };
  all_gather.run = [this](const void* in, void* out, size_t n, NcclType type, NcclComm, StreamHandle s) {
    return add("all_gather", {Kind::AllGather, in, out, n, type, NcclOp::Sum, -1}, s);
  };
  send.run = [this](const void* data, size_t n, NcclType type, int to, NcclComm, StreamHandle s) {
    return add("send", {Kind::Send, data, nullptr, n, type, NcclOp::Sum, to}, s);
  };
  receive.run = [this](void* data, size_t n, NcclType type, int from, NcclComm, StreamHandle s) {
    return add("receive", {Kind::Receive, nullptr, data, n, type, NcclOp::Sum, from}, s);
  };
}

ncclResult_t FakeNccl::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (freed_) ++calls_["use after abort"];
  if (!failure_.empty()) return kFailed;
  return (!connected_ || stuck_ || connected_->reached()) && ++asked_ % 2 == 0 ? ncclSuccess : ncclInProgress;
}

ncclResult_t FakeNccl::end(const char* name) {
  if (on_end_) on_end_();
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_[freed_ ? "use after abort" : name];
  freed_ = true;
  if (name == std::string("abort")) meeting_->head().aborted[static_cast<size_t>(rank_)] = true;
  return ncclSuccess;
}

void FakeNccl::count(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_[name];
  if (freed_) ++calls_["use after abort"];
}

ncclResult_t FakeNccl::add(const char* name, const Operation& operation, StreamHandle stream) {
  count(name);
  const bool stuck = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stuck_;
  }();
  if (stuck) meeting_->await_abort(static_cast<size_t>(rank_));
  if (operation.kind == Kind::Send && on_send_) std::exchange(on_send_, nullptr)();
  batch_.push_back(operation);
  stream_ = stream;
  if (!grouped_) run(std::exchange(batch_, {}), stream_);
  return ncclInProgress;
}

ncclResult_t FakeNccl::end_group() {
  grouped_ = false;
  if (batch_.empty()) return ncclInProgress;
  count("group_end");
  run(std::exchange(batch_, {}), stream_);
  return ncclInProgress;
}

/// The result for `rank` of its operation number `index`; messages are numbered by pair.
std::vector<char> FakeNccl::result_of(const Meeting& meeting, int rank, size_t index) {
  const Operation own = meeting.read(static_cast<size_t>(rank))[index];
  const size_t element = element_of(own.type).second, bytes = own.count * element;
  if (own.kind == Kind::Send || (own.kind == Kind::Reduce && own.peer != rank)) return {};
  if (own.kind == Kind::Receive) {
    for (const Operation& sent : meeting.read(static_cast<size_t>(own.peer))) {
      if (sent.kind != Kind::Send || sent.peer != rank) continue;
      if (sent.count != own.count) throw DeviceError("a message is not as long as its receiver expects");
      return {static_cast<const char*>(sent.in), static_cast<const char*>(sent.in) + bytes};
    }
    throw DeviceError("nobody sends what is to be received");
  }
  std::vector<const void*> inputs;
  std::vector<char> result;
  for (size_t r = 0; r < meeting.ranks; ++r) {
    const Operation other = meeting.read(r).at(index);
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
    meeting->write(me, batch);
    if (!meeting->sync(me)) return;
    std::vector<std::vector<char>> results;
    try {
      for (size_t i = 0; i < batch.size(); ++i) results.push_back(result_of(*meeting, rank, i));
    } catch (const std::exception&) {
      return meeting->await_abort(me);  // as NCCL does if ranks call different things
    }
    // All have read the data that others may overwrite now.
    if (!meeting->sync(me)) return;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (!results[i].empty()) std::memcpy(batch[i].out, results[i].data(), results[i].size());
    }
    meeting->sync(me);
  });
}

}  // namespace ours::testing
