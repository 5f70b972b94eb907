#pragma once

#include <cstdint>
#include <string>

// The numbers of collectives. Those that the program calls are counted from 1 in each group; those that callbacks start
// are counted by themselves, and their numbers also tell on which collective of the group the callback is.

namespace ours {

/// The number of the collective that is the `count`-th which callbacks start, this one on the future of number `parent`
/// of the same group; 0: of another group.
constexpr uint64_t number_in_callback(uint64_t parent, uint64_t count) {
  return uint64_t{1} << 63 | (parent & 0x7FFFFFFF) << 32 | (count & 0xFFFFFFFF);
}

constexpr bool is_in_callback(uint64_t number) { return number >> 63 != 0; }

/// How many collectives of its kind there were in the group when this one began, with itself.
constexpr uint64_t count_of(uint64_t number) { return is_in_callback(number) ? number & 0xFFFFFFFF : number; }

/// "number 7", or "number 2 of those that callbacks started (by a callback on number 5)"
std::string describe_number(uint64_t number);

}  // namespace ours
