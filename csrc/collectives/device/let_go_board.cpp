#include "collectives/device/let_go_board.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/error.h"

namespace ours {

std::shared_ptr<LetGoBoard> LetGoBoard::create(int ranks) {
  const size_t bytes = bytes_for(ranks);
  auto memory = SharedMemory::create(bytes);
  memory->reserve(0, bytes);
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

bool LetGoBoard::is_free(int owner) const noexcept {
  for (int r = 0; r < ranks_; ++r) {
    if (r != owner && flag(r).load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

bool LetGoBoard::have_all_finished_calls_of(int rank) const noexcept {
  const uint32_t finished = calls(rank).load(std::memory_order_relaxed);
  for (int r = 0; r < ranks_; ++r) {
    if (flag(r).load(std::memory_order_acquire) != 0) continue;
    // Signed, because the counters wrap.
    if (static_cast<int32_t>(calls(r).load(std::memory_order_acquire) - finished) < 0) return false;
  }
  return true;
}

}  // namespace ours
