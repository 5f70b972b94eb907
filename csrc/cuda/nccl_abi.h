#pragma once

#include <climits>
#include <cstddef>

// The part of NCCL's interface that is used, under its own names and as it has been since 2.18. No nccl.h is needed
// to build; which NCCL there is turns out at run time.

struct CUstream_st;

namespace ours::cuda {

enum ncclResult_t : int { ncclSuccess = 0, ncclInProgress = 7 };  // all others are errors, which NCCL can name
enum ncclDataType_t : int { ncclUint8 = 1 };                      // and those of NcclType
enum ncclRedOp_t : int {};                                        // those of NcclOp

struct ncclComm;
using ncclComm_t = ncclComm*;

struct ncclUniqueId {
  char internal[128];
};

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

struct NcclFunctions {
  using Stream = CUstream_st*;

  ncclResult_t (*get_version)(int* version);
  ncclResult_t (*get_unique_id)(ncclUniqueId* id);
  ncclResult_t (*init)(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config);
  ncclResult_t (*async_error)(ncclComm_t comm, ncclResult_t* state);
  ncclResult_t (*finalize)(ncclComm_t comm);
  ncclResult_t (*destroy)(ncclComm_t comm);
  ncclResult_t (*abort)(ncclComm_t comm);
  ncclResult_t (*group_start)();
  ncclResult_t (*group_end)();
  ncclResult_t (*all_reduce)(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                             ncclComm_t comm, Stream stream);
  ncclResult_t (*reduce)(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                         ncclComm_t comm, Stream stream);
  ncclResult_t (*reduce_scatter)(const void* in, void* out, size_t count_of_each, ncclDataType_t type, ncclRedOp_t op,
                                 ncclComm_t comm, Stream stream);
  ncclResult_t (*broadcast)(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                            Stream stream);
  ncclResult_t (*all_gather)(const void* in, void* out, size_t count_of_each, ncclDataType_t type, ncclComm_t comm,
                             Stream stream);
  ncclResult_t (*send)(const void* data, size_t count, ncclDataType_t type, int to, ncclComm_t comm, Stream stream);
  ncclResult_t (*receive)(void* data, size_t count, ncclDataType_t type, int from, ncclComm_t comm, Stream stream);
  const char* (*error_string)(ncclResult_t result);
  const char* (*last_error)(ncclComm_t comm);
};

}  // namespace ours::cuda
