#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/node_session.h"

namespace ours {

/// Who is to meet, and where.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string group;  ///< for messages
};

/// Brings the ranks of a new group together: rank 0 makes the shared memory and puts its address into the store, the
/// others open it. Returns when all have attached. All ranks raise the same DistBackendError if one of them cannot, and
/// one that names the absent ranks after the timeout.
///
/// Keys: a counter for each rank, and an address and at most one error for each attempt. The counters keep the attempts
/// apart, so a store can serve again after a group was destroyed.
std::shared_ptr<NodeSession> meet_on_node(const Meeting& meeting);

}  // namespace ours
