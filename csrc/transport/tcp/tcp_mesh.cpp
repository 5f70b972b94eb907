#include "transport/tcp/tcp_mesh.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/background_thread.h"
#include "common/descriptors.h"
#include "common/error.h"
#include "common/listed.h"
#include "common/options.h"
#include "common/own_name.h"

namespace ours {

namespace {

/// Within this time a mesh whose engine fails hears of the death that caused it, and can name the rank.
constexpr std::chrono::milliseconds kGrace{300};

TcpSelf self_of(int rank, int size, int pid) {
  TcpSelf self;
  self.rank = rank;
  self.size = size;
  self.host = host_name().substr(0, kHostBytes - 1);
  self.pid = pid;
  return self;
}

void tell_refusal(TcpStream& control, const TcpCallState::Refusal& refusal) {
  FrameHeader header;
  header.kind = FrameKind::Refused;
  header.call = refusal.number;
  control.post_send(header, refusal.why);
  control.send_now();
}

}  // namespace

WaitPolicy tcp_wait_policy() {
  constexpr std::chrono::microseconds kAnswer{100};
  WaitPolicy policy;
  policy.awake = std::min(std::chrono::microseconds(options().yield_us), kAnswer);
  return policy;
}

// --- joining ---------------------------------------------------------------------------------------------------------

TcpMesh::TcpMesh(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config)
    : self_(self_of(rank, size, owner_.pid())),
      plan_(config.plan),
      card_{self_.host, self_.pid, machine_id(), {}},
      keys_(std::move(keys)),
      connections_(self_, config, failure_, poller_, *this, card_),
      propagation_(failure_, connections_, poller_, rank, size),
      calls_(rank) {}

std::shared_ptr<TcpMesh> TcpMesh::join(int rank, int size, std::shared_ptr<KeyValues> keys, const TcpConfig& config,
                                       Deadline deadline) {
  const std::shared_ptr<TcpMesh> mesh(new TcpMesh(rank, size, std::move(keys), config));
  if (rank == 0) mesh->keys_->set(kTermsKey, TcpTerms{draw_nonce(), config.plan}.text());
  mesh->keys_->set(card_key(rank), mesh->card_.text());
  const TcpTerms terms = TcpTerms::parse(mesh->keys_->get(kTermsKey, deadline));
  mesh->self_.secret = terms.secret;
  mesh->self_.streams = terms.plan.streams + 1;
  mesh->plan_ = terms.plan;
  want_descriptors(mesh->self_.most_connections());
  return mesh;
}

TcpMesh::~TcpMesh() {
  leave();
  // What an engine has, its threads among it, stayed with the process that made it.
  [[maybe_unused]] const TcpEnginePayloads* parents = in_child() ? payloads_.release() : nullptr;
}

void TcpMesh::set_engine(std::shared_ptr<Engine> engine, size_t least_bytes) {
  engine->set_waker([this] { wake(); });
  const Lock lock(mutex_);
  payloads_ = std::make_unique<TcpEnginePayloads>(std::move(engine), least_bytes);
}

void TcpMesh::introduce(std::vector<std::string> names) {
  const Lock lock(mutex_);
  connections_.introduce(std::move(names));
}

size_t TcpMesh::connections() {
  const Lock lock(mutex_);
  return connections_.count();
}

void TcpMesh::reach(Lock& lock, int rank, Deadline deadline, const What& what) {
  if (connections_.is_needed(rank)) return;
  if (connections_.is_complete(rank)) {
    connections_.need(rank);
  } else {
    connections_.need(rank, await_card(lock, rank, deadline, what));
  }
}

TcpCard TcpMesh::await_card(Lock& lock, int rank, Deadline deadline, const What& what) {
  Interrupts interrupts;
  const auto look_around = [&] {
    Lock held(mutex_);
    progress();
    check();
    check_interrupts(held, interrupts, what);
  };
  std::string late;
  try {
    // The store may be slow to answer, or gone.
    const WithoutLock without(lock);
    return TcpCard::parse(keys_->await(card_key(rank), deadline, look_around));
  } catch (const TimeoutError& e) {
    late = e.what();
  }
  failure_.check();
  raise(FailureKind::Timeout, what() + ": Timed out waiting " + std::to_string(deadline.timeout().count()) + "ms on " +
                                  describe_self() + " for " + describe(rank) +
                                  ", which has not published its address (" + late +
                                  "). Was it started, and did it fail?");
}

// --- calls -----------------------------------------------------------------------------------------------------------

void TcpMesh::check_usable() const {
  if (in_child()) {
    throw Error("this process (pid " + std::to_string(::getpid()) +
                ") was forked from the one that joined the group (" + describe_self() + ") and has no part in it");
  }
  failure_.check();
  if (has_left()) throw Error(describe_self() + " has left the group");
}

void TcpMesh::begin_call(const TcpCallState::Facts& facts) {
  failure_.check();
  if (has_left()) throw Error("this rank has left the group");
  if (lets_connect_) wake();
  connections_.settle_congestion();
  calls_.begin(facts);
  try {
    // What came before this rank made its call has not been compared with anything yet.
    for (const int rank : met()) {
      for (size_t i = 0; i < connections_.data_streams(); ++i) {
        if (const FrameHeader* const early = data(rank, i).early()) check_data(rank, *early);
      }
    }
    raise_mismatch(calls_.mismatch());
  } catch (...) {
    calls_.end();
    throw;
  }
}

void TcpMesh::end_call(bool cut_off) noexcept {
  calls_.end();
  if (!cut_off && !failure_.failed() && !has_left()) return;
  connections_.forget();
  if (payloads_) payloads_->forget();
}

bool TcpMesh::progress() {
  const bool moved = connections_.advance();
  return (payloads_ && payloads_->advance()) || moved;
}

void TcpMesh::look() noexcept {
  if (failure_.failed() || has_left() || in_child()) return;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || calls_.is_under_way() || has_left()) return;
  try {
    progress();
    check_peers();
  } catch (const std::exception&) {
    fail_now(std::current_exception());
  }
}

void TcpMesh::check() {
  failure_.check();
  if (has_left()) throw Error("this rank has left the group");
  check_peers();
}

void TcpMesh::check_peers() {
  for (const int rank : met()) connections_.check(rank, calls_.awaits(rank), calls_.expects(rank));
  if (payloads_ && payloads_->any()) check_payloads();
}

void TcpMesh::check_payloads() {
  // What a peer had sent before it left may still be on its way.
  constexpr std::chrono::seconds kFarewell{2};
  const auto now = Clock::now();
  for (const int rank : met()) {
    const auto left = connections_.left(rank);
    if (!left || !payloads_->waits_for(rank)) continue;
    if (now - std::max(*left, payloads_->last_moved(rank)) > kFarewell) lost(rank, absence(rank));
  }
  const std::optional<TcpEnginePayloads::Fault>& fault = payloads_->fault();
  if (!fault || now - fault->since < kGrace) return;
  raise(FailureKind::System, "the engine between nodes failed: " + fault->text + ' ' + describe(fault->peer) +
                                 calls_.during() + ": " + fault->why + "; noticed by " + describe_self() +
                                 ". The group cannot be used any more; make a new one");
}

bool TcpMesh::stay_awake(Lock& lock, Awake& awake) {
  // While somebody else computes on this core, a yield would cost as much as the other's whole turn, each time.
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

void TcpMesh::check_interrupts(Lock& lock, Interrupts& interrupts, const What& what) {
  if (!interrupts.due()) return;
  std::string name;
  {
    const WithoutLock without(lock);
    name = interrupts.look();
  }
  if (!name.empty()) raise(FailureKind::System, describe_interrupt(describe_self(), name, "during " + what()));
}

// --- what peers say --------------------------------------------------------------------------------------------------

void TcpMesh::check_data(int peer, const FrameHeader& header) {
  if (header.call > calls_.count()) return;  // of a call that this rank has yet to make
  if (!calls_.is_under_way(header.call)) garbage(peer, "it belongs to a call that is over");
  raise_mismatch(calls_.mismatch(peer, header.call, header.signature));
}

void TcpMesh::receive_by_engine(int peer, const FrameHeader& header, void* to, size_t* done) {
  if (!payloads_) garbage(peer, "data comes by an engine that this rank does not use");
  if (!payloads_->receive(peer, header.engine_number, to, header.bytes, done)) {
    garbage(peer, "its messages by the engine between nodes are not numbered in turn");
  }
}

void TcpMesh::hear(int rank, const FrameHeader& header, const std::string& payload) {
  switch (header.kind) {
    case FrameKind::Failure: {
      const bool known = header.detail > static_cast<uint8_t>(FailureKind::None) &&
                         header.detail <= static_cast<uint8_t>(FailureKind::Aborted);
      record(known ? static_cast<FailureKind>(header.detail) : FailureKind::System, payload);
      break;
    }
    case FrameKind::Bye:
      connections_.said_farewell(rank);
      break;
    case FrameKind::Agree:
      if (!calls_.hear_agreement(rank, header)) garbage(rank, "it is too far ahead");
      raise_mismatch(calls_.mismatch(rank, header.call, header.signature));
      break;
    case FrameKind::Refused:
      calls_.hear_refusal(rank, {header.call, payload});
      raise_mismatch(calls_.refusal_of(rank));
      break;
    case FrameKind::Monitor:
      calls_.hear_monitor(rank, header.call);
      break;
    case FrameKind::Waiting: {
      std::vector<uint32_t> causes(payload.size() / sizeof(uint32_t));
      std::memcpy(causes.data(), payload.data(), causes.size() * sizeof(uint32_t));
      const auto is_no_rank = [this](uint32_t cause) { return cause >= static_cast<uint32_t>(size()); };
      causes.erase(std::remove_if(causes.begin(), causes.end(), is_no_rank), causes.end());
      calls_.hear_waiting(rank, header.call, std::move(causes));
      break;
    }
    case FrameKind::Data:
      break;  // fault_of() lets none pass
  }
}

void TcpMesh::opened(int rank) {
  for (const TcpCallState::Refusal& refusal : calls_.own_refusals()) tell_refusal(control(rank), refusal);
}

void TcpMesh::garbage(int peer, const char* fault) {
  raise(FailureKind::System, describe(peer) + " sent " + describe_self() + " what makes no sense: " + fault +
                                 ". Do all ranks use one version of this package?");
}

// --- waiting ---------------------------------------------------------------------------------------------------------

std::vector<uint32_t> TcpMesh::causes() {
  std::vector<uint32_t> waited;
  for (const int rank : met()) {
    const bool waits = calls_.awaits(rank) || calls_.expects(rank) || connections_.has_posted(rank) ||
                       (payloads_ && payloads_->waits_for(rank));
    if (waits) waited.push_back(static_cast<uint32_t>(rank));
  }
  std::sort(waited.begin(), waited.end());
  return calls_.causes(waited);
}

void TcpMesh::declare_waiting() {
  const std::vector<uint32_t> now = causes();
  if (!calls_.declare(now)) return;
  FrameHeader header;
  header.kind = FrameKind::Waiting;
  header.call = calls_.count();
  const std::string payload(reinterpret_cast<const char*>(now.data()), now.size() * sizeof(uint32_t));
  connections_.for_each_control([&](int, TcpStream& control) {
    control.post_send(header, payload);
    control.send_now();
  });
}

std::string TcpMesh::names_of(const std::vector<uint32_t>& ranks) const {
  return listed(ranks, [this](uint32_t one) {
    const int rank = static_cast<int>(one);
    const std::string tried = connections_.tried(rank);
    return describe(rank) + (tried.empty() ? "" : " (tried " + tried + ")");
  });
}

// --- failures --------------------------------------------------------------------------------------------------------

void TcpMesh::share_failures(const std::shared_ptr<TcpMesh>& a, const std::shared_ptr<TcpMesh>& b) {
  const auto tell = [](const std::shared_ptr<TcpMesh>& from, const std::shared_ptr<TcpMesh>& to) {
    from->failure_.set_listener([weak = std::weak_ptr<TcpMesh>(to)](FailureKind kind, const std::string& message) {
      if (const auto mesh = weak.lock()) mesh->fail(kind, message);
    });
  };
  tell(a, b);
  tell(b, a);
}

void TcpMesh::fail(FailureKind kind, const std::string& message) noexcept {
  if (has_left() || in_child() || !failure_.record(kind, message)) return;
  wake();
  propagate_failure();
}

void TcpMesh::fail_now(const std::exception_ptr& error) noexcept {
  try {
    std::string message;
    const FailureKind kind = TcpFailure::kind_of(error, message);
    record(kind, message);
  } catch (const std::exception&) {
    // Out of memory: the thread that propagates the failure tries again.
  }
  if (failure_.failed()) propagate_failure();
}

void TcpMesh::record(FailureKind kind, const std::string& message) {
  failure_.record(kind, message);
  if (!failure_.failed()) return;
  propagation_.tell();
  propagate_failure();
}

void TcpMesh::raise(FailureKind kind, const std::string& message) {
  record(kind, message);
  failure_.check();
  throw Error(message);
}

void TcpMesh::raise_mismatch(const std::string& message) {
  if (!message.empty()) raise(FailureKind::Mismatch, message);
}

void TcpMesh::lost(int rank, const std::string& how) {
  raise(FailureKind::Peer, describe(rank) + ' ' + how + calls_.during() + "; noticed by " + describe_self() +
                               ". The group cannot be used any more; make a new one without it");
}

bool TcpMesh::is_done_with(int rank) const { return propagation_.has_told(rank); }

void TcpMesh::propagate_failure() noexcept {
  if (propagating_.exchange(true)) return;
  try {
    start_background_thread("ours-failure", [self = shared_from_this()] {
      Lock lock(self->mutex_);
      if (self->payloads_) self->payloads_->close();
      self->propagation_.run(lock, self->left_);
      self->close_all();
    });
  } catch (const std::exception&) {
    // Without the thread, ranks that come later find that nobody answers.
    propagating_.store(false);
  }
}

void TcpMesh::refuse(uint64_t number, const std::string& why) noexcept {
  if (in_child() || has_left() || failure_.failed()) return;
  try {
    const Lock lock(mutex_);
    const TcpCallState::Refusal refusal{number, why.substr(0, kMaxFailureBytes)};
    calls_.hear_refusal(rank(), refusal);
    connections_.for_each_control([&](int, TcpStream& control) { tell_refusal(control, refusal); });
    refused_after_ = calls_.count();
    if (lets_connect_) return;
    start_background_thread("ours-refusal", [self = shared_from_this()] { self->let_peers_connect(); });
    lets_connect_ = true;
  } catch (const std::exception&) {
    // Peers that are not connected yet hear of it with this rank's next call, or at their deadline.
  }
}

// While this rank moves nothing, nobody can connect, and those that wait for it would do so in vain.
void TcpMesh::let_peers_connect() {
  constexpr std::chrono::milliseconds kSlice{500};
  Lock lock(mutex_);
  try {
    while (calls_.count() == refused_after_ && !has_left() && !failure_.failed()) {
      progress();
      flush_control();
      sleep(lock, kSlice);
    }
  } catch (const std::exception&) {
    // The next call finds out again what is wrong with a connection.
  }
  lets_connect_ = false;
  wake();  // it may have taken an event that another thread waits for
}

void TcpMesh::leave() noexcept {
  if (in_child() || left_.exchange(true)) return;
  wake();
  // The thread that has just recorded a failure may not have come to this yet.
  if (failure_.failed()) propagate_failure();
  if (propagating_.load()) return;
  const Lock lock(mutex_);
  FrameHeader header;
  header.kind = FrameKind::Bye;
  try {
    connections_.for_each_control([&](int, TcpStream& control) {
      control.post_send(header, std::string());
      control.send_now();
    });
  } catch (const std::exception&) {
    // Out of memory: peers see that this rank is gone.
  }
  close_all();
}

void TcpMesh::close_all() noexcept {
  if (payloads_) payloads_->close();
  connections_.close();
}

}  // namespace ours
