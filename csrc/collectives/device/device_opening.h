#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/call_record.h"
#include "collectives/group.h"

// What the ranks of a group over device memory tell each other over the CPU group of the same ranks.

namespace ours {

using Words = std::vector<uint64_t>;

/// Returns all ranks' texts, by rank.
std::vector<std::string> gather_texts(Group& host, const Call& call, const std::string& mine);

/// Begins a call: compares what all ranks called, and returns all ranks' `mine`, by rank, which must have the same
/// length on all. Throws MismatchError, the same on all ranks, if they called different things. The host group's
/// messages name the call as what it is.
std::vector<Words> open_call(Group& host, const Running& run, const Words& mine = {});

/// For open_call(): the sizes in bytes of what this rank sends to each rank and expects from it.
Words table_of(const ExchangePlan& plan);

/// Throws MismatchError, the same on all ranks, if a rank sends another a size that the receiver does not expect, by
/// all ranks' tables. Returns the most bytes that any rank sends to another.
size_t check_tables(const std::vector<Words>& opened, const CallRecord& record);

}  // namespace ours
