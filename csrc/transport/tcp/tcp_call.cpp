#include "transport/tcp/tcp_call.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "common/error.h"
#include "common/partition.h"
#include "common/timeline.h"

namespace ours {

TcpCall::TcpCall(TcpMesh& mesh, Facts facts)
    : mesh_(mesh), endpoint_(mesh.endpoint()), facts_(std::move(facts)), lock_(mesh.use()) {
  endpoint_.begin_call(facts_);
}

TcpCall::~TcpCall() { endpoint_.end_call(std::uncaught_exceptions() != exceptions_); }

size_t TcpCall::parts(size_t bytes) const { return std::max<size_t>(1, piece_count(bytes, mesh_.plan().chunk_bytes)); }

FrameHeader TcpCall::header(const Message& message, size_t part) const {
  FrameHeader header;
  header.detail = message.detail;
  header.phase = message.phase;
  header.part = static_cast<uint32_t>(part);
  header.call = number();
  header.total = message.bytes;
  header.bytes = piece_of(message.bytes, mesh_.plan().chunk_bytes, part).size();
  header.signature = facts_.signature;
  return header;
}

bool TcpCall::goes_by_engine(const FrameHeader& header) const {
  return endpoint_.payloads() != nullptr && endpoint_.payloads()->takes(header.bytes);
}

TcpStream& TcpCall::stream(const Message& message, size_t part) {
  // Headers alone need only one stream, which keeps the engine's messages in their order.
  const size_t streams = endpoint_.payloads() == nullptr ? static_cast<size_t>(mesh_.plan().streams) : 1;
  return endpoint_.connections().data(message.peer, (message.lane + part) % streams);
}

void TcpCall::agree(uint32_t round, int to) {
  reach(to);
  FrameHeader header;
  header.kind = FrameKind::Agree;
  header.part = round;
  header.call = number();
  header.signature = facts_.signature;
  endpoint_.calls().stamp(header);
  endpoint_.connections().control(to).post_send(header, std::string());
}

bool TcpCall::agreed(uint32_t round, int from) {
  reach(from);
  return endpoint_.calls().take_agreement(from, round);
}

std::byte* TcpCall::keep(size_t bytes) {
  kept_.emplace_back(new std::byte[bytes]);
  return kept_.back().get();
}

void TcpCall::reach(int peer) { endpoint_.reach(lock_, peer, facts_.deadline, facts_.what); }

void TcpCall::send_part(const Message& message, size_t part, const void* part_data, Tally& tally) {
  reach(message.peer);
  FrameHeader frame = header(message, part);
  endpoint_.calls().stamp(frame);
  size_t* done = &tally.done;
  ++tally.posted;
  if (goes_by_engine(frame)) {
    const auto announcement = endpoint_.payloads()->send(message.peer, part_data, frame.bytes, done);
    frame.engine_number = announcement.number;
    done = announcement.through;
  }
  stream(message, part).post_send(frame, part_data, done);
}

void TcpCall::receive_part(const Message& message, size_t part, void* part_data, Tally& tally) {
  reach(message.peer);
  FrameHeader frame = header(message, part);
  frame.engine_number = goes_by_engine(frame) ? 1 : 0;  // some number
  ++tally.posted;
  stream(message, part).post_receive(frame, part_data, &tally.done);
}

void TcpCall::send(const Message& message, const void* data, Tally& tally) {
  for (size_t part = 0; part < parts(message.bytes); ++part) {
    send_part(message, part, static_cast<const std::byte*>(data) + part * mesh_.plan().chunk_bytes, tally);
  }
}

void TcpCall::receive(const Message& message, void* data, Tally& tally) {
  for (size_t part = 0; part < parts(message.bytes); ++part) {
    receive_part(message, part, static_cast<std::byte*>(data) + part * mesh_.plan().chunk_bytes, tally);
  }
}

const FrameHeader* TcpCall::next_from(int peer) {
  const FrameHeader* header = endpoint_.connections().data(peer, 0).early();
  return header != nullptr && header->call == number() ? header : nullptr;
}

void TcpCall::expect(int peer, bool expected) {
  reach(peer);
  endpoint_.calls().set_expected(peer, expected);
}

void TcpCall::look(const std::vector<uint32_t>& absent) {
  const TcpMesh::Lock lock = mesh_.lock();
  endpoint_.progress();
  endpoint_.check();
  endpoint_.calls().set_absent(absent);
  if (half_over()) declare_waiting();
}

Culprits TcpCall::culprits(const std::vector<uint32_t>& ranks) {
  const TcpMesh::Lock lock = mesh_.lock();
  Culprits culprits = endpoint_.culprits(ranks);
  // Ranks on the nodes of the culprits know more of them, and may have said so meanwhile.
  endpoint_.progress();
  endpoint_.check();
  return culprits;
}

void TcpCall::time_out() {
  Culprits culprits = endpoint_.culprits(causes());
  if (culprits.names.empty()) culprits.names = "nobody that is known";
  // Ranks on the nodes of the culprits know more of them, and may have said so meanwhile.
  endpoint_.progress();
  endpoint_.raise(FailureKind::Timeout, timed_out(what(), facts_.deadline, mesh_.describe_self(), culprits));
}

void TcpCall::declare_waiting() {
  endpoint_.declare_waiting();
  awaited_.set(endpoint_.names_of(causes()));
}

void TcpCall::run(const std::function<bool()>& step) {
  // A nap for engines that move only when asked: too short for the system's socket timers.
  constexpr std::chrono::microseconds kMoment{50};
  const timeline::Phase phase("wire");
  const WaitPolicy policy = tcp_wait_policy();
  std::optional<Awake> awake(policy);
  Interrupts interrupts;
  bool over = false;
  TcpLateness& lateness = endpoint_.calls().lateness();
  lateness.set_idle(false);
  while (true) {
    const bool moved = endpoint_.progress();
    lateness.set_idle(!moved);
    // Peers may still need to hear that this rank was in the call, and it may not make another one for long.
    over = over || step();
    if (over && endpoint_.connections().flush_control()) break;
    endpoint_.check();
    const auto now = Clock::now();
    if (now >= facts_.deadline.at()) time_out();
    endpoint_.check_interrupts(lock_, interrupts, facts_.what);
    if (moved || endpoint_.connections().anything_ready()) {
      awake.emplace(policy);
      continue;
    }
    if (now >= facts_.deadline.half()) declare_waiting();
    // A rank that yields its core to threads that compute gets it back late; a rank that sleeps gets it as soon as
    // data is there.
    if (endpoint_.stay_awake(lock_, *awake)) continue;
    if (endpoint_.payloads() != nullptr && endpoint_.payloads()->needs_calls()) {
      const WithoutLock without(lock_);
      std::this_thread::sleep_for(kMoment);
    } else {
      endpoint_.sleep(lock_, std::min<Clock::duration>(facts_.deadline.at() - now, kLookAround));
    }
  }
  lateness.set_idle(false);
}

}  // namespace ours
