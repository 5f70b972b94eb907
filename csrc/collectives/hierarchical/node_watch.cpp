#include "collectives/hierarchical/node_watch.h"

#include <algorithm>
#include <utility>

#include "common/listed.h"

namespace ours {

NodeWatch::NodeWatch(const NodeMap& map, std::shared_ptr<NodeSession> session)
    : map_(map), session_(std::move(session)) {
  session_->widen(map_.members());
  session_->set_lookout(this);
}

NodeWatch::~NodeWatch() { session_->set_lookout(nullptr); }

void NodeWatch::look_at_node() {
  session_->failure().check();
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLookAround / 2;
  for (int r = 0; r < session_->size(); ++r) {
    const char* why = r == map_.local() ? nullptr : session_->absence(r);
    if (why != nullptr) session_->lost(r, why, call_->what());
  }
  if (call_->half_over()) publish_causes();
}

void NodeWatch::publish_causes() {
  const std::vector<uint32_t> causes = call_->causes();
  RankBlock& self = session_->self();
  for (size_t i = 0; i < kMostBlamed; ++i) {
    self.blamed[i].store(i < causes.size() ? static_cast<int32_t>(causes[i]) : -1, std::memory_order_relaxed);
  }
  // Release: a peer that reads this number reads the list, or a newer one.
  self.blame_call.store(call_->number(), std::memory_order_release);
}

std::vector<uint32_t> NodeWatch::causes_of(const std::vector<int>& absent) const {
  std::vector<uint32_t> causes;
  for (const int r : absent) {
    const RankBlock& peer = session_->block(r);
    const size_t known = causes.size();
    if (call_ != nullptr && peer.blame_call.load(std::memory_order_acquire) == call_->number()) {
      for (const auto& blamed : peer.blamed) {
        const int32_t rank = blamed.load(std::memory_order_relaxed);
        if (rank < 0 || rank >= map_.size()) break;
        if (rank != map_.rank()) causes.push_back(static_cast<uint32_t>(rank));
      }
    }
    if (causes.size() == known) causes.push_back(static_cast<uint32_t>(session_->number_of(r)));
  }
  std::sort(causes.begin(), causes.end());
  causes.erase(std::unique(causes.begin(), causes.end()), causes.end());
  return causes;
}

void NodeWatch::look_around(const std::vector<int>& absent) {
  if (call_ != nullptr) call_->look(causes_of(absent));
}

Culprits NodeWatch::culprits(const std::vector<int>& absent) {
  std::vector<int> here;
  std::vector<uint32_t> elsewhere;
  for (const uint32_t rank : causes_of(absent)) {
    const int number = static_cast<int>(rank);
    if (map_.node_of(number) == map_.here()) {
      here.push_back(map_.local_rank_of(number));
    } else {
      elsewhere.push_back(rank);
    }
  }
  Culprits culprits{listed(here, [this](int r) { return session_->describe(r); }), session_->call_roll(here)};
  if (elsewhere.empty() || call_ == nullptr) return culprits;
  const Culprits others = call_->culprits(elsewhere);
  culprits.names += (culprits.names.empty() ? "" : ", ") + others.names;
  culprits.places += others.places;
  return culprits;
}

}  // namespace ours
