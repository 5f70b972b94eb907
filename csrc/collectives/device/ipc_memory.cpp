#include "collectives/device/ipc_memory.h"

#include <algorithm>

#include "collectives/device/device_opening.h"

namespace ours {

namespace {

/// With a smaller stage, going through the host is just as good.
constexpr size_t kLeastStage = size_t{3} << 19;

void make_stage(DeviceHeap& heap, size_t bytes) {
  for (;; bytes /= 2) {
    try {
      heap.add_segment(bytes);
      return;
    } catch (const DeviceOutOfMemory&) {
      if (bytes / 2 < kLeastStage) throw;
    }
  }
}

/// Returns the reason if `attempt` fails, otherwise an empty string.
template <class Attempt>
std::string refusal(Attempt&& attempt) {
  try {
    attempt();
    return "";
  } catch (const Error& e) {
    return e.what();
  }
}

/// The reason of the first rank that has one.
std::string first_of(const std::vector<std::string>& reasons) {
  for (size_t r = 0; r < reasons.size(); ++r) {
    if (!reasons[r].empty()) return "on rank " + std::to_string(r) + ": " + reasons[r];
  }
  return "";
}

}  // namespace

IpcMemory share_device_memory(Group& host, const std::shared_ptr<Device>& device, const Call& call,
                              size_t stage_bytes) {
  IpcMemory memory;
  const int rank = host.rank();
  memory.identities = gather_texts(host, call, device->identity());
  if (rank == 0) memory.board = LetGoBoard::create(host.size());
  const std::string path = gather_texts(host, call, rank == 0 ? memory.board->path() : std::string())[0];
  const auto open_board = [&] {
    if (rank != 0) memory.board = LetGoBoard::open(path, host.size());
  };
  const auto make_heap = [&] {
    memory.heap = std::make_shared<DeviceHeap>(device, memory.board, rank);
    make_stage(*memory.heap, stage_bytes);
  };
  const auto map_all = [&] {
    for (int r = 0; r < host.size(); ++r) memory.mapped->at(r, DevicePlace{});
  };
  memory.why_not = first_of(gather_texts(host, call, refusal(open_board)));
  if (!memory.why_not.empty()) return memory;
  memory.why_not = first_of(gather_texts(host, call, refusal(make_heap)));
  if (memory.why_not.empty()) {
    memory.mapped = std::make_unique<MappedMemory>(device, memory.heap, rank, host.size());
    memory.mapped->learn(host, call, std::vector<size_t>(static_cast<size_t>(host.size()), 1));
    memory.stage_bytes = stage_bytes;
    for (int r = 0; r < host.size(); ++r) {
      memory.stage_bytes = std::min(memory.stage_bytes, memory.mapped->segment_bytes(r, 0));
    }
    memory.why_not = first_of(gather_texts(host, call, refusal(map_all)));
  }
  if (!memory.why_not.empty()) {
    memory.mapped.reset();
    memory.board->let_go(rank);
  }
  return memory;
}

}  // namespace ours
