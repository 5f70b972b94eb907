#pragma once

#include <cstdint>
#include <string>

// The numbers of collectives. Those that the program calls are counted from 1 in each group. Those that callbacks
// start are counted separately; their numbers also tell which collective of the group the callback belongs to.

namespace ours {

/// The number of the `count`-th collective that callbacks have started. `parent` is the number of the collective of
/// the same group on whose future the callback ran, or 0 if that collective belongs to another group.
constexpr uint64_t number_in_callback(uint64_t parent, uint64_t count) {
  return uint64_t{1} << 63 | (parent & 0x7FFFFFFF) << 32 | (count & 0xFFFFFFFF);
}

constexpr bool is_in_callback(uint64_t number) { return number >> 63 != 0; }

/// How many collectives of its kind the group has had, up to and including this one.
constexpr uint64_t count_of(uint64_t number) { return is_in_callback(number) ? number & 0xFFFFFFFF : number; }

/// "number 7", or "number 2 of those that callbacks started (by a callback on number 5)"
std::string describe_number(uint64_t number);

}  // namespace ours
