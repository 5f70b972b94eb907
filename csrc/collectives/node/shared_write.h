#pragma once

#include <cstddef>

#include "common/deadline.h"
#include "common/options.h"
#include "transport/node/node_session.h"

namespace ours {

/// One rank's measurements of two ways to write what its peers read next: through the cache, or around it
/// (non-temporal stores). The way in use is timed whenever it is used, the other one is tried now and then. time() does
/// both steps; they are apart for tests with a clock of their own.
class WriteTimes {
 public:
  /// Whether the next piece goes around the cache, if `around` is the way in use.
  bool next(bool around, Clock::time_point now);

  /// Records what that piece, of kTimedBytes or more, cost.
  void took(size_t bytes, Clock::duration time);

  /// Calls write(whether to go around the cache) for a piece, and times it if the setting is Auto.
  template <class Write>
  void time(Setting setting, bool around, size_t bytes, Write&& write) {
    // Shorter pieces tell nothing, and are not worth the fence that ends non-temporal stores.
    if (bytes < kTimedBytes) return write(false);
    if (setting != Setting::Auto) return write(setting == Setting::On);
    const Clock::time_point begin = Clock::now();
    write(next(around, begin));
    took(bytes, Clock::now() - begin);
  }

  /// Whether the way around the cache was found to be faster.
  bool around_is_faster() const { return around_is_faster_; }

  static constexpr size_t kTimedBytes = 32 * 1024;

 private:
  /// The cheapest of the last pieces counts, since others may have been interrupted.
  static constexpr size_t kKept = 4;

  bool around_ = false;      ///< the way in use
  size_t since_try_ = 0;     ///< bytes that have gone that way since the other one was tried
  size_t to_try_ = 0;        ///< bytes, the next ones, that try the other one
  double cheapest_try_ = 0;  ///< ns per byte of the cheapest piece of them
  bool around_is_faster_ = false;
  double costs_[kKept] = {};  ///< ns per byte of the way in use
  size_t known_ = 0;          ///< costs entered since it came into use, or since the last try
  Clock::time_point next_try_{};
};

/// Writes into memory that peers read next, in the way that suits all ranks of a node.
///
/// If all ranks share one last-level cache, it is faster to let the lines stay in it. If their cores have several such
/// caches, each line has to be fetched from the other cache, and it is up to three times as fast to go through memory.
/// Virtual machines do not tell which is the case, and it changes as they run, so it is measured. All ranks go around
/// the cache if one of them says so, since some may not see what their writes cost others.
class SharedWrite {
 public:
  SharedWrite(NodeSession& session, Setting around);

  /// Reads what the peers say, at the beginning of a collective.
  void begin();

  void copy(void* to, const void* from, size_t bytes);

  /// Whether to go around the cache, for writes by other means.
  bool around() const { return around_; }

 private:
  NodeSession& session_;
  Setting setting_;
  bool around_;
  WriteTimes times_;
};

}  // namespace ours
