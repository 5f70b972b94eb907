#pragma once

#include <cstddef>

#include "common/deadline.h"
#include "common/options.h"
#include "transport/node/node_session.h"

namespace ours {

/// One rank's measurements of two ways to write what its peers read next: through the cache, or around it (non-temporal
/// stores). The way in use is timed whenever it is used, the other one now and then.
class WriteTimes {
 public:
  /// Whether the next piece goes around the cache, where `around` is the way in use.
  bool next(bool around, Clock::time_point now);

  /// What that piece cost. Only pieces of kTimedBytes or more tell anything.
  void took(size_t bytes, Clock::duration time);

  /// Whether this rank would have all go around the cache.
  bool around_is_faster() const { return around_is_faster_; }

  static constexpr size_t kTimedBytes = 32 * 1024;

 private:
  /// Of the last pieces the cheapest counts, as others were perhaps interrupted.
  static constexpr size_t kKept = 4;

  bool around_ = false;  ///< the way in use
  bool trying_ = false;  ///< the next piece tries the other one
  bool around_is_faster_ = false;
  double costs_[kKept] = {};  ///< ns per byte of the way in use
  size_t known_ = 0;          ///< costs entered since it came into use
  Clock::time_point next_try_{};
};

/// Writes into memory that peers read next, in the way that suits all ranks of a node.
///
/// While they are under one last-level cache, lines that stay in it are the faster ones. Where their cores have several
/// (a second socket, another core complex of one chip, or the virtual core that has just been moved there), each line
/// has to be fetched or taken back from the other cache, at a third of the speed or less; then it is faster to go
/// through memory. Virtual machines do not tell which is the case and it changes as they run, so it is measured. Some
/// ranks may see nothing of what their writes cost others: all go around the cache where one of them says so.
class SharedWrite {
 public:
  SharedWrite(NodeSession& session, Setting around);

  /// Looks what the peers say: at the beginning of a collective.
  void begin();

  void copy(void* to, const void* from, size_t bytes);

  /// For writes by other means: whether to go around the cache.
  bool around() const { return around_; }

 private:
  NodeSession& session_;
  Setting setting_;
  bool around_;
  WriteTimes times_;
};

}  // namespace ours
