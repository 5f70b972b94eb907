#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "collectives/call.h"
#include "kernels/reduce.h"
#include "transport/called.h"

// What a rank called, in the form in which ranks compare it.

namespace ours {

CallRecord record_of(const Call& call);
CallRecord record_of(const Call& call, size_t count, const Reduction& reduction, int root);
bool same_record(const CallRecord& a, const CallRecord& b);
/// The same for equal records, and different for others: certainly if they differ in no more than one field, and but
/// for one case in 2^64 otherwise.
uint64_t digest_of(const CallRecord& record);

/// What peers are told when the rank described by `rank` refused a call for the reason `why`.
std::string refusal_of(const Call& call, const std::string& rank, const std::string& why);

/// The message of a MismatchError, where `calls` says which ranks called what.
std::string different_calls(const std::string& calls);

/// Which of `ranks` ranks called what, for different_calls(). Ranks of which `same` holds are named together.
std::string calls_of_ranks(int ranks, const std::function<CallRecord(int)>& record_of_rank,
                           const std::function<bool(int, int)>& same, const std::function<std::string(int)>& name);

/// "rank 3", where nothing else is known of it.
inline std::string rank_name(size_t rank) { return "rank " + std::to_string(rank); }

/// "all_reduce number 7 (SUM, 1024 x float32)"
std::string describe_record(const CallRecord& record);

}  // namespace ours
