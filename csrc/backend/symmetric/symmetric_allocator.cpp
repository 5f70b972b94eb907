#include "backend/symmetric/symmetric_allocator.h"

#include "backend/process_group.h"
#include "backend/symmetric/symmetric_handle.h"

#if TORCH_VERSION_MINOR >= 15

#include <chrono>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "common/fork_guard.h"
#include "common/interpreter_lock.h"

namespace ours {

namespace {

namespace symm = c10d::symmetric_memory;

struct GroupFacts {
  int rank;
  int size;
  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds timeout;
  std::string uuid;  ///< of the reconfigure() that gave the group its ranks; empty if none has
};

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::kCPU)->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return group.getStore()->getTimeout();  // the backend does not tell
  }
}

std::string uuid_of(c10d::ProcessGroup& group) {
  try {
    const auto backend = group.getBackend(c10::kCPU);
    const auto* const ours = dynamic_cast<const ProcessGroupOurs*>(backend.get());
    return ours == nullptr ? "" : ours->uuid();
  } catch (const c10::Error&) {
    return "";  // there is no backend for the CPU
  }
}

/// The same of the group of that name, if there is one.
std::string uuid_of(const std::string& name) {
  try {
    return uuid_of(*c10d::resolve_process_group(name));
  } catch (const c10::Error&) {
    return "";
  }
}

/// A process group's, or what set_group_info() has given.
GroupFacts facts_of(const std::string& name) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    const symm::GroupInfo& info = symm::get_group_info(name);
    return {info.rank, info.world_size, info.store, info.store->getTimeout(), ""};
  }
  return {group->getRank(), group->getSize(), group->getStore(), timeout_of(*group), uuid_of(*group)};
}

using HandlePtr = c10::intrusive_ptr<SymmetricHandle>;

/// What no thread changes during a fork, since a forked child may allocate, too.
class Registry {
 public:
  struct Rendezvous {
    std::string uuid;  ///< of the reconfigure() before it
    HandlePtr handle;
  };

  struct Allocation {
    std::shared_ptr<SymmetricBlock> block;
    std::optional<std::string> group;           ///< that alloc() was called with
    std::map<std::string, Rendezvous> handles;  ///< by the group
  };

  static Registry& instance() {
    static auto* const kRegistry = new Registry;  // never freed: tensors may be freed as late as exit
    return *kRegistry;
  }

  void add(Allocation allocation) {
    void* const data = allocation.block->data();
    const std::lock_guard<std::mutex> lock(mutex());
    allocations_[data] = std::move(allocation);
  }

  /// Empty if `data` is none.
  std::optional<Allocation> find(void* data) {
    const std::lock_guard<std::mutex> lock(mutex());
    const auto found = allocations_.find(data);
    if (found == allocations_.end()) return std::nullopt;
    return found->second;
  }

  void remove(void* data) {
    // Destroyed without the lock, which the block takes itself.
    decltype(allocations_)::node_type removed;
    const std::lock_guard<std::mutex> lock(mutex());
    removed = allocations_.extract(data);
  }

  void add_handle(void* data, const std::string& group, Rendezvous made) {
    // After this, what was there before is destroyed without the lock, which its memory takes itself.
    const std::lock_guard<std::mutex> lock(mutex());
    const auto found = allocations_.find(data);
    if (found != allocations_.end()) std::swap(found->second.handles[group], made);
  }

  /// The ranks of the group of that name, which come together if they have not yet.
  std::shared_ptr<SymmetricGroup> group(const std::string& name) {
    const GroupFacts facts = facts_of(name);
    const WithoutInterpreterLock unlocked;
    const std::shared_ptr<std::mutex> meeting_of_group = [&] {
      const std::lock_guard<std::mutex> lock(mutex());
      auto& found = meetings_[name];
      if (!found) found = std::make_shared<std::mutex>();
      return found;
    }();
    const std::lock_guard<std::mutex> one_at_a_time(*meeting_of_group);
    {
      const std::lock_guard<std::mutex> lock(mutex());
      const auto found = groups_.find(name);
      // A group of the same name, after the first was destroyed, has another store.
      const bool same = found != groups_.end() && found->second.store.lock() == facts.store;
      if (same && found->second.uuid == facts.uuid) return found->second.group;
    }
    const std::string shown = "the symmetric memory of group '" + name + "'";
    auto store = c10::make_intrusive<c10d::PrefixStore>("ours/symmetric/" + name + '/' + facts.uuid, facts.store);
    const Meeting meeting{std::move(store), facts.rank, facts.size, facts.timeout, shown, ""};
    Members members{c10::weak_intrusive_ptr<c10d::Store>(facts.store), facts.uuid, SymmetricGroup::join(meeting)};
    const auto made = members.group;
    std::vector<Members> gone;  // destroyed without the lock, which their memory takes itself
    const std::lock_guard<std::mutex> lock(mutex());
    for (auto group = groups_.begin(); group != groups_.end();) {
      const bool stays = group->first != name && group->second.store.use_count() > 0;
      if (!stays) gone.push_back(std::move(group->second));
      group = stays ? std::next(group) : groups_.erase(group);
    }
    groups_.emplace(name, std::move(members));
    return made;
  }

 private:
  struct Members {
    c10::weak_intrusive_ptr<c10d::Store> store;
    std::string uuid;  ///< of their reconfigure()
    std::shared_ptr<SymmetricGroup> group;
  };

  static std::mutex& mutex() { return ForkGuard::no_forks(); }

  std::map<void*, Allocation> allocations_;
  std::map<std::string, Members> groups_;
  std::map<std::string, std::shared_ptr<std::mutex>> meetings_;  // by the name of the group; held for long
};

int64_t global_rank(int64_t otherwise) {
  try {
    return facts_of("0").rank;  // torch's name of the default group
  } catch (const c10::Error&) {
    return otherwise;
  }
}

/// Gives the ranks each other's blocks, which must have one size. `what` are bytes of that.
std::vector<SharedBlock> share_same(SymmetricGroup& group, const SharedBlock& own, const char* what) {
  auto shared = group.share(Op::SymmetricRendezvous, own);
  for (size_t r = 1; r < shared.size(); ++r) {
    const size_t first = shared[0].block->bytes();
    const size_t other = shared[r].block->bytes();
    TORCH_CHECK_VALUE(first == other, "rendezvous(): rank 0 has ", first, " bytes of ", what, " and rank ", r, " has ",
                      other, "; all ranks must have the same");
  }
  return shared;
}

class SymmetricAllocator final : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int /*device_idx*/, const std::optional<std::string>& group_name) override {
    const WithoutInterpreterLock unlocked;
    auto block = with_torch_errors("", [&] { return SymmetricBlock::make(size); });
    void* const data = block->data();
    Registry::instance().add({std::move(block), group_name, {}});
    return data;
  }

  void free(void* ptr) override { Registry::instance().remove(ptr); }

  size_t get_alloc_size(void* ptr) override {
    const auto known = Registry::instance().find(ptr);
    TORCH_CHECK_VALUE(known, "this is not the address of symmetric memory");
    return known->block->bytes();
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(void* ptr,
                                                       const std::optional<std::string>& group_name) override {
    Registry& registry = Registry::instance();
    const auto known = registry.find(ptr);
    if (!known) return nullptr;  // torch's own callers ask in this way whether a tensor is in symmetric memory
    const Registry::Allocation& allocation = *known;
    TORCH_CHECK_VALUE(group_name || allocation.group,
                      "rendezvous(): no group was given, neither here nor when the tensor was allocated");
    const std::string name = group_name ? *group_name : *allocation.group;
    const std::string uuid = uuid_of(name);
    const auto found = allocation.handles.find(name);
    if (found != allocation.handles.end() && found->second.uuid == uuid) return found->second.handle;
    TORCH_CHECK(allocation.block->is_here(),
                "this tensor belongs to the process that forked this one; allocate one in the child");
    const auto group = registry.group(name);
    const SharedBlock own{allocation.block, {global_rank(group->rank()), 0, 0, 0}};
    auto buffers = share_same(*group, own, "symmetric memory");
    // Each group has a pad of its own for the tensor: the ranks have other numbers there, and so other words.
    auto pad = group->make_block(symm::get_signal_pad_size());
    auto pads = share_same(*group, {std::move(pad), {}}, "signal pad");
    auto handle = c10::make_intrusive<SymmetricHandle>(group, std::move(buffers), std::move(pads));
    registry.add_handle(ptr, name, {uuid, handle});
    return handle;
  }

  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "ours"; }
  bool has_allocation(void* ptr) override { return Registry::instance().find(ptr).has_value(); }
};

}  // namespace

void register_symmetric_memory() {
  auto allocator = c10::make_intrusive<SymmetricAllocator>();
  symm::register_availability("ours", allocator);
  if (!symm::has_allocator(c10::kCPU)) symm::register_allocator(c10::kCPU, std::move(allocator));
}

std::shared_ptr<SymmetricBlock> find_symmetric_block(void* data) {
  const auto found = Registry::instance().find(data);
  return found ? found->block : nullptr;
}

}  // namespace ours

#else

namespace ours {

void register_symmetric_memory() {}
std::shared_ptr<SymmetricBlock> find_symmetric_block(void* /*data*/) { return nullptr; }

}  // namespace ours

#endif  // TORCH_VERSION_MINOR >= 15
