#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/profiling.h"

namespace ours {

/// Whom a group's entries in PyTorch's FlightRecorder are of.
struct FlightGroup {
  int rank;
  std::vector<uint64_t> global_ranks;  ///< by rank in the group; empty: unknown
};

/// Writes the operations of one group into PyTorch's FlightRecorder, from which they are dumped after a failure and by
/// torch's own calls. PyTorch would do it for us with hooks around each call, but they cost more than a small
/// all-reduce does.
class FlightLog {
 public:
  /// Names an entry until its operation ends.
  struct Entry {
    size_t id;
    size_t epoch;
    uint64_t sequence;
  };

  /// Null where this PyTorch has no such recorder for backends outside it, or its user has switched it off.
  static std::unique_ptr<FlightLog> make(const FlightGroup& group);

  virtual ~FlightLog() = default;

  /// Notes that an operation is issued, with the stack of the calling thread (which takes the GIL for a moment).
  virtual std::optional<Entry> issued(const CallTrace& call, std::chrono::milliseconds timeout) = 0;

  /// Notes that it begins to run, and that it has ended well. What fails or hangs stays as it is.
  virtual void started(const Entry& entry) = 0;
  virtual void completed(const Entry& entry, float duration_ms) = 0;

  /// Writes the trace to the file of the user's choice (TORCH_FR_DUMP_TEMP_FILE), once in a process.
  virtual void dump() = 0;
};

/// Whether FlightLog::make can ever give anything with this PyTorch.
bool records_flights();

}  // namespace ours
