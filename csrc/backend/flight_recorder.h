#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backend/profiling.h"

namespace ours {

/// The group to which entries in PyTorch's FlightRecorder belong.
struct FlightGroup {
  int rank;
  std::vector<uint64_t> global_ranks;  ///< by rank in the group; empty if unknown
};

/// Writes the operations of a group into PyTorch's FlightRecorder, which is dumped after a failure or on request.
/// PyTorch could do that with its hooks around each call, but they cost more than a small all-reduce.
class FlightLog {
 public:
  /// Identifies an entry until its operation ends.
  struct Entry {
    size_t id;
    size_t epoch;
    uint64_t sequence;
  };

  /// Returns null if this PyTorch has no such recorder for backends outside it, or the user has switched it off.
  static std::unique_ptr<FlightLog> make(const FlightGroup& group);

  virtual ~FlightLog() = default;

  /// Records that an operation is issued, with the calling thread's stack (which takes the GIL for a moment).
  virtual std::optional<Entry> issued(const CallTrace& call, std::chrono::milliseconds timeout) = 0;

  /// Record that the operation begins to run, and that it has succeeded. One that fails or hangs stays as it is.
  virtual void started(const Entry& entry) = 0;
  virtual void completed(const Entry& entry, float duration_ms) = 0;

  /// Writes the trace to the file of the user's choice (TORCH_FR_DUMP_TEMP_FILE), once in a process.
  virtual void dump() = 0;
};

/// Sets the function that is called before (true) and after (false) a trace is written. A warning says what it throws.
void set_around_dump(void (*around)(bool begins));

/// Whether this PyTorch has what FlightLog::make needs.
bool records_flights();

}  // namespace ours
