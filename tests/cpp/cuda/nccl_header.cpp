// The compiler compares csrc/cuda/nccl_api.h with NCCL's own header; nothing of it is run. tests/package/test_build.py
// compiles it if there is such a header.

#include <nccl.h>

#include <type_traits>

#include "cuda/nccl_api.h"

namespace {

using ours::cuda::Nccl;
using ours::cuda::NcclFunction;
using ours::cuda::NcclOp;
using ours::cuda::NcclScalar;
using ours::cuda::NcclType;

/// Whether both are passed in the same way.
template <class A, class B>
constexpr bool kAlike =
    sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B>;

template <class Ours, class... OurArguments, class Theirs, class... Arguments>
constexpr bool called_alike(const NcclFunction<Ours(OurArguments...)>*, Theirs (*)(Arguments...)) {
  if constexpr (sizeof...(OurArguments) == sizeof...(Arguments)) {
    return kAlike<Ours, Theirs> && (kAlike<OurArguments, Arguments> && ...);
  }
  return false;
}

#define CHECK_CALL(ours, theirs) \
  static_assert(called_alike(static_cast<decltype(Nccl::ours)*>(nullptr), decltype(&theirs){}))
CHECK_CALL(get_version, ncclGetVersion);
CHECK_CALL(get_unique_id, ncclGetUniqueId);
CHECK_CALL(init, ncclCommInitRankConfig);
CHECK_CALL(async_error, ncclCommGetAsyncError);
CHECK_CALL(finalize, ncclCommFinalize);
CHECK_CALL(destroy, ncclCommDestroy);
CHECK_CALL(abort, ncclCommAbort);
CHECK_CALL(group_start, ncclGroupStart);
CHECK_CALL(group_end, ncclGroupEnd);
CHECK_CALL(all_reduce, ncclAllReduce);
CHECK_CALL(reduce, ncclReduce);
CHECK_CALL(reduce_scatter, ncclReduceScatter);
CHECK_CALL(broadcast, ncclBroadcast);
CHECK_CALL(all_gather, ncclAllGather);
CHECK_CALL(send, ncclSend);
CHECK_CALL(receive, ncclRecv);
CHECK_CALL(make_premul_sum, ncclRedOpCreatePreMulSum);
CHECK_CALL(drop_op, ncclRedOpDestroy);
CHECK_CALL(error_string, ncclGetErrorString);
CHECK_CALL(last_error, ncclGetLastError);

#define CHECK_FIELD(name)                                                                     \
  static_assert(offsetof(ours::cuda::ncclConfig_t, name) == offsetof(::ncclConfig_t, name) && \
                std::is_same_v<decltype(ours::cuda::ncclConfig_t::name), decltype(::ncclConfig_t::name)>)
CHECK_FIELD(size);
CHECK_FIELD(magic);
CHECK_FIELD(version);
CHECK_FIELD(blocking);
CHECK_FIELD(cgaClusterSize);
CHECK_FIELD(minCTAs);
CHECK_FIELD(maxCTAs);
CHECK_FIELD(netName);
CHECK_FIELD(splitShare);
constexpr ::ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr ours::cuda::ncclConfig_t kOurs;
static_assert(kOurs.magic == kTheirs.magic && kOurs.blocking == kTheirs.blocking &&
              kOurs.cgaClusterSize == kTheirs.cgaClusterSize && kOurs.minCTAs == kTheirs.minCTAs &&
              kOurs.maxCTAs == kTheirs.maxCTAs && kOurs.netName == kTheirs.netName &&
              kOurs.splitShare == kTheirs.splitShare);
static_assert(kOurs.version == NCCL_VERSION(2, 18, 0));

#define CHECK_VALUE(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
CHECK_VALUE(ours::cuda::ncclSuccess, ::ncclSuccess);
CHECK_VALUE(ours::cuda::ncclInProgress, ::ncclInProgress);
CHECK_VALUE(NcclType::Int8, ::ncclInt8);
CHECK_VALUE(NcclType::UInt8, ::ncclUint8);
CHECK_VALUE(NcclType::Int32, ::ncclInt32);
CHECK_VALUE(NcclType::UInt32, ::ncclUint32);
CHECK_VALUE(NcclType::Int64, ::ncclInt64);
CHECK_VALUE(NcclType::UInt64, ::ncclUint64);
CHECK_VALUE(NcclType::Float16, ::ncclFloat16);
CHECK_VALUE(NcclType::Float32, ::ncclFloat32);
CHECK_VALUE(NcclType::Float64, ::ncclFloat64);
CHECK_VALUE(NcclType::BFloat16, ::ncclBfloat16);
CHECK_VALUE(NcclOp::Sum, ::ncclSum);
CHECK_VALUE(NcclOp::Product, ::ncclProd);
CHECK_VALUE(NcclOp::Max, ::ncclMax);
CHECK_VALUE(NcclOp::Min, ::ncclMin);
CHECK_VALUE(NcclOp::Avg, ::ncclAvg);
CHECK_VALUE(NcclScalar::OnHost, ::ncclScalarHostImmediate);

}  // namespace
