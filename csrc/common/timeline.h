#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "common/interval.h"

// The timeline of a job, as a file for Perfetto or chrome://tracing.
//
// The format is the JSON array of Chrome's trace events, one event a line. Each process of a machine appends whole
// lines to the same file, and writes what it has several times a second, so the file is readable whatever dies and
// whenever; both viewers accept an array that does not end. A process of the viewers is a rank, and a track of theirs
// is a thread, or one of Track.

namespace ours::timeline {

namespace detail {
extern std::atomic<bool> recording;
}

/// Whether this process records its timeline. Costs a load.
inline bool is_on() { return detail::recording.load(std::memory_order_acquire); }

/// How many timelines this process has begun to record.
uint32_t session();

/// Starts to record into the file at `path`, which exists, as this rank. `offset_ns` is what the clock of this machine
/// is ahead of rank 0's. Throws InvalidArgument if the timeline is on, and SystemError if the file cannot be opened.
void start(const std::string& path, int rank, int64_t offset_ns);

/// Writes the rest, and stops. Does nothing if the timeline is off.
void stop() noexcept;

/// Writes what there is.
void flush() noexcept;

/// Tracks that are no threads.
enum Track : int64_t { kOwnThread = 0, kModelTrack = 1, kBucketTracks = 100 };

/// Something that lasted, by the steady clock. `arguments` are fields of a JSON object, without braces. Events of one
/// track must be nested or apart.
void add(const char* category, const std::string& name, Interval when, const std::string& arguments = "",
         int64_t track = kOwnThread);

/// Something that lasted and may overlap with others.
void add_overlapping(const char* category, const std::string& name, Interval when, const std::string& arguments = "");

/// Something that happened.
void mark(const char* category, const std::string& name, const std::string& arguments);

/// From `at_ns` on, the quantity has this value.
void count(const std::string& quantity, int64_t at_ns, double value);

void name_track(int64_t track, const std::string& name);

/// The text as a JSON string.
std::string quoted(const std::string& text);

/// What this thread does while the object lives, if that is long enough to be seen.
class Phase {
 public:
  explicit Phase(const char* name) : name_(name), began_(is_on() ? steady_ns() : -1) {}
  ~Phase() {
    if (began_ >= 0) end();
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  void end() noexcept;

  const char* const name_;
  const int64_t began_;
};

}  // namespace ours::timeline
