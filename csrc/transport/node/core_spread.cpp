#include "transport/node/core_spread.h"

#include <sched.h>

#include <algorithm>

#include "common/options.h"

namespace ours {

namespace {

constexpr std::chrono::milliseconds kShortestPause{4};
constexpr std::chrono::seconds kLongestPause{2};

}  // namespace

int better_core(const std::vector<int>& cores, int rank, const std::vector<int>& allowed) {
  const auto on = [&](int core) { return std::count(cores.begin(), cores.end(), core); };
  const int mine = cores[static_cast<size_t>(rank)];
  const bool last = std::find(cores.begin() + rank + 1, cores.end(), mine) == cores.end();
  if (!last || allowed.empty()) return -1;
  const int best = *std::min_element(allowed.begin(), allowed.end(), [&](int a, int b) { return on(a) < on(b); });
  return on(mine) - on(best) >= 2 ? best : -1;
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

void CoreSpread::publish(size_t parity) {
  std::atomic<int32_t>& place = place_(session_.self(), parity);
  const int core = ::sched_getcpu();
  // Others may have the line, which they need not fetch again.
  if (place.load(std::memory_order_relaxed) != core) place.store(core, std::memory_order_relaxed);
}

CoreSpread::CoreSpread(NodeSession& session, Place place) : session_(session), place_(place) {
  const auto cores = static_cast<int>(std::max<size_t>(1, allowed_cores().size()));
  fair_ = options().spread ? (session.size() + cores - 1) / cores : session.size();
}

bool CoreSpread::settle(size_t parity) {
  const auto now = Clock::now();
  if (now < next_) return false;
  next_ = now + kShortestPause;
  const int mine = core_of(session_.rank(), parity);
  int crowd = 0;
  for (int r = 0; r < session_.size(); ++r) {
    if (core_of(r, parity) != mine) continue;
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
  for (int r = 0; r < session_.size(); ++r) cores[static_cast<size_t>(r)] = core_of(r, parity);
  const int core = better_core(cores, session_.rank(), allowed_cores());
  moved_ = core >= 0 && move_to_core(core);
  return moved_;
}

}  // namespace ours
