#include "collectives/device/ipc_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "collectives/device/device_opening.h"
#include "device/deferred_release.h"

namespace ours {

namespace {

/// All ranks try something: returns why the first one that fails has failed, or an empty string.
template <class Attempt>
std::string first_refusal(Group& host, const Call& call, Attempt&& attempt) {
  std::string mine;
  try {
    attempt();
  } catch (const Error& e) {
    mine = "on rank " + std::to_string(host.rank()) + ": " + e.what();
  }
  for (std::string& refusal : gather_texts(host, call, mine)) {
    if (!refusal.empty()) return std::move(refusal);
  }
  return "";
}

}  // namespace

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

std::string LetGoBoard::path() const { return descriptor_path(::getpid(), memory_->fd()); }

uint64_t LetGoBoard::least_of_peers(int rank) const noexcept {
  uint64_t least = kHasLetGo;
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank) least = std::min(least, of(r).load(std::memory_order_acquire));
  }
  return least;
}

std::shared_ptr<IpcMemory> IpcMemory::share(Group& host, const std::shared_ptr<Device>& device, const Call& call,
                                            size_t stage_bytes) {
  auto made = std::make_shared<IpcMemory>(host.rank(), stage_bytes);
  IpcMemory& memory = *made;
  std::shared_ptr<IpcMemory> shared(end_aside(std::move(made)), &memory);
  memory.make_and_map(host, *device, call);
  return shared;
}

void IpcMemory::make_and_map(Group& host, Device& device, const Call& call) {
  identities_ = gather_texts(host, call, device.identity());
  if (rank_ == 0) board_ = LetGoBoard::create(host.size());
  const std::string path = gather_texts(host, call, rank_ == 0 ? board_->path() : "")[0];
  MemoryHandle mine{};
  why_not_ = first_refusal(host, call, [&] {
    if (rank_ != 0) board_ = LetGoBoard::open(path, host.size());
    release_deferred();  // peers may have let go of an earlier group's stage meanwhile
    own_ = device.memory(stage_bytes_);
    mine = device.share(own_.get());
  });
  if (!why_not_.empty()) return own_.reset();  // nobody has mapped it
  const std::vector<std::string> handles = gather_texts(host, call, std::string(mine.begin(), mine.end()));
  why_not_ = first_refusal(host, call, [&] {
    for (const std::string& text : handles) {
      MemoryHandle handle{};
      std::copy(text.begin(), text.end(), handle.begin());
      stages_.push_back(device.map(handle));
    }
  });
}

IpcMemory::~IpcMemory() {
  if (!owner_.is_here() || !board_) return;
  stages_.clear();
  board_->let_go(rank_);
  release_when([board = board_, rank = rank_] { return board->have_peers_let_go(rank); }, std::move(own_));
}

}  // namespace ours
