#include "cuda/nccl_library.h"

#include <dlfcn.h>

#include <utility>

#include "cuda/cuda_device.h"
#include "cuda/nccl_abi.h"
#include "cuda/nccl_group.h"

// NCCL itself. Its library is looked for when it is first needed.

namespace ours::cuda {
namespace {

constexpr int kOldest = 21800;  // whose calls all return at once if they are told to

struct Functions : NcclFunctions {
  int version = 0;
  std::string obstacle;
};

/// Never closed. This is the library that torch has loaded, as a program with tensors of CUDA has a torch for CUDA.
void* open_library() { return dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL); }

Functions load() {
  Functions f{};
  void* library = open_library();
  if (library == nullptr) {
    f.obstacle = "NCCL's library (libnccl.so.2) is neither loaded nor found: a torch for CUDA brings it along";
    return f;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) f.obstacle = std::string("the NCCL that was found has no ") + name;
  };
  find(f.get_version, "ncclGetVersion");
  find(f.get_unique_id, "ncclGetUniqueId");
  find(f.init, "ncclCommInitRankConfig");
  find(f.async_error, "ncclCommGetAsyncError");
  find(f.finalize, "ncclCommFinalize");
  find(f.destroy, "ncclCommDestroy");
  find(f.abort, "ncclCommAbort");
  find(f.group_start, "ncclGroupStart");
  find(f.group_end, "ncclGroupEnd");
  find(f.all_reduce, "ncclAllReduce");
  find(f.reduce, "ncclReduce");
  find(f.reduce_scatter, "ncclReduceScatter");
  find(f.broadcast, "ncclBroadcast");
  find(f.all_gather, "ncclAllGather");
  find(f.send, "ncclSend");
  find(f.receive, "ncclRecv");
  find(f.error_string, "ncclGetErrorString");
  find(f.last_error, "ncclGetLastError");
  if (f.get_version != nullptr) f.get_version(&f.version);
  if (f.obstacle.empty() && f.version < kOldest) {
    f.obstacle = "NCCL " + std::to_string(f.version) + " is older than 2.18: install a newer one";
  }
  return f;
}

const Functions& functions() {
  static const Functions kFunctions = load();
  return kFunctions;
}

/// Makes every call with the device's context; the operation may be under way when the call returns.
class RealNccl : public NcclApi {
 public:
  explicit RealNccl(CUcontext context) : context_(context), nccl_(functions()) {}

  NcclId make_id() override {
    NcclId id{};
    call("ncclGetUniqueId", nullptr, nccl_.get_unique_id, &id);
    return id;
  }
  NcclComm init(int ranks, const NcclId& id, int rank) override {
    ncclConfig_t config;
    config.blocking = 0;
    NcclComm begun = nullptr;
    call("ncclCommInitRankConfig", nullptr, nccl_.init, &begun, ranks, id, rank, &config);
    return begun;
  }
  bool ready(NcclComm comm) override {
    ncclResult_t state = ncclSuccess;
    call("ncclCommGetAsyncError", comm, nccl_.async_error, comm, &state);
    check_result("an operation of NCCL", comm, state);
    return state != ncclInProgress;
  }
  void finalize(NcclComm comm) override { call("ncclCommFinalize", comm, nccl_.finalize, comm); }
  void destroy(NcclComm comm) noexcept override {
    end_quietly(context_, [&] { return nccl_.destroy(comm); });
  }
  void abort(NcclComm comm) noexcept override {
    end_quietly(context_, [&] { return nccl_.abort(comm); });
  }
  void begin_group() override { call("ncclGroupStart", nullptr, nccl_.group_start); }
  void end_group() override { call("ncclGroupEnd", nullptr, nccl_.group_end); }

  void all_reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op, NcclPlace at) override {
    call("ncclAllReduce", at.comm, nccl_.all_reduce, in, out, count, type, op, at.comm, at.stream);
  }
  void reduce(const void* in, void* out, size_t count, NcclType type, NcclOp op, int root, NcclPlace at) override {
    call("ncclReduce", at.comm, nccl_.reduce, in, out, count, type, op, root, at.comm, at.stream);
  }
  void reduce_scatter(const void* in, void* out, size_t count, NcclType type, NcclOp op, NcclPlace at) override {
    call("ncclReduceScatter", at.comm, nccl_.reduce_scatter, in, out, count, type, op, at.comm, at.stream);
  }
  void broadcast(void* buffer, size_t bytes, int root, NcclPlace at) override {
    call("ncclBroadcast", at.comm, nccl_.broadcast, buffer, buffer, bytes, kBytes, root, at.comm, at.stream);
  }
  void all_gather(const void* in, void* out, size_t bytes, NcclPlace at) override {
    call("ncclAllGather", at.comm, nccl_.all_gather, in, out, bytes, kBytes, at.comm, at.stream);
  }
  void send(const void* data, size_t bytes, int to, NcclPlace at) override {
    call("ncclSend", at.comm, nccl_.send, data, bytes, kBytes, to, at.comm, at.stream);
  }
  void receive(void* data, size_t bytes, int from, NcclPlace at) override {
    call("ncclRecv", at.comm, nccl_.receive, data, bytes, kBytes, from, at.comm, at.stream);
  }

 private:
  static constexpr NcclType kBytes = NcclType::UInt8;

  template <class Function, class... Arguments>
  void call(const char* name, NcclComm comm, Function function, Arguments... arguments) const {
    const ContextGuard guard(context_);
    check_result(name, comm, function(arguments...));
  }
  void check_result(const char* name, NcclComm comm, ncclResult_t result) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* last = nccl_.last_error(comm);
    throw DeviceError(std::string(name) + " failed: " + nccl_.error_string(result) +
                      (last == nullptr || *last == '\0' ? "" : std::string(" (") + last + ")") +
                      ". NCCL_DEBUG=INFO says more");
  }

  CUcontext context_;
  const Functions& nccl_;
};

}  // namespace

std::string why_no_nccl() { return functions().obstacle; }

std::string nccl_version() {
  if (!functions().obstacle.empty()) return "";
  const int version = functions().version;
  return "NCCL " + std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

std::shared_ptr<Group> make_nccl_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device, Deadline deadline) {
  if (!functions().obstacle.empty()) throw DeviceError(functions().obstacle);
  const auto& cuda_device = dynamic_cast<const CudaDevice&>(*device);
  auto api = std::make_shared<RealNccl>(cuda_device.context());
  return NcclGroup::make(std::move(api), std::move(host), std::move(device), deadline);
}

}  // namespace ours::cuda
