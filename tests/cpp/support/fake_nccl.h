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
using cuda::NcclType;

/// NCCL for ranks with stand-in devices, which are threads or processes. What it is given runs in the stream. There,
/// ranks wait for each other until all have come or the communicator is aborted.
class FakeNccl : public cuda::Nccl {
 public:
  explicit FakeNccl(std::shared_ptr<StandInDevice> device);

  /// From now on the communicator has failed with this error, and this rank comes to no operation.
  void fail(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = why;
  }
  /// `call` runs when NCCL is told to free the communicator, before it does.
  void set_on_end(std::function<void()> call) { on_end_ = std::move(call); }
  void set_on_send(std::function<void()> call) { on_send_ = std::move(call); }
  /// Whether a group of calls was begun and not ended.
  bool is_grouped() const { return grouped_; }
  /// From now on operations take until `connected` is reached, to begin; or, if they are `stuck`, to return from their
  /// call, unless the communicator is aborted.
  void connect_when(std::shared_ptr<StandInPoint> connected, bool stuck) {
    const std::lock_guard<std::mutex> lock(mutex_);
    connected_ = std::move(connected);
    stuck_ = stuck;
  }
  /// How often each function was called that the tests ask for; "use after abort": those with a freed communicator.
  std::map<std::string, int> calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
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

  cuda::ncclResult_t state();
  cuda::ncclResult_t add(const char* name, const Operation& operation, StreamHandle stream);
  cuda::ncclResult_t end_group();
  cuda::ncclResult_t end(const char* name);
  void count(const char* name);
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
  bool freed_ = false;
  std::function<void()> on_end_, on_send_;
  int asked_ = 0;
  bool grouped_ = false;
  Batch batch_;
  StreamHandle stream_ = nullptr;
};

}  // namespace ours::testing
