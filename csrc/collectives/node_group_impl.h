#pragma once

#include <string>

#include "collectives/node_group.h"
#include "common/error.h"

// What the files that implement NodeGroup share.

namespace ours {

CallRecord record_of(const Call& call);
CallRecord record_of(const Call& call, size_t count, const Reduction& reduction, int root);
bool same_record(const CallRecord& a, const CallRecord& b);

/// "all_reduce number 7 (SUM, 1024 x float32)"
std::string describe_record(const CallRecord& record);

template <class Body>
void NodeGroup::guarded(Body&& body) {
  session_->failure().check();
  try {
    body();
  } catch (...) {
    session_->failure().fail(std::current_exception());
    throw;
  }
}

}  // namespace ours
