#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/errors.h"
#include "backend/joining/store_keys.h"
#include "backend/process_group.h"
#include "common/error.h"
#include "common/interrupts.h"

namespace ours {

namespace {

/// torch.distributed.distributed_c10d.SHRINK_ABORT
constexpr int kShrinkAbort = 1;

using OptionsPtr = c10::intrusive_ptr<ProcessGroupOurs::Options>;

/// Copies the options that every backend has from `given`, or from `parent` if nothing is given.
OptionsPtr child_options(const c10::intrusive_ptr<c10d::Backend::Options>& given,
                         const ProcessGroupOurs::Options& parent) {
  const c10d::Backend::Options& from = given ? *given : static_cast<const c10d::Backend::Options&>(parent);
  auto options = c10::make_intrusive<ProcessGroupOurs::Options>(from.timeout);
  options->group_name = from.group_name;
  const auto* own = dynamic_cast<const ProcessGroupOurs::Options*>(&from);
  options->selection = own != nullptr && !own->selection.empty() ? own->selection : parent.selection;
  return options;
}

/// Tells a child the global ranks of its members, which are ranks `members` of the parent, if they are known.
void name_members(ProcessGroupOurs::Options& child, const ProcessGroupOurs::Options& parent,
                  const std::vector<int>& members) {
  const auto& parents = parent.global_ranks_in_group;
  child.merged = parent.merged;
  if (parent.merged) return;
  for (const int member : members) {
    child.global_ranks_in_group.push_back(parents.empty() ? static_cast<uint64_t>(member)
                                                          : parents.at(static_cast<size_t>(member)));
  }
}

/// Makes a group with a connection of its own to the store, since the rendezvous waits, and the parent may use the
/// given connection meanwhile.
c10::intrusive_ptr<c10d::Backend> make_child(const StorePtr& store, int rank, int size, OptionsPtr options) {
  StorePtr own = with_torch_errors("", [&] {
    try {
      return connect_anew(store, Deadline::after(options->timeout));
    } catch (const Error&) {
      throw_interrupt();
      throw;
    }
  });
  return c10::make_intrusive<ProcessGroupOurs>(std::move(own), rank, size, std::move(options));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> ProcessGroupOurs::split(const StorePtr& store, const std::vector<int>& ranks,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  status_->check_usable();
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  auto options = child_options(opts, *options_);
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "split: rank ", rank, " is not in this group of ", size_, " ranks");
  }
  name_members(*options, *options_, ranks);
  return make_child(store, static_cast<int>(found - ranks.begin()), static_cast<int>(ranks.size()), std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupOurs::merge(const StorePtr& store,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                          const int& rank, const int& size) {
  auto options = child_options(opts, *options_);
  options->merged = true;
  return make_child(store, rank, size, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupOurs::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  TORCH_CHECK(!status_->is_forked_child(), "a forked child cannot shrink its parent's process group");
  auto options = child_options(opts_override, *options_);
  std::string name = "shrink/" + std::to_string(shrinks_++);
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) != ranks_to_exclude.end()) {
      name += "-" + std::to_string(rank);
    } else {
      members.push_back(rank);
    }
  }
  const auto found = std::find(members.begin(), members.end(), rank_);
  TORCH_CHECK_VALUE(found != members.end(), "shrink: rank ", rank_,
                    " is to be excluded; only the remaining ranks call shrink");
  name_members(*options, *options_, members);
  // Without that flag, operations under way, which may wait for an excluded rank, have until their timeout to end.
  if ((shrink_flags & kShrinkAbort) != 0) abort_all("shrink_group() was called with SHRINK_ABORT");
  return make_child(c10::make_intrusive<c10d::PrefixStore>(name, store_), static_cast<int>(found - members.begin()),
                    static_cast<int>(members.size()), std::move(options));
}

}  // namespace ours
