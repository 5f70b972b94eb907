#include "collectives/tcp/tcp_run.h"

#include <cstring>

#include "collectives/call_number.h"

namespace ours {

namespace {

static_assert(sizeof(CallRecord) + sizeof(uint64_t) <= sizeof(Signature));

Signature pack(const CallRecord& record, uint64_t fingerprint) {
  Signature signature{};
  std::memcpy(signature.data(), &record, sizeof(record));
  std::memcpy(signature.data() + sizeof(record), &fingerprint, sizeof(fingerprint));
  return signature;
}

CallRecord unpack(const Signature& signature) {
  CallRecord record;
  std::memcpy(&record, signature.data(), sizeof(record));
  return record;
}

}  // namespace

TcpCall::Facts facts_of(TcpMesh& group, const Running& run) {
  TcpMesh* const mesh = &group;
  const CallRecord& record = run.record;
  return {pack(record, run.fingerprint),
          run.call.seq,
          run.call.deadline,
          [record] { return describe_record(record); },
          [record, mesh](int peer, const Signature& theirs) {
            const CallRecord other = unpack(theirs);
            const bool theirs_is_later = count_of(other.seq) > count_of(record.seq);
            std::string refusal =
                mesh->refusal(theirs_is_later ? peer : mesh->rank(), theirs_is_later ? record.seq : other.seq);
            if (other.seq != record.seq && !refusal.empty()) return refusal;
            const std::string sizes = same_record(record, other) ? " with other sizes" : "";
            return different_calls(mesh->describe(peer) + " called " + describe_record(other) + sizes + "; " +
                                   mesh->describe(mesh->rank()) + " called " + describe_record(record));
          },
          run.call.arrivals,
          run.call.called,
          run.call.stop};
}

}  // namespace ours
