#include "collectives/straggler_ledger.h"

#include <algorithm>
#include <utility>

#include "common/interval.h"

namespace ours {

namespace {

constexpr int64_t kMarkEvery = 30'000'000;

template <class T>
std::vector<T> difference(std::vector<T> a, const std::vector<T>& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) a[i] -= b[i];
  return a;
}

}  // namespace

StragglerTally StragglerTally::since(const StragglerTally& earlier) const {
  StragglerTally rest;
  rest.elapsed = elapsed - earlier.elapsed;
  rest.blocked = blocked - earlier.blocked;
  rest.calls = calls - earlier.calls;
  rest.bytes = bytes - earlier.bytes;
  rest.late = difference(late, earlier.late);
  rest.last = difference(last, earlier.last);
  return rest;
}

StragglerLedger::StragglerLedger(int rank, int size) : rank_(rank), arrivals_(size), leads_(static_cast<size_t>(size)) {
  total_.late.resize(leads_.size());
  total_.last.resize(leads_.size());
}

void StragglerLedger::add(const Entry& call) {
  const int64_t called = steady_us(call.called);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (total_.calls == 0) began_ = called;
  ++total_.calls;
  total_.bytes += call.bytes;
  const int slowest = arrivals_.last();
  const int next = arrivals_.last(slowest);
  if (next >= 0) {
    ++total_.last[static_cast<size_t>(slowest)];
    // What happened before this rank's first call is not part of the time that is counted.
    const int64_t others = std::max(called + arrivals_.at(next), began_);
    update_leads(static_cast<size_t>(slowest), called + arrivals_.at(slowest), others);
  }
  ended_ = steady_us(call.ended);
  total_.elapsed = ended_ - began_;
  if (call.made != 0) spend(ended_ - called, call.made);
  if (total_.elapsed - marks_[1].elapsed < kMarkEvery) return;
  marks_[0] = std::move(marks_[1]);
  marks_[1] = total_;
}

void StragglerLedger::waited(Clock::duration time, uint64_t made) {
  const int64_t blocked = std::chrono::duration_cast<std::chrono::microseconds>(time).count();
  if (blocked == 0 && !leading_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  spend(blocked, made);
}

void StragglerLedger::spend(int64_t blocked, uint64_t made) {
  total_.blocked += blocked;
  if (!leading_) return;
  bool leads = false;
  for (size_t r = 0; r < leads_.size(); ++r) {
    // This rank never waits for itself. Those that wait for it would have gone on sooner, and then it would, too. They
    // wait until the last call that is under way has ended.
    const int64_t own = made == total_.calls ? leads_[r] : 0;
    const int64_t saved = static_cast<int>(r) == rank_ ? own : std::min(leads_[r], blocked);
    total_.late[r] += saved;
    leads_[r] -= saved;
    leads = leads || leads_[r] != 0;
  }
  leading_ = leads;
}

void StragglerLedger::update_leads(size_t slowest, int64_t last, int64_t others) {
  const int64_t begin = std::max(ended_, last);
  const int64_t lead = begin - std::max(ended_ - leads_[slowest], others);
  if (leading_) {
    for (int64_t& other : leads_) other = begin - std::max(ended_ - other, last);
  }
  leads_[slowest] = lead;
  if (lead > 0) leading_ = true;
}

StragglerTally StragglerLedger::total() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

StragglerTally StragglerLedger::recent() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return total_.since(marks_[0]);
}

}  // namespace ours
