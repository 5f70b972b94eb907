#include "transport/tcp/tcp_call_state.h"

#include <algorithm>
#include <cstring>

#include "common/printable.h"

namespace ours {

namespace {

constexpr size_t kMostAgreements = 4096;
constexpr size_t kMostRefusals = 4;

}  // namespace

const TcpCallState::Peer& TcpCallState::peer(int rank) const {
  static const Peer kSilent;
  const auto found = peers_.find(rank);
  return found == peers_.end() ? kSilent : found->second;
}

void TcpCallState::begin(const Facts& facts) {
  ++count_;
  facts_ = &facts;
  lateness_.begin(facts.arrivals, facts.called);
  declared_.clear();
  absent_.clear();
  for (auto& [rank, peer] : peers_) peer.awaited = peer.expected = false;
}

std::string TcpCallState::mismatch(int peer, uint64_t call, const Signature& theirs) const {
  return is_under_way(call) && theirs != facts_->signature ? facts_->mismatch(peer, theirs) : "";
}

std::string TcpCallState::mismatch(int peer) const {
  if (facts_ == nullptr) return "";
  if (std::string why = refusal(peer, facts_->number); !why.empty()) return why;
  for (const Agreement& one : this->peer(peer).agreements) {
    if (std::string why = mismatch(peer, one.call, one.signature); !why.empty()) return why;
  }
  return "";
}

bool TcpCallState::hear(int rank, const FrameHeader& header, const std::string& payload) {
  Peer& peer = peers_[rank];
  switch (header.kind) {
    case FrameKind::Agree:
      // Each call has few rounds, and no peer can be far ahead of a rank that it must hear from.
      if (peer.agreements.size() >= kMostAgreements) return false;
      peer.agreements.push_back({header.call, header.part, header.signature, header.stop != 0});
      if (is_under_way(header.call)) lateness_.hear(header);
      break;
    case FrameKind::Refused:
      remember(rank, {header.call, printable(payload)});
      break;
    case FrameKind::Monitor:
      peer.monitor = std::max(peer.monitor, header.call);
      break;
    case FrameKind::Waiting: {
      peer.waiting_call = header.call;
      peer.causes.resize(payload.size() / sizeof(uint32_t));
      if (!payload.empty()) std::memcpy(peer.causes.data(), payload.data(), peer.causes.size() * sizeof(uint32_t));
      const auto is_no_rank = [this](uint32_t cause) { return cause >= static_cast<uint32_t>(size_); };
      peer.causes.erase(std::remove_if(peer.causes.begin(), peer.causes.end(), is_no_rank), peer.causes.end());
      break;
    }
    default:
      break;
  }
  return true;
}

bool TcpCallState::take_agreement(int rank, uint32_t round) {
  Peer& peer = peers_[rank];
  const auto found = std::find_if(peer.agreements.begin(), peer.agreements.end(),
                                  [&](const Agreement& one) { return one.call == count_ && one.round == round; });
  peer.awaited = found == peer.agreements.end();
  if (peer.awaited) return false;
  hear_stop(found->stop);
  peer.agreements.erase(found);
  return true;
}

void TcpCallState::remember(int rank, Refusal refusal) {
  std::vector<Refusal>& all = peers_[rank].refusals;
  if (all.size() == kMostRefusals) all.erase(all.begin());
  all.push_back(std::move(refusal));
}

std::string TcpCallState::refusal(int rank, uint64_t number) const {
  for (const Refusal& one : peer(rank).refusals) {
    if (one.number == number) return one.why;
  }
  return "";
}

std::vector<uint32_t> TcpCallState::causes(const std::vector<uint32_t>& waited) const {
  if (!absent_.empty()) return absent_;
  std::vector<uint32_t> found;
  for (const uint32_t rank : waited) {
    const Peer& other = peer(static_cast<int>(rank));
    if (other.waiting_call != count_) {
      found.push_back(rank);
    } else {
      found.insert(found.end(), other.causes.begin(), other.causes.end());
    }
  }
  found.erase(std::remove(found.begin(), found.end(), static_cast<uint32_t>(own_rank_)), found.end());
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  if (found.size() > kMaxCauses) found.resize(kMaxCauses);
  return found.empty() ? waited : found;
}

bool TcpCallState::declare(const std::vector<uint32_t>& causes) {
  if (causes == declared_) return false;
  declared_ = causes;
  return true;
}

}  // namespace ours
