#include "collectives/node/lend_choice.h"

#include <tuple>

namespace ours {

size_t LendChoice::number(size_t bytes) {
  size_t number = 0;
  for (size_t size = kLeastBytes; number + 1 < std::tuple_size_v<decltype(sizes_)> && bytes / 2 >= size; size *= 2) {
    ++number;
  }
  return number;
}

}  // namespace ours
