#include "collectives/device/ipc_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "collectives/device/device_opening.h"
#include "device/deferred_release.h"

namespace ours {

namespace {

/// With a smaller stage, going through the host is just as good.
constexpr size_t kLeastStage = size_t{3} << 19;

/// What a rank tells its peers of its stage.
struct Offer {
  size_t bytes;
  MemoryHandle handle;
};

/// Makes memory of at most `bytes`, which are lowered if the device has no room.
std::shared_ptr<void> make_stage(Device& device, size_t& bytes) {
  release_deferred();  // peers may have let go of an earlier group's stage meanwhile
  for (;; bytes /= 2) {
    try {
      return device.memory(bytes);
    } catch (const DeviceOutOfMemory&) {
      if (bytes / 2 < kLeastStage) throw;
    }
  }
}

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

std::shared_ptr<IpcMemory> IpcMemory::share(Group& host, const std::shared_ptr<Device>& device, const Call& call,
                                            size_t stage_bytes) {
  auto made = std::make_shared<IpcMemory>(host.rank());
  IpcMemory& memory = *made;
  std::shared_ptr<IpcMemory> shared(end_aside(std::move(made)), &memory);
  memory.make_and_map(host, *device, call, stage_bytes);
  return shared;
}

void IpcMemory::make_and_map(Group& host, Device& device, const Call& call, size_t stage_bytes) {
  identities_ = gather_texts(host, call, device.identity());
  if (rank_ == 0) board_ = LetGoBoard::create(host.size());
  const std::string path = gather_texts(host, call, rank_ == 0 ? board_->path() : "")[0];
  Offer mine{stage_bytes, {}};
  why_not_ = first_refusal(host, call, [&] {
    if (rank_ != 0) board_ = LetGoBoard::open(path, host.size());
    own_ = make_stage(device, mine.bytes);
    mine.handle = device.share(own_.get());
  });
  if (!why_not_.empty()) return own_.reset();  // nobody has mapped it
  const std::vector<std::string> offers =
      gather_texts(host, call, std::string(reinterpret_cast<const char*>(&mine), sizeof(mine)));
  stage_bytes_ = stage_bytes;
  why_not_ = first_refusal(host, call, [&] {
    for (const std::string& text : offers) {
      Offer offer{};
      std::memcpy(&offer, text.data(), sizeof(offer));
      stage_bytes_ = std::min(stage_bytes_, offer.bytes);
      stages_.push_back(device.map(offer.handle));
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
