#include "collectives/call_number.h"

namespace ours {

std::string describe_number(uint64_t number) {
  std::string text = "number " + std::to_string(count_of(number));
  if (!is_in_callback(number)) return text;
  const uint64_t parent = number >> 32 & 0x7FFFFFFF;
  return text + " of those that callbacks started (by a callback on " +
         (parent == 0 ? "a collective of another group)" : "number " + std::to_string(parent) + ")");
}

}  // namespace ours
