#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/nccl_api.h"
#include "kernels/reduce.h"
#include "support/stand_in_device.h"

namespace ours::testing {

using cuda::NcclComm;
using cuda::NcclId;
using cuda::NcclOp;
using cuda::NcclPlace;
using cuda::NcclType;

/// NCCL for ranks with stand-in devices, which are threads or processes. What it is given runs in the stream. There,
/// ranks wait for each other until all have come or the communicator is aborted.
class FakeNccl : public cuda::NcclApi {
 public:
  explicit FakeNccl(std::shared_ptr<StandInDevice> device) : device_(std::move(device)) {}

  /// From now on ready() throws this error, and this rank comes to no operation.
  void fail(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = why;
  }
  /// `call` runs when NCCL is told to free the communicator, before it does.
  void set_on_end(std::function<void()> call) { on_end_ = std::move(call); }
  /// From now on operations take until `connected` is reached, to begin; or, if they are `stuck`, to return from their
  /// call, unless the communicator is aborted.
  void connect_when(std::shared_ptr<StandInPoint> connected, bool stuck) {
    const std::lock_guard<std::mutex> lock(mutex_);
    connected_ = std::move(connected);
    stuck_ = stuck;
  }
  /// How often each operation was called.
  std::map<std::string, int> calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

  NcclId make_id() override;
  NcclComm init(int ranks, const NcclId& id, int rank) override;
  bool ready(NcclComm comm) override;
  void finalize(NcclComm) override { count("finalize"); }
  void destroy(NcclComm) noexcept override { end("destroy"); }
  void abort(NcclComm comm) noexcept override;
  void begin_group() override { grouped_ = true; }
  void end_group() override;

  void all_reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op, NcclPlace at) override {
    add({Kind::AllReduce, in, out, count, type, op, -1}, "all_reduce", at);
  }
  void reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op, int root, NcclPlace at) override {
    add({Kind::Reduce, in, out, count, type, op, root}, "reduce", at);
  }
  void reduce_scatter(const void* in, void* out, size_t count, NcclType type, NcclOp op, NcclPlace at) override {
    add({Kind::ReduceScatter, in, out, count, type, op, -1}, "reduce_scatter", at);
  }
  void broadcast(void* buffer, size_t bytes, int root, NcclPlace at) override {
    add({Kind::Broadcast, buffer, buffer, bytes, NcclType::UInt8, NcclOp::Sum, root}, "broadcast", at);
  }
  void all_gather(const void* in, void* out, size_t bytes, NcclPlace at) override {
    add({Kind::AllGather, in, out, bytes, NcclType::UInt8, NcclOp::Sum, -1}, "all_gather", at);
  }
  void send(const void* data, size_t bytes, int to, NcclPlace at) override {
    add({Kind::Send, data, nullptr, bytes, NcclType::UInt8, NcclOp::Sum, to}, "send", at);
  }
  void receive(void* data, size_t bytes, int from, NcclPlace at) override {
    add({Kind::Receive, nullptr, data, bytes, NcclType::UInt8, NcclOp::Sum, from}, "receive", at);
  }

 private:
  enum class Kind { AllReduce, Reduce, ReduceScatter, Broadcast, AllGather, Send, Receive };
  struct Operation {
    Kind kind;
    const void* in;
    void* out;
    size_t count;
    NcclType type;
    NcclOp op;
    int peer;

    /// In elements.
    size_t inputs(size_t ranks) const {
      return in == nullptr ? 0 : kind == Kind::ReduceScatter ? count * ranks : count;
    }
  };
  using Batch = std::vector<Operation>;
  struct Meeting;

  void add(const Operation& operation, const char* name, NcclPlace at);
  void count(const char* name) noexcept;
  void end(const char* name) noexcept;
  void run(const Batch& batch, StreamHandle stream);
  static std::vector<char> result_of(const Meeting& meeting, int rank, size_t index);

  std::shared_ptr<StandInDevice> device_;
  std::shared_ptr<Meeting> meeting_;
  int rank_ = 0;
  std::mutex mutex_;
  std::map<std::string, int> calls_;
  std::string failure_;
  std::shared_ptr<StandInPoint> connected_;
  bool stuck_ = false;
  std::function<void()> on_end_;
  int asked_ = 0;
  bool grouped_ = false;
  Batch batch_;
  StreamHandle stream_ = nullptr;
};

}  // namespace ours::testing
