#include "collectives/device/let_go_board.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/error.h"

namespace ours {

std::shared_ptr<LetGoBoard> LetGoBoard::create(int ranks) {
  auto memory = SharedMemory::create(bytes_for(ranks));
  memory->reserve(0, bytes_for(ranks));
  return std::make_shared<LetGoBoard>(std::move(memory), ranks);
}

std::shared_ptr<LetGoBoard> LetGoBoard::open(const std::string& path, int ranks) {
  auto memory = SharedMemory::open(path);
  if (memory->bytes() != bytes_for(ranks)) throw SystemError("the board at " + path + " has another size", EINVAL);
  return std::make_shared<LetGoBoard>(std::move(memory), ranks);
}

std::string LetGoBoard::path() const {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(memory_->fd());
}

uint64_t LetGoBoard::least_of_peers(int rank) const noexcept {
  uint64_t least = kHasLetGo;
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank) least = std::min(least, of(r).load(std::memory_order_acquire));
  }
  return least;
}

}  // namespace ours
