#include "collectives/tcp/tcp_group.h"

#include "collectives/tcp/tcp_group_impl.h"

namespace ours {

TcpGroup::TcpGroup(std::shared_ptr<TcpMesh> mesh)
    : mesh_(std::move(mesh)), selection_(Selection::parse(mesh_->plan().rules)) {}

void TcpGroup::abort(const std::string& reason) {
  mesh_->fail(FailureKind::Aborted,
              mesh_->describe_self() + " aborted the group" + (reason.empty() ? "" : ": " + reason));
}

void TcpGroup::fail(const std::exception_ptr& error) noexcept {
  std::string message;
  const FailureKind kind = TcpFailure::kind_of(error, message);
  if (kind != FailureKind::None) mesh_->fail(kind, message);
}

void TcpGroup::refuse(const Call& call, const std::string& why) noexcept {
  mesh_->refuse(call.seq, refusal_of(call, mesh_->describe_self(), why));
}

std::string TcpGroup::failure() const {
  mesh_->look();
  return mesh_->failure().message();
}

std::byte* TcpGroup::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_ = std::vector<std::byte>(bytes);
  return scratch_.data();
}

}  // namespace ours
