#include <cstring>

#include "collectives/call_record.h"
#include "common/error.h"
#include "fuzz/parser.h"
#include "transport/tcp/tcp_call_state.h"

// What peers say of their calls, in control frames and in the headers of data, while this rank makes calls of its own.
// Each step is a byte that says what happens, and what belongs to it.

namespace ours::fuzz {
namespace {

constexpr int kRank = 1, kSize = 4;
enum Step : uint8_t { kBegin, kEnd, kHear, kHearData, kTake, kCauses, kSteps };

CallRecord record(uint64_t seq) {
  return record_of({Op::AllReduce, DType::Float32, seq, Deadline::after(std::chrono::seconds(1))}, 16, {}, -1);
}

Signature signature_of(const CallRecord& record) {
  Signature signature{};
  static_assert(sizeof(CallRecord) <= sizeof(Signature));
  std::memcpy(signature.data(), &record, sizeof(record));
  return signature;
}

Bytes hear(FrameKind kind, uint64_t call, const Bytes& payload) {
  FrameHeader header;
  header.kind = kind;
  header.call = call;
  header.bytes = payload.size();
  header.signature = signature_of(record(call));
  header.last = {{{2, 100}, {3, 50}}};
  return Bytes{kHear, 0} + bytes_of(header) + payload;
}

std::vector<Seed> seeds() {
  const Bytes begin(1, kBegin), end(1, kEnd), take(2, kTake), causes(1, kCauses);
  return {{"agree", begin + hear(FrameKind::Agree, 1, "") + take + end},
          {"wait", begin + hear(FrameKind::Waiting, 1, Bytes("\2\0\0\0\3\0\0\0", 8)) + causes + end},
          {"refuse", hear(FrameKind::Refused, 1, "why") + begin + causes + end},
          {"monitor", hear(FrameKind::Monitor, 7, "") + begin + end},
          {"ahead", begin + hear(FrameKind::Agree, 2, "") + end + begin + take + end}};
}

/// This rank's calls, one after the other.
class Calls {
 public:
  void begin() {
    if (state_.is_under_way()) state_.end();
    arrivals_.begin(kRank);
    facts_.signature = signature_of(record(state_.count() + 1));
    facts_.number = state_.count() + 1;
    state_.begin(facts_);
    for (int rank = 0; rank < kSize; ++rank) (void)state_.mismatch(rank);
  }

  void hear(Source& source) {
    const int rank = source.byte() % kSize;
    const auto header = source.value<FrameHeader>();
    if (fault_of(header, false) != nullptr) throw Error("the stream refuses it");
    const Bytes payload = source.take(header.bytes);
    if (payload.size() < header.bytes) return;
    state_.lateness().set_idle(header.phase % 2 == 0);
    if (!state_.hear(rank, header, payload)) throw Error("too far ahead");
    (void)state_.mismatch(rank);
  }

  void hear_data(Source& source) {
    const auto header = source.value<FrameHeader>();
    if (fault_of(header, true) != nullptr) throw Error("the stream refuses it");
    state_.lateness().set_idle(header.phase % 2 == 0);
    (void)state_.mismatch(2, header.call, header.signature);
    if (state_.is_under_way(header.call)) state_.hear_stamp(header);
  }

  void check() {
    FrameHeader header;
    state_.lateness().stamp(header);
    for (const Arrived& one : header.last) {
      require(one.rank < kSize || one.rank == UINT32_MAX, "only ranks of the group are late");
    }
    const std::vector<uint32_t> causes = state_.causes({0, 2});
    require(causes.size() <= kMaxCauses, "the causes fit into a frame");
    for (const uint32_t rank : causes) require(rank < kSize, "only ranks of the group are causes");
    require(state_.own_refusals().size() <= 4, "few refusals are kept");
  }

  void step(uint8_t what, Source& source) {
    switch (what % kSteps) {
      case kBegin:
        return begin();
      case kEnd:
        return state_.end();
      case kHear:
        return hear(source);
      case kHearData:
        return hear_data(source);
      case kTake:
        return void(state_.take_agreement(source.byte() % kSize, source.byte()));
      default:
        return check();
    }
  }

 private:
  TcpCallState state_{kRank, kSize};
  Arrivals arrivals_{kSize};
  TcpCallState::Facts facts_{{},
                             0,
                             Deadline::after(std::chrono::hours(1)),
                             [] { return std::string("a call"); },
                             [](int, const Signature& theirs) {
                               CallRecord other;
                               std::memcpy(&other, theirs.data(), sizeof(other));
                               return describe_record(other);
                             },
                             &arrivals_,
                             Clock::now()};
};

void parse(const Bytes& input) {
  Source source(input);
  Calls calls;
  calls.begin();
  while (!source.empty()) calls.step(source.byte(), source);
  calls.check();
}

const Registration registration("calls", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
