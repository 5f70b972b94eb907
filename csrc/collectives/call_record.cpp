#include "collectives/call_record.h"

#include <array>
#include <cstring>
#include <vector>

#include "collectives/call_number.h"

namespace ours {

CallRecord record_of(const Call& call) {
  CallRecord record{};
  record.seq = call.seq;
  record.op = static_cast<uint8_t>(call.op);
  record.dtype = static_cast<uint8_t>(call.dtype);
  record.kind = static_cast<uint8_t>(ReduceKind::None);
  record.root = -1;
  return record;
}

CallRecord record_of(const Call& call, size_t count, const Reduction& reduction, int root) {
  CallRecord record = record_of(call);
  record.count = count;
  record.kind = static_cast<uint8_t>(reduction.kind);
  record.factor = reduction.kind == ReduceKind::PremulSum ? reduction.factor : 0.0;
  record.root = root;
  return record;
}

bool same_record(const CallRecord& a, const CallRecord& b) {
  // The factor is compared by its bits: NaN agrees with itself.
  return a.seq == b.seq && a.count == b.count && std::memcmp(&a.factor, &b.factor, sizeof(a.factor)) == 0 &&
         a.root == b.root && a.op == b.op && a.dtype == b.dtype && a.kind == b.kind;
}

uint64_t digest_of(const CallRecord& record) {
  std::array<uint64_t, sizeof(CallRecord) / sizeof(uint64_t)> words;
  std::memcpy(words.data(), &record, sizeof(record));
  uint64_t digest = 0;
  for (const uint64_t word : words) {
    // Each step can be undone, so different digests so far stay different if the rest is the same. The factor is the
    // golden ratio, as in Knuth's multiplicative hashing.
    digest = (digest ^ word) * 0x9e3779b97f4a7c15;
    digest ^= digest >> 32;
  }
  return digest;
}

std::string refusal_of(const Call& call, const std::string& rank, const std::string& why) {
  return rank + " did not take part in " + name_of(call.op) + ' ' + describe_number(call.seq) +
         ", since its own arguments have no meaning (ValueError there): " + why +
         ". All ranks must make the same calls, with arguments that fit";
}

std::string different_calls(const std::string& calls) {
  return "ranks of one group called different collectives: " + calls +
         ". All ranks must make the same calls in the same order";
}

std::string calls_of_ranks(int ranks, const std::function<CallRecord(int)>& record_of_rank,
                           const std::function<bool(int, int)>& same, const std::function<std::string(int)>& name) {
  std::string calls;
  std::vector<bool> told(static_cast<size_t>(ranks), false);
  for (int r = 0; r < ranks; ++r) {
    if (told[static_cast<size_t>(r)]) continue;
    calls += calls.empty() ? "" : "; ";
    for (int other = r; other < ranks; ++other) {
      if (!same(other, r)) continue;
      told[static_cast<size_t>(other)] = true;
      calls += (other == r ? "" : ", ") + name(other);
    }
    calls += " called " + describe_record(record_of_rank(r));
  }
  return calls;
}

std::string describe_record(const CallRecord& record) {
  std::string text = std::string(name_of(static_cast<Op>(record.op))) + ' ' + describe_number(record.seq);
  const auto kind = static_cast<ReduceKind>(record.kind);
  std::string details;
  const auto add = [&](const std::string& detail) { details += (details.empty() ? "" : ", ") + detail; };
  if (kind != ReduceKind::None) add(name_of(kind));
  if (kind == ReduceKind::PremulSum) add("factor " + std::to_string(record.factor));
  if (static_cast<Op>(record.op) != Op::Barrier && static_cast<Op>(record.op) != Op::MonitoredBarrier) {
    const std::string dtype = name_of(static_cast<DType>(record.dtype));
    add(record.count != 0 ? std::to_string(record.count) + " x " + dtype : dtype);
  }
  if (record.root >= 0) add("root " + std::to_string(record.root));
  return details.empty() ? text : text + " (" + details + ")";
}

}  // namespace ours
