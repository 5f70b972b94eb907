#include "transport/node/core_spread.h"

#include <sched.h>

#include <algorithm>

#include "common/options.h"

namespace ours {

namespace {

constexpr std::chrono::milliseconds kShortestPause{4};
constexpr std::chrono::seconds kLongestPause{2};

}  // namespace

int better_core(const std::vector<int>& cores, int rank, const std::vector<int>& allowed,
                const std::function<int(int core)>& socket_of) {
  const auto on = [&](int core) { return std::count(cores.begin(), cores.end(), core); };
  const int mine = cores[static_cast<size_t>(rank)];
  const bool last = std::find(cores.begin() + rank + 1, cores.end(), mine) == cores.end();
  if (!last) return -1;
  const auto on_mine = on(mine);
  int best = -1, best_near = -1;
  for (const int core : allowed) {
    if (on_mine - on(core) < 2) continue;
    if (best < 0 || on(core) < on(best)) best = core;
    if (socket_of(core) == socket_of(mine) && (best_near < 0 || on(core) < on(best_near))) best_near = core;
  }
  return best_near >= 0 ? best_near : best;
}

bool move_to_core(int core) {
  cpu_set_t before;
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(core, &there);
  if (::sched_getaffinity(0, sizeof(before), &before) != 0) return false;
  if (::sched_setaffinity(0, sizeof(there), &there) != 0) return false;
  return ::sched_setaffinity(0, sizeof(before), &before) == 0;
}

void CoreSpread::publish(size_t place) {
  std::atomic<int32_t>& own = core(session_.rank(), place);
  const int here = ::sched_getcpu();
  // Stored only if it has changed, so that others that have read the line need not fetch it again.
  if (own.load(std::memory_order_relaxed) != here) own.store(here, std::memory_order_relaxed);
}

CoreSpread::CoreSpread(NodeSession& session) : session_(session) {
  const auto cores = static_cast<int>(std::max<size_t>(1, allowed_cores().size()));
  fair_ = options().spread ? (session.size() + cores - 1) / cores : session.size();
}

bool CoreSpread::settle(size_t place) {
  const auto now = Clock::now();
  if (now < next_) return false;
  next_ = now + kShortestPause;
  const int mine = core_of(session_.rank(), place);
  if (mine < 0) return false;  // another thread of this rank has just withdrawn it
  int crowd = 0;
  for (int r = 0; r < session_.size(); ++r) {
    if (core_of(r, place) != mine) continue;
    if (r > session_.rank()) return false;  // if any rank moves, it is that one
    ++crowd;
  }
  if (crowd <= fair_) return false;
  // Whether or not there is a better place, the system is asked again only after a pause.
  const bool undone = moved_ && now < proven_;
  pause_ = undone ? std::min<Clock::duration>(2 * pause_, kLongestPause) : Clock::duration(kShortestPause);
  next_ = now + pause_;
  proven_ = next_ + 4 * pause_;
  std::vector<int> cores(static_cast<size_t>(session_.size()));
  for (int r = 0; r < session_.size(); ++r) cores[static_cast<size_t>(r)] = core_of(r, place);
  const int better = better_core(cores, session_.rank(), allowed_cores(), socket_of);
  moved_ = better >= 0 && move_to_core(better);
  return moved_;
}

}  // namespace ours
