// c10d's reconfigure(): other ranks in the same group, without a restart of the processes that go on.

#include "backend/process_group.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <variant>

#include "backend/joining/store_keys.h"
#include "backend/symmetric/symmetric_group.h"
#include "backend/work.h"
#include "common/error.h"
#include "common/interrupts.h"

namespace ours {

namespace {

/// The members in the order of their ranks.
std::vector<ReconfigureHandle> members_of(const c10d::ReconfigureOptions& opts) {
  std::vector<ReconfigureHandle> members;
  std::visit(
      [&](const auto& handles) {
        for (const std::string& handle : handles) members.push_back(ReconfigureHandle::parse(handle));
      },
      opts.handles);
  check_members(members);
  return opts.handles.index() == 0 ? in_order(std::move(members)) : members;
}

/// Fails unless all who use the uuid mean the same ranks.
void claim(const c10::intrusive_ptr<c10d::Store>& store, int64_t uuid, const std::vector<ReconfigureHandle>& members,
           Deadline deadline) {
  std::string ids;
  for (const ReconfigureHandle& member : members) ids += member.id;
  const std::string claimed = ask_store(
      store, deadline, [ids](c10d::Store& asked, const auto&) { return asked.compareSet("members", "", ids); });
  if (claimed == ids) return;
  throw Error("reconfigure: uuid " + std::to_string(uuid) +
              " was already used for other ranks, or in another order. All ranks have to pass the same handles, and a "
              "uuid that has not been used");
}

}  // namespace

void ProcessGroupOurs::leave_ranks() {
  status_->set_without_ranks();
  const auto all = all_lanes();
  for (const auto& lane : all) {
    if (lane->queue->busy()) lane->abort("reconfigure() was called while operations were pending");
  }
  for (const auto& lane : all) lane->close();
  for (const auto& lane : all) lane->wait_closed();
  const std::lock_guard<std::mutex> lock(windows_mutex_);
  if (windows_) windows_->leave();
  windows_ = nullptr;
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::reconfigure(const c10d::ReconfigureOptions& opts) {
  status_->check_caller();
  const std::vector<ReconfigureHandle> members = members_of(opts);
  const auto found =
      std::find_if(members.begin(), members.end(), [&](const auto& member) { return member.id == handle_.id; });
  TORCH_CHECK_VALUE(found != members.end(), "reconfigure: this process's handle ", handle_.text(),
                    " is not among the handles; only those that are may call it");
  TORCH_CHECK(uuids_.insert(opts.uuid).second, "reconfigure: uuid ", opts.uuid,
              " was already used in this group, perhaps in an attempt that failed; pass one that has not been used");
  const Milliseconds timeout = opts.timeout.value_or(options_->timeout);
  const auto before = std::make_pair(rank_, size_);
  leave_ranks();
  rank_ = static_cast<int>(found - members.begin());
  size_ = static_cast<int>(members.size());
  // Global ranks would be those of processes that may have gone.
  options_->merged = options_->merged || !options_->global_ranks_in_group.empty();
  options_->global_ranks_in_group.clear();
  try {
    with_torch_errors("", [&] {
      const Deadline deadline = Deadline::after(timeout);
      // An attempt that failed may still wait on its connection. Otherwise there is no new one: TCPStore looks up the
      // server's name whenever it connects, which takes seconds where no name server answers.
      if (!meeting_store_) meeting_store_ = connect_anew(store_, deadline);
      const auto store =
          c10::make_intrusive<c10d::PrefixStore>("reconfigure/" + std::to_string(opts.uuid), meeting_store_);
      claim(store, opts.uuid, members, deadline);
      open(store, rank_, size_, timeout);
    });
  } catch (...) {
    std::tie(rank_, size_) = before;
    meeting_store_ = nullptr;
    throw_interrupt();
    throw;
  }
  handle_.joined = true;
  handle_.uuid = opts.uuid;
  handle_.rank = rank_;
  shrinks_ = 0;
  return completed_work();
}

}  // namespace ours

#endif  // C10D_BACKEND_HAS_RECONFIGURE
