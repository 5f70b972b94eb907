#include "collectives/tcp/tcp_group.h"

#include <cstring>

#include "collectives/call_number.h"
#include "collectives/tcp/tcp_group_impl.h"

namespace ours {

namespace {

/// The signature of a call holds its record, without what the compiler puts between the fields.
struct Packed {
  uint64_t seq;
  uint64_t count;
  double factor;
  int32_t root;
  uint8_t op;
  uint8_t dtype;
  uint8_t kind;
  uint8_t unused;
  uint64_t fingerprint;
};
static_assert(sizeof(Packed) <= sizeof(Signature));

Signature pack(const CallRecord& record, uint64_t fingerprint) {
  const Packed packed{record.seq, record.count, record.factor, record.root, record.op, record.dtype, record.kind,
                      0,          fingerprint};
  Signature signature{};
  std::memcpy(signature.data(), &packed, sizeof(packed));
  return signature;
}

CallRecord unpack(const Signature& signature) {
  Packed packed;
  std::memcpy(&packed, signature.data(), sizeof(packed));
  CallRecord record{};
  record.seq = packed.seq;
  record.count = packed.count;
  record.factor = packed.factor;
  record.root = packed.root;
  record.op = packed.op;
  record.dtype = packed.dtype;
  record.kind = packed.kind;
  return record;
}

}  // namespace

TcpCall::Facts facts_of(const std::shared_ptr<TcpMesh>& group, const Call& call, const CallRecord& record,
                        uint64_t fingerprint) {
  TcpMesh* const mesh = group.get();
  return {pack(record, fingerprint), call.seq, call.deadline, [record] { return describe_record(record); },
          [record, mesh](int peer, const Signature& theirs) {
            const CallRecord other = unpack(theirs);
            const bool theirs_is_later = count_of(other.seq) > count_of(record.seq);
            std::string refusal =
                mesh->refusal(theirs_is_later ? peer : mesh->rank(), theirs_is_later ? record.seq : other.seq);
            if (other.seq != record.seq && !refusal.empty()) return refusal;
            const std::string sizes = same_record(record, other) ? " with other sizes" : "";
            return "ranks of one group called different collectives: " + mesh->describe(peer) + " called " +
                   describe_record(other) + sizes + "; " + mesh->describe(mesh->rank()) + " called " +
                   describe_record(record) + ". All ranks must make the same calls in the same order";
          }};
}

TcpGroup::TcpGroup(std::shared_ptr<TcpMesh> mesh)
    : mesh_(std::move(mesh)), selection_(Selection::parse(mesh_->plan().rules)) {}

TcpCall::Facts TcpGroup::facts_of(const Call& call, const CallRecord& record, uint64_t fingerprint) const {
  return ours::facts_of(mesh_, call, record, fingerprint);
}

std::shared_ptr<void> TcpGroup::allocate(size_t) { return nullptr; }

void TcpGroup::abort(const std::string& reason) {
  mesh_->fail(FailureKind::Aborted,
              mesh_->describe_self() + " aborted the group" + (reason.empty() ? "" : ": " + reason));
}

void TcpGroup::fail(const std::exception_ptr& error) noexcept { mesh_->fail(error); }

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
