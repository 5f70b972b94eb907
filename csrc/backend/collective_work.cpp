#include "backend/collective_work.h"

#include "backend/errors.h"

namespace ours {

CollectiveWork::CollectiveWork(Collective collective, std::shared_ptr<Group> group, std::shared_ptr<CommQueue> queue,
                               std::shared_ptr<GroupStatus> status)
    : OursWork(collective.op, group->rank(), std::move(status), collective.inputs, std::move(collective.outputs),
               collective.timeout),
      dtype_(collective.dtype),
      body_(std::move(collective.body)),
      group_(std::move(group)),
      queue_(std::move(queue)) {}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (!queue_->wait(*this, timeout)) throw_wait_timeout(timeout);
  rethrow();
  return true;
}

void CollectiveWork::execute() noexcept {
  set_started();
  std::exception_ptr error;
  try {
    body_(*group_, Call{op_, dtype_, getSequencenumber(), Deadline::after(getTimeout())});
  } catch (...) {
    error = std::current_exception();
    // The group knows it already if one of its operations threw this. Else the peers must hear of it, and of this group
    // nothing more may be expected.
    if (error_type_of(error) != c10d::ErrorType::SUCCESS) group_->fail(error);
  }
  // Staging memory is not needed any more, however long the user keeps the Work.
  body_ = nullptr;
  complete(error);
}

}  // namespace ours
