#include "collectives/device/ipc_group.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "common/partition.h"
#include "device/deferred_release.h"

namespace ours {

namespace {

/// Longer than a peer takes to copy a slot.
constexpr std::chrono::milliseconds kLastCopies{50};

/// The number of bytes that kernels read at once.
constexpr size_t kAlign = 16;

}  // namespace

IpcGroup::IpcGroup(std::shared_ptr<Group> host, std::shared_ptr<Device> device, IpcMemory memory)
    : DeviceGroupBase(std::move(host), std::move(device)),
      slot_bytes_(memory.stage_bytes / kSlots / kAlign * kAlign),
      board_(std::move(memory.board)),
      heap_(std::move(memory.heap)),
      memory_(std::move(memory.mapped)),
      copies_(this->device().make_stream()),
      kernels_(this->device().make_stream()),
      copied_(this->device().make_event()),
      reduced_(this->device().make_event()) {
  std::map<std::string, size_t> numbers;
  for (const std::string& identity : memory.identities) {
    const auto [found, is_new] = numbers.try_emplace(identity, drivers_.size());
    if (is_new) drivers_.push_back(static_cast<int>(device_of_.size()));
    device_of_.push_back(found->second);
  }
}

IpcGroup::~IpcGroup() {
  end();
  if (!in_child()) release_deferred();
}

void IpcGroup::guarded(const Running& run, const std::function<void()>& body) {
  DeviceGroupBase::guarded(run, [&] {
    body();
    board_->finish_call(rank());
  });
}

std::vector<Words> IpcGroup::open(const Running& run, const Words& mine) {
  Words words{heap_->segments()};
  words.insert(words.end(), mine.begin(), mine.end());
  std::vector<Words> opened = open_call(host(), run, words);
  std::vector<size_t> segments;
  for (size_t r = 0; r < opened.size(); ++r) {
    segments.push_back(opened[r][0]);
    opened[r].erase(opened[r].begin());
  }
  memory_->learn(host(), run.call, segments);
  return opened;
}

std::byte* IpcGroup::slot(int rank, size_t number) {
  return memory_->at(rank, {kStage, number % kSlots * slot_bytes_});
}

void IpcGroup::copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0) device().copy(to, from, bytes, copies_->handle());
}

void IpcGroup::wait_copied(const Running& run) {
  copied_->record(copies_->handle());
  wait(*copied_, run, "a copy");
}

void IpcGroup::wait_reduced(const Running& run) {
  if (!drives()) return;
  reduced_->record(kernels_->handle());
  wait(*reduced_, run, "the arithmetic");
}

Slice IpcGroup::share_of(size_t count, size_t element) const {
  if (!drives()) return {};
  const auto number = static_cast<int>(device_of_[static_cast<size_t>(rank())]);
  return slice_of(count, static_cast<int>(drivers_.size()), number, std::max<size_t>(kAlign / element, 1));
}

std::shared_ptr<void> IpcGroup::allocate(size_t bytes) {
  // After a failure, a peer that has not noticed yet may still write to what was reduced, and has since been freed.
  if (in_child() || !failure().empty()) return nullptr;
  return heap_->allocate(bytes);
}

namespace {

/// What a rank's device uses of its peers' memory, and the rank's own memory that the same kernels use. When it is
/// destroyed, the peers are told that they may free theirs.
struct Use {
  std::unique_ptr<MappedMemory> mapped;
  std::shared_ptr<DeviceHeap> own;
  std::shared_ptr<LetGoBoard> board;
  int rank;

  ~Use() {
    mapped.reset();
    board->let_go(rank);
  }
};

}  // namespace

void IpcGroup::let_go() noexcept {
  // The process may end next, and with it the stage from which peers are still copying the last results, so wait for
  // as long as a copy takes.
  const auto patience = Deadline::after(kLastCopies);
  while (!board_->have_all_finished_calls_of(rank()) && failure().empty() && !patience.passed()) {
    std::this_thread::yield();
  }
  auto use = std::make_shared<Use>();
  use->mapped = std::move(memory_);
  use->own = heap_;
  use->board = board_;
  use->rank = rank();
  release(end_aside(std::move(use)));
}

}  // namespace ours
