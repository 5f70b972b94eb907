#pragma once

#include <climits>
#include <cstddef>

#include "cuda/nccl_api.h"

// The part of NCCL's interface that is used, under its own names and as it has been since 2.18. No nccl.h is needed
// to build; which NCCL there is turns out at run time. A communicator and a stream are pointers, and an id is a struct
// of bytes, as in NcclApi.

namespace ours::cuda {

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

struct NcclFunctions {
  ncclResult_t (*get_version)(int* version);
  ncclResult_t (*get_unique_id)(NcclId* id);
  ncclResult_t (*init)(NcclComm* comm, int ranks, NcclId id, int rank, ncclConfig_t* config);
  ncclResult_t (*async_error)(NcclComm comm, ncclResult_t* state);
  ncclResult_t (*finalize)(NcclComm comm);
  ncclResult_t (*destroy)(NcclComm comm);
  ncclResult_t (*abort)(NcclComm comm);
  ncclResult_t (*group_start)();
  ncclResult_t (*group_end)();
  ncclResult_t (*all_reduce)(const void* in, void* out, size_t count, NcclType type, NcclOp op, NcclComm comm,
                             StreamHandle stream);
  ncclResult_t (*reduce)(const void* in, void* out, size_t count, NcclType type, NcclOp op, int root, NcclComm comm,
                         StreamHandle stream);
  ncclResult_t (*reduce_scatter)(const void* in, void* out, size_t count_of_each, NcclType type, NcclOp op,
                                 NcclComm comm, StreamHandle stream);
  ncclResult_t (*broadcast)(const void* in, void* out, size_t count, NcclType type, int root, NcclComm comm,
                            StreamHandle stream);
  ncclResult_t (*all_gather)(const void* in, void* out, size_t count_of_each, NcclType type, NcclComm comm,
                             StreamHandle stream);
  ncclResult_t (*send)(const void* data, size_t count, NcclType type, int to, NcclComm comm, StreamHandle stream);
  ncclResult_t (*receive)(void* data, size_t count, NcclType type, int from, NcclComm comm, StreamHandle stream);
  const char* (*error_string)(ncclResult_t result);
  const char* (*last_error)(NcclComm comm);
};

}  // namespace ours::cuda
