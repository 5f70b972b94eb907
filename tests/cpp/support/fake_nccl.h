#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/node/node_group.h"
#include "cuda/nccl_api.h"
#include "support/stand_in_device.h"

namespace ours::testing {

/// NCCL for ranks with stand-in devices, which are threads or processes. What it is given runs in the stream, where a
/// group over shared memory does it. If ranks call different things, none comes any further until it aborts.
class FakeNccl : public cuda::Nccl {
 public:
  FakeNccl(std::shared_ptr<StandInDevice> device, int ranks);

  /// From now on the communicator has failed with this error, and this rank comes to no operation.
  void fail(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = why;
  }
  /// From now on NCCL's function of that name runs `what` first, which may take its time.
  void before(const std::string& name, std::function<void()> what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    before_[name] = std::move(what);
  }
  /// From now on operations take until `connected` is reached, to begin.
  void connect_when(std::shared_ptr<StandInPoint> connected) {
    const std::lock_guard<std::mutex> lock(mutex_);
    connected_ = std::move(connected);
  }
  /// How often each of NCCL's functions has been called; "use after abort": those with a freed communicator.
  std::map<std::string, int> calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  using Operation = std::function<void(Group& group, const ours::Call& call)>;
  struct Communicator;
  struct Batch;

  template <class Result, class... Parameters>
  void watch(cuda::NcclFunction<Result(Parameters...)>& function);
  void note(const std::string& name);
  void set_collectives();
  void set_messages();
  cuda::ncclResult_t state();
  cuda::ncclResult_t end();
  cuda::ncclResult_t add(Op op, cuda::NcclType type, StreamHandle stream, Operation operation);
  cuda::ncclResult_t add_messages(StreamHandle stream);
  void run(Batch batch);
  Reduction reduction_of(cuda::NcclOp op) const;

  const std::shared_ptr<StandInDevice> device_;
  const int ranks_;
  std::shared_ptr<NodeSession> led_;  ///< of the rank that makes the id
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Batch> batch_;  ///< within a group of calls
  double factor_ = 1;             ///< of the operation that was made

  std::mutex mutex_;
  std::map<std::string, std::function<void()>> before_;
  std::map<std::string, int> calls_;
  std::string failure_;
  std::shared_ptr<StandInPoint> connected_;
  bool freed_ = false;
  int asked_ = 0;
};

}  // namespace ours::testing
