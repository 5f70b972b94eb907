#include "collectives/device/shared_device_memory.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "common/error.h"

namespace ours {

namespace {

struct Retired {
  std::vector<std::shared_ptr<void>> memory;
  std::shared_ptr<LetGoBoard> board;
  int owner;
};

/// Never destroyed: memory may come at the very end.
struct Retirement {
  std::mutex mutex;
  std::vector<Retired> waiting;

  static Retirement& instance() {
    static auto* const kOnly = new Retirement;
    return *kOnly;
  }
};

}  // namespace

std::shared_ptr<LetGoBoard> LetGoBoard::create(int ranks) {
  const size_t bytes = bytes_for(ranks);
  auto memory = SharedMemory::create(bytes);
  memory->reserve(0, bytes);
  return std::make_shared<LetGoBoard>(std::move(memory), ranks);
}

std::shared_ptr<LetGoBoard> LetGoBoard::open(const std::string& path, int ranks) {
  try {
    auto memory = SharedMemory::open(path);
    if (memory->bytes() != bytes_for(ranks)) return nullptr;
    return std::make_shared<LetGoBoard>(std::move(memory), ranks);
  } catch (const SystemError&) {
    return nullptr;
  }
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

void retire(std::vector<std::shared_ptr<void>> memory, std::shared_ptr<LetGoBoard> board, int owner) noexcept {
  {
    Retirement& all = Retirement::instance();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.waiting.push_back({std::move(memory), std::move(board), owner});
  }
  give_back_what_is_free();
}

void give_back_what_is_free() noexcept {
  Retirement& all = Retirement::instance();
  // Freed after the lock, which it may take long to.
  std::vector<Retired> free;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto is_kept = [](const Retired& one) { return !one.board || !one.board->is_free(one.owner); };
  const auto end = std::partition(all.waiting.begin(), all.waiting.end(), is_kept);
  free.assign(std::make_move_iterator(end), std::make_move_iterator(all.waiting.end()));
  all.waiting.erase(end, all.waiting.end());
}

size_t retired_and_kept() {
  Retirement& all = Retirement::instance();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.waiting.size();
}

}  // namespace ours
