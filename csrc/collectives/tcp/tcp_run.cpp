#include "collectives/tcp/tcp_run.h"

#include <cstring>

#include "collectives/call_number.h"

namespace ours {

namespace {

/// The form in which a call's signature holds its record: without the compiler's padding between the fields.
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

TcpCall::Facts facts_of(TcpMesh& group, const Running& run) {
  TcpMesh* const mesh = &group;
  const CallRecord& record = run.record;
  return {pack(record, run.fingerprint), run.call.seq, run.call.deadline, [record] { return describe_record(record); },
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

}  // namespace ours
