#pragma once

#include <cstddef>
#include <string>

#include "collectives/call.h"
#include "kernels/reduce.h"
#include "transport/node/node_layout.h"

// What a rank called, in the form in which ranks compare it.

namespace ours {

CallRecord record_of(const Call& call);
CallRecord record_of(const Call& call, size_t count, const Reduction& reduction, int root);
bool same_record(const CallRecord& a, const CallRecord& b);

/// What peers are told when the rank described by `rank` refused a call for the reason `why`.
std::string refusal_of(const Call& call, const std::string& rank, const std::string& why);

/// "all_reduce number 7 (SUM, 1024 x float32)"
std::string describe_record(const CallRecord& record);

}  // namespace ours
