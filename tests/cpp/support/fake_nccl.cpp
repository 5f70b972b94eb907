#include "support/fake_nccl.h"

#include <cstring>
#include <utility>

#include "kernels/convert.h"
#include "support/calls.h"

namespace ours::testing {

using cuda::NcclComm;
using cuda::NcclId;
using cuda::ncclInProgress;
using cuda::NcclOp;
using cuda::ncclResult_t;
using cuda::ncclSuccess;
using cuda::NcclType;

namespace {

// As good as never.
constexpr std::chrono::hours kLong{1};
constexpr auto kFailed = static_cast<ncclResult_t>(6);  // a remote process

DType dtype_of(NcclType type) {
  static constexpr DType kTypes[] = {DType::Int8,   DType::UInt8,   DType::Int32,   DType::UInt32,  DType::Int64,
                                     DType::UInt64, DType::Float16, DType::Float32, DType::Float64, DType::BFloat16};
  return kTypes[static_cast<int>(type)];
}

double factor_at(const void* data, NcclType type) {
  if (type == NcclType::Float64) return *static_cast<const double*>(data);
  if (type == NcclType::Float32) return *static_cast<const float*>(data);
  float factor = 0;
  widen(&factor, data, dtype_of(type), 1);
  return factor;
}

}  // namespace

struct FakeNccl::Communicator {
  explicit Communicator(const std::shared_ptr<NodeSession>& joined) : session(joined), group(joined) {}

  const std::shared_ptr<NodeSession> session;
  NodeGroup group;
  StandInPoint ended;
  uint64_t operations = 0;  ///< so far, in the stream
};

/// What was given to NCCL since a group of calls began.
struct FakeNccl::Batch {
  std::vector<std::function<void(Communicator&)>> operations;
  std::vector<ConstSpan> sends;  ///< by rank; the messages are one operation
  std::vector<Span> receives;
  bool exchanges = false;
  StreamHandle stream = nullptr;
};

FakeNccl::FakeNccl(std::shared_ptr<StandInDevice> device, int ranks) : device_(std::move(device)), ranks_(ranks) {
  get_unique_id.run = [this](NcclId* id) {
    led_ = NodeSession::create(0, ranks_, NodeConfig::from_options(ranks_));
    const std::string address = led_->address();
    if (address.size() >= id->size()) throw DeviceError("the address is too long: " + address);
    std::memcpy(id->data(), address.data(), address.size());
    return ncclSuccess;
  };
  init.run = [this](NcclComm* comm, int size, const NcclId& id, int rank, cuda::ncclConfig_t*) {
    communicator_ = std::make_shared<Communicator>(led_ ? led_ : NodeSession::open(rank, size, id.data()));
    *comm = communicator_.get();
    return ncclInProgress;
  };
  async_error.run = [this](NcclComm, ncclResult_t* now) {
    *now = state();
    return ncclSuccess;
  };
  finalize.run = [](NcclComm) { return ncclInProgress; };
  destroy.run = [this](NcclComm) { return end(); };
  abort.run = [this](NcclComm) {
    communicator_->group.abort("NCCL was told to abort");
    return end();
  };
  group_start.run = [this] {
    batch_ = std::make_shared<Batch>();
    batch_->sends.resize(static_cast<size_t>(ranks_));
    batch_->receives.resize(static_cast<size_t>(ranks_));
    return ncclSuccess;
  };
  group_end.run = [this] {
    run(std::move(*std::exchange(batch_, nullptr)));
    return ncclInProgress;
  };
  make_premul_sum.run = [this](NcclOp* op, void* factor, NcclType type, cuda::NcclScalar, NcclComm) {
    factor_ = factor_at(factor, type);
    *op = static_cast<NcclOp>(static_cast<int>(NcclOp::Avg) + 1);
    return ncclSuccess;
  };
  drop_op.run = [](NcclOp, NcclComm) { return ncclSuccess; };
  set_collectives();
  set_messages();
  visit([this](auto& function) { watch(function); });
  // These two need no communicator.
  error_string.run = [](ncclResult_t) { return "the fake was told to fail"; };
  last_error.run = [this](NcclComm) { return failure_.c_str(); };
}

void FakeNccl::set_collectives() {
  all_reduce.run = [this](const void* in, void* out, size_t n, NcclType type, NcclOp op, NcclComm, StreamHandle s) {
    return add(Op::AllReduce, type, s, [=, how = reduction_of(op)](Group& group, const ours::Call& call) {
      group.all_reduce(call, in, out, n, how);
    });
  };
  reduce.run = [this](const void* in, void* out, size_t n, NcclType type, NcclOp op, int root, NcclComm,
                      StreamHandle s) {
    return add(Op::Reduce, type, s, [=, how = reduction_of(op)](Group& group, const ours::Call& call) {
      group.reduce(call, in, out, n, how, root);
    });
  };
  reduce_scatter.run = [this](const void* in, void* out, size_t n, NcclType type, NcclOp op, NcclComm, StreamHandle s) {
    return add(Op::ReduceScatter, type, s, [=, how = reduction_of(op)](Group& group, const ours::Call& call) {
      std::vector<const void*> inputs;
      for (size_t r = 0; r < static_cast<size_t>(group.size()); ++r) {
        inputs.push_back(static_cast<const char*>(in) + r * n * size_of(call.dtype));
      }
      group.reduce_scatter(call, inputs, std::vector<size_t>(inputs.size(), n), out, how);
    });
  };
  broadcast.run = [this](const void* in, void* out, size_t n, NcclType type, int root, NcclComm, StreamHandle s) {
    return add(Op::Broadcast, type, s, [=](Group& group, const ours::Call& call) {
      if (group.rank() == root && in != out) std::memcpy(out, in, n * size_of(call.dtype));
      group.broadcast(call, {out, n * size_of(call.dtype)}, root);
    });
  };
  all_gather.run = [this](const void* in, void* out, size_t n, NcclType type, NcclComm, StreamHandle s) {
    return add(Op::AllGather, type, s, [=](Group& group, const ours::Call& call) {
      const size_t bytes = n * size_of(call.dtype);
      std::vector<Span> outputs;
      for (size_t r = 0; r < static_cast<size_t>(group.size()); ++r) {
        outputs.push_back({static_cast<char*>(out) + r * bytes, bytes});
      }
      group.all_gather(call, {in, bytes}, outputs);
    });
  };
}

void FakeNccl::set_messages() {
  send.run = [this](const void* data, size_t n, NcclType type, int to, NcclComm, StreamHandle s) {
    batch_->sends[static_cast<size_t>(to)] = {data, n * size_of(dtype_of(type))};
    return add_messages(s);
  };
  receive.run = [this](void* data, size_t n, NcclType type, int from, NcclComm, StreamHandle s) {
    batch_->receives[static_cast<size_t>(from)] = {data, n * size_of(dtype_of(type))};
    return add_messages(s);
  };
}

template <class Result, class... Parameters>
void FakeNccl::watch(cuda::NcclFunction<Result(Parameters...)>& function) {
  function.run = [this, name = std::string(function.name), run = std::move(function.run)](Parameters... parameters) {
    note(name);
    return run(parameters...);
  };
}

void FakeNccl::note(const std::string& name) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (freed_) ++calls_["use after abort"];
  if (const auto what = before_[name]) {
    lock.unlock();
    what();
    lock.lock();
  }
  ++calls_[name];
}

ncclResult_t FakeNccl::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) return kFailed;
  return (!connected_ || connected_->reached()) && ++asked_ % 2 == 0 ? ncclSuccess : ncclInProgress;
}

ncclResult_t FakeNccl::end() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    freed_ = true;
  }
  communicator_->ended.reach();
  return ncclSuccess;
}

Reduction FakeNccl::reduction_of(NcclOp op) const {
  static constexpr ReduceKind kKinds[] = {ReduceKind::Sum, ReduceKind::Product, ReduceKind::Max,
                                          ReduceKind::Min, ReduceKind::Avg,     ReduceKind::PremulSum};
  return {kKinds[static_cast<int>(op)], ranks_, factor_};
}

ncclResult_t FakeNccl::add(Op op, NcclType type, StreamHandle stream, Operation operation) {
  batch_->stream = stream;
  batch_->operations.push_back([op, dtype = dtype_of(type), operation = std::move(operation)](Communicator& in) {
    operation(in.group, call_of(op, dtype, ++in.operations, kLong));
  });
  return ncclInProgress;
}

ncclResult_t FakeNccl::add_messages(StreamHandle stream) {
  batch_->stream = stream;
  batch_->exchanges = true;
  return ncclInProgress;
}

void FakeNccl::run(Batch batch) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;  // what others do with it does not end
  }
  if (batch.operations.empty() && !batch.exchanges) return;
  device_->run(batch.stream, [communicator = communicator_, batch = std::move(batch)] {
    try {
      communicator->session->wait_attached(Deadline::after(kLong), [&] {
        if (communicator->ended.reached()) throw AbortedError("the communicator was freed");
      });
      for (const auto& operation : batch.operations) operation(*communicator);
      if (!batch.exchanges) return;
      const auto call = call_of(Op::AllToAll, DType::UInt8, ++communicator->operations, kLong);
      communicator->group.all_to_all(call, batch.sends, batch.receives);
    } catch (const std::exception&) {
      communicator->ended.wait();  // as NCCL waits for peers that call something else, or nothing
    }
  });
}

}  // namespace ours::testing
