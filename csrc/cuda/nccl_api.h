#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <functional>

#include "device/device.h"

// The part of NCCL's interface that is used, as it has been since 2.18. No nccl.h is needed to build; which NCCL there
// is turns out at run time. A communicator and a stream are pointers, and an id is a struct of bytes.

namespace ours::cuda {

using NcclId = std::array<char, 128>;
using NcclComm = void*;

// The values are NCCL's own.
enum class NcclType : int { Int8, UInt8, Int32, UInt32, Int64, UInt64, Float16, Float32, Float64, BFloat16 };
enum class NcclOp : int { Sum, Product, Max, Min, Avg };  // and those that were made
enum class NcclScalar : int { OnDevice, OnHost };
enum ncclResult_t : int { ncclSuccess = 0, ncclInProgress = 7 };  // all others are errors, which NCCL can name

/// Newer versions have more fields, and recognise by size and version what they are given. INT_MIN and null let NCCL
/// decide.
struct ncclConfig_t {
  size_t size = sizeof(ncclConfig_t);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = INT_MIN;
  int cgaClusterSize = INT_MIN;
  int minCTAs = INT_MIN;
  int maxCTAs = INT_MIN;
  const char* netName = nullptr;
  int splitShare = INT_MIN;
};

/// A function with the name that it has in NCCL's library.
template <class Signature>
struct NcclFunction {
  const char* name;
  std::function<Signature> run = nullptr;
};

/// The functions that are used; those of the tests are others. A communicator does not block: an operation may be
/// under way when its call returns. Only abort() may be called while another thread is in a call, and nothing after
/// it. destroy() and abort() may take long, or never return, since they wait for the device, and for the other ranks of
/// the node to call them as well.
struct Nccl {
  template <class... Parameters>
  using Call = NcclFunction<ncclResult_t(Parameters...)>;
  template <class... Rest>
  using Collective = Call<const void* /*in*/, void* /*out*/, size_t /*count of each*/, NcclType, Rest...>;

  Call<int*> get_version{"ncclGetVersion"};
  Call<NcclId*> get_unique_id{"ncclGetUniqueId"};
  Call<NcclComm*, int /*ranks*/, NcclId, int /*rank*/, ncclConfig_t*> init{"ncclCommInitRankConfig"};
  Call<NcclComm, ncclResult_t*> async_error{"ncclCommGetAsyncError"};
  Call<NcclComm> finalize{"ncclCommFinalize"};
  Call<NcclComm> destroy{"ncclCommDestroy"};
  Call<NcclComm> abort{"ncclCommAbort"};
  Call<> group_start{"ncclGroupStart"};
  Call<> group_end{"ncclGroupEnd"};
  Collective<NcclOp, NcclComm, StreamHandle> all_reduce{"ncclAllReduce"};
  Collective<NcclOp, int /*root*/, NcclComm, StreamHandle> reduce{"ncclReduce"};
  Collective<NcclOp, NcclComm, StreamHandle> reduce_scatter{"ncclReduceScatter"};
  Collective<int /*root*/, NcclComm, StreamHandle> broadcast{"ncclBroadcast"};
  Collective<NcclComm, StreamHandle> all_gather{"ncclAllGather"};
  Call<const void*, size_t, NcclType, int /*to*/, NcclComm, StreamHandle> send{"ncclSend"};
  Call<void*, size_t, NcclType, int /*from*/, NcclComm, StreamHandle> receive{"ncclRecv"};
  Call<NcclOp*, void* /*factor*/, NcclType, NcclScalar /*where the factor is*/, NcclComm> make_premul_sum{
      "ncclRedOpCreatePreMulSum"};
  Call<NcclOp, NcclComm> drop_op{"ncclRedOpDestroy"};
  NcclFunction<const char*(ncclResult_t)> error_string{"ncclGetErrorString"};
  NcclFunction<const char*(NcclComm)> last_error{"ncclGetLastError"};

  /// Calls visit(function) for each of them.
  template <class Visit>
  void visit(const Visit& visit) {
    const auto each = [&](auto&... functions) { (visit(functions), ...); };
    each(get_version, get_unique_id, init, async_error, finalize, destroy, abort, group_start, group_end, all_reduce,
         reduce, reduce_scatter, broadcast, all_gather, send, receive, make_premul_sum, drop_op, error_string,
         last_error);
  }
};

}  // namespace ours::cuda
