#include "transport/tcp/tcp_endpoint.h"

#include <algorithm>

#include "common/error.h"
#include "common/listed.h"
#include "common/options.h"
#include "common/other_failures.h"
#include "common/printable.h"
#include "common/whole_characters.h"
#include "transport/roll_call.h"

namespace ours {

namespace {

/// A rank whose engine fails waits this long to hear of the death that caused it, so that it can name the rank that
/// died.
constexpr std::chrono::milliseconds kGrace{300};

FrameHeader header_of(FrameKind kind, uint64_t call) {
  FrameHeader header;
  header.kind = kind;
  header.call = call;
  return header;
}

}  // namespace

WaitPolicy tcp_wait_policy() {
  constexpr std::chrono::microseconds kAnswer{100};
  WaitPolicy policy;
  policy.awake = std::min(std::chrono::microseconds(options().yield_us), kAnswer);
  return policy;
}

TcpEndpoint::TcpEndpoint(Shared& shared, const TcpConfig& config, std::function<void()> on_failure)
    : shared_(shared),
      on_failure_(std::move(on_failure)),
      connections_(shared.self, config, shared.failure, poller_, *this, shared.card),
      propagation_(shared.failure, connections_, poller_, shared.self.rank, shared.self.size),
      calls_(shared.self.rank, shared.self.size) {}

void TcpEndpoint::set_engine(std::shared_ptr<Engine> engine, size_t least_bytes) {
  payloads_ = std::make_unique<TcpEnginePayloads>(std::move(engine), least_bytes);
}

void TcpEndpoint::reach(Lock& lock, int rank, Deadline deadline, const What& what) {
  if (connections_.is_needed(rank)) return;
  if (connections_.is_known(rank)) {
    connections_.need(rank);
  } else {
    connections_.need(rank, await_card(lock, rank, deadline, what));
  }
}

TcpCard TcpEndpoint::await_card(Lock& lock, int rank, Deadline deadline, const What& what) {
  Interrupts interrupts;
  const auto look_around = [&] {
    Lock held(*lock.mutex());
    progress();
    check();
    check_interrupts(held, interrupts, what);
  };
  std::string late;
  try {
    // The store may be slow to answer, or gone.
    const WithoutLock without(lock);
    return TcpCard::parse(shared_.keys->await(card_key(rank), deadline, look_around));
  } catch (const TimeoutError& e) {
    late = e.what();
  }
  shared_.failure.check();
  raise(FailureKind::Timeout, what() + ": Timed out waiting " + std::to_string(deadline.timeout().count()) + "ms on " +
                                  shared_.self.describe() + " for " + connections_.describe(rank) +
                                  ", which has not published its address (" + late +
                                  "). Was it started, and did it fail?");
}

bool TcpEndpoint::stay_awake(Lock& lock, Awake& awake) {
  // While another thread computes on this core, each yield would cost as much as that thread's whole turn.
  constexpr std::chrono::milliseconds kContended{50};
  const auto before = Clock::now();
  if (before < contended_until_) return false;
  bool stays = false;
  {
    const WithoutLock without(lock);
    stays = awake.moment([] { return false; });
  }
  const auto after = Clock::now();
  if (!stays && after - before > kForeignWork) contended_until_ = after + kContended;
  return stays;
}

void TcpEndpoint::check_interrupts(Lock& lock, Interrupts& interrupts, const What& what) {
  if (!interrupts.due()) return;
  std::string name;
  {
    const WithoutLock without(lock);
    name = interrupts.look();
  }
  if (!name.empty()) raise(FailureKind::System, describe_interrupt(shared_.self.describe(), name, "during " + what()));
}

// --- calls -----------------------------------------------------------------------------------------------------------

void TcpEndpoint::begin_call(const TcpCallState::Facts& facts) {
  shared_.failure.check();
  if (shared_.left.load()) throw Error("this rank has left the group");
  connections_.settle_congestion();
  calls_.begin(facts);
  try {
    // What came before this rank made its call has not been compared with anything yet.
    for (const int rank : connections_.met()) {
      for (size_t i = 0; i < connections_.data_streams(); ++i) {
        if (const FrameHeader* const early = connections_.data(rank, i).early()) check_data(rank, *early);
      }
    }
    for (const int rank : connections_.met()) raise_mismatch(rank, calls_.mismatch(rank));
  } catch (...) {
    calls_.end();
    throw;
  }
}

void TcpEndpoint::end_call(bool cut_off) noexcept {
  calls_.end();
  if (!cut_off && !shared_.failure.failed() && !shared_.left.load()) return;
  connections_.forget();
  if (payloads_) payloads_->forget();
}

bool TcpEndpoint::progress() {
  const bool moved = connections_.advance();
  return (payloads_ && payloads_->advance()) || moved;
}

void TcpEndpoint::check() {
  shared_.failure.check();
  if (shared_.left.load()) throw Error("this rank has left the group");
  for (const int rank : connections_.met()) connections_.check(rank, calls_.awaits(rank), calls_.expects(rank));
  connections_.check_links();
  if (payloads_ && payloads_->any()) check_payloads();
}

void TcpEndpoint::check_payloads() {
  // What a peer had sent before it left may still be on its way.
  constexpr std::chrono::seconds kFarewell{2};
  const auto now = Clock::now();
  for (const int rank : connections_.met()) {
    const auto left = connections_.left(rank);
    if (!left || !payloads_->waits_for(rank)) continue;
    if (now - std::max(*left, payloads_->last_moved(rank)) > kFarewell) lost(rank, connections_.absence(rank));
  }
  const std::optional<TcpEnginePayloads::Fault>& fault = payloads_->fault();
  if (!fault || now - fault->since < kGrace) return;
  raise(FailureKind::System, "the engine between nodes failed: " + fault->text + ' ' +
                                 connections_.describe(fault->peer) + calls_.during() + ": " + fault->why +
                                 "; noticed by " + shared_.self.describe() +
                                 ". The group cannot be used any more; make a new one");
}

bool TcpEndpoint::is_idle() const {
  return !calls_.is_under_way() && shared_.waiting.load() == 0 && !shared_.failure.failed() && !shared_.left.load() &&
         !(payloads_ && payloads_->any());
}

// --- what peers say --------------------------------------------------------------------------------------------------

void TcpEndpoint::check_data(int peer, const FrameHeader& header) {
  if (header.call > calls_.count()) return;  // for a call that this rank has yet to make
  if (!calls_.is_under_way(header.call)) garbage(peer, "it belongs to a call that is over");
  raise_mismatch(peer, calls_.mismatch(peer, header.call, header.signature));
  calls_.hear_stamp(header);
}

void TcpEndpoint::receive_by_engine(int peer, const FrameHeader& header, void* to, size_t* done) {
  if (!payloads_) garbage(peer, "data comes by an engine that this rank does not use");
  if (!payloads_->receive(peer, header.engine_number, to, header.bytes, done)) {
    garbage(peer, "its messages by the engine between nodes are not numbered in turn");
  }
}

void TcpEndpoint::hear(int rank, const FrameHeader& header, const std::string& payload) {
  if (header.kind == FrameKind::Failure) {
    const bool known = header.detail > static_cast<uint8_t>(FailureKind::None) &&
                       header.detail <= static_cast<uint8_t>(FailureKind::Aborted);
    record(known ? static_cast<FailureKind>(header.detail) : FailureKind::System,
           payload.empty() ? connections_.describe(rank) + " failed, and did not say why" : printable(payload));
  } else if (header.kind == FrameKind::Bye) {
    connections_.said_farewell(rank, printable(payload));
  } else if (header.kind == FrameKind::Park) {
    try {
      connections_.hear_park(rank, header, payload, is_idle());
    } catch (const Error&) {
      garbage(rank, "what it says of its connections");
    }
  } else {
    if (!calls_.hear(rank, header, payload)) garbage(rank, "it is too far ahead");
    raise_mismatch(rank, calls_.mismatch(rank));
  }
}

void TcpEndpoint::opened(int rank) {
  for (const TcpCallState::Refusal& refusal : calls_.own_refusals()) {
    connections_.control(rank).post_send(header_of(FrameKind::Refused, refusal.number), refusal.why);
  }
  connections_.control(rank).send_now();
}

void TcpEndpoint::garbage(int peer, const char* fault) {
  raise(FailureKind::System, connections_.describe(peer) + " sent " + shared_.self.describe() +
                                 " what makes no sense: " + fault + ". Do all ranks use one version of this package?");
}

// --- waiting ---------------------------------------------------------------------------------------------------------

std::vector<uint32_t> TcpEndpoint::causes() {
  std::vector<uint32_t> waited;
  for (const int rank : connections_.met()) {
    const bool waits = calls_.awaits(rank) || calls_.expects(rank) || connections_.has_posted(rank) ||
                       (payloads_ && payloads_->waits_for(rank));
    if (waits) waited.push_back(static_cast<uint32_t>(rank));
  }
  if (waited.empty()) {
    // All that is left is to tell a peer something.
    for (const int rank : connections_.met()) {
      if (connections_.owes_control(rank)) waited.push_back(static_cast<uint32_t>(rank));
    }
  }
  std::sort(waited.begin(), waited.end());
  return calls_.causes(waited);
}

void TcpEndpoint::declare_waiting() {
  const std::vector<uint32_t> now = causes();
  if (!calls_.declare(now)) return;
  tell_all(header_of(FrameKind::Waiting, calls_.count()),
           std::string(reinterpret_cast<const char*>(now.data()), now.size() * sizeof(uint32_t)));
}

void TcpEndpoint::tell_all(const FrameHeader& header, const std::string& payload) {
  connections_.for_each_control([&](int, TcpStream& control) {
    control.post_send(header, payload);
    control.send_now();
  });
}

std::string TcpEndpoint::names_of(const std::vector<uint32_t>& ranks) const {
  return listed(ranks, [this](uint32_t one) {
    const int rank = static_cast<int>(one);
    const std::string tried = connections_.tried(rank);
    return connections_.describe(rank) + (tried.empty() ? "" : " (tried " + tried + ")");
  });
}

std::string TcpEndpoint::call_roll(const std::vector<uint32_t>& ranks) const {
  std::vector<int> numbers;
  std::vector<AskedPeer> peers;
  for (const uint32_t one : ranks) {
    const int rank = static_cast<int>(one);
    const std::string card = rank == shared_.self.rank ? shared_.card.text() : shared_.keys->known(card_key(rank));
    if (card.empty() || numbers.size() == kMostAsked) continue;
    try {
      peers.push_back(TcpCard::parse(card).whereabouts);
      numbers.push_back(rank);
    } catch (const Error&) {
      // A failure is being reported already.
    }
  }
  return numbers.empty() ? "" : describe_roll(numbers, ask_tcp_whereabouts(peers));
}

// --- failures --------------------------------------------------------------------------------------------------------

void TcpEndpoint::fail(const std::exception_ptr& error) noexcept {
  try {
    std::string message;
    const FailureKind kind = kind_of(error, message);
    record(kind, message);
  } catch (const std::exception&) {
    // Out of memory: the thread that propagates the failure tries again.
  }
  if (shared_.failure.failed()) on_failure_();
}

void TcpEndpoint::record(FailureKind kind, const std::string& message) {
  shared_.failure.record(kind, message);
  if (!shared_.failure.failed()) return;
  propagation_.tell();
  on_failure_();
}

void TcpEndpoint::raise(FailureKind kind, const std::string& message) {
  record(kind, message);
  shared_.failure.check();
  throw Error(message);
}

void TcpEndpoint::raise_mismatch(int peer, const std::string& message) {
  if (message.empty()) return;
  const auto [first, second] = std::minmax({peer, shared_.self.rank});
  raise(FailureKind::Mismatch, message + call_roll({static_cast<uint32_t>(first), static_cast<uint32_t>(second)}));
}

void TcpEndpoint::lost(int rank, const std::string& how) {
  raise(FailureKind::Peer, lost_peer(connections_.describe(rank), how, calls_.during(), shared_.self.describe()) +
                               connections_.reason(rank));
}

void TcpEndpoint::refuse(uint64_t number, const std::string& why) {
  calls_.refuse(number, why.substr(0, whole_characters(why, kMaxFailureBytes)));
  tell_all(header_of(FrameKind::Refused, number), calls_.own_refusals().back().why);
}

void TcpEndpoint::propagate_failure(Lock& lock) {
  if (payloads_) payloads_->close();
  propagation_.run(lock, shared_.left);
  close();
}

void TcpEndpoint::say_farewell() noexcept {
  try {
    connections_.end_parking();
    tell_all(header_of(FrameKind::Bye, 0), failure_since(shared_.made));
  } catch (const std::exception&) {
    // Out of memory: peers see that this rank is gone.
  }
  close();
}

void TcpEndpoint::close() noexcept {
  if (payloads_) payloads_->close();
  connections_.close();
}

}  // namespace ours
