#include "common/timeline.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "common/error.h"
#include "common/fd.h"
#include "common/own_name.h"

namespace ours::timeline {

namespace detail {
std::atomic<bool> recording{false};
}

namespace {

constexpr int64_t kLongestUnwritten = 250'000'000;  // nanoseconds
constexpr size_t kMostUnwritten = 64 * 1024;
constexpr int64_t kShortestPhase = 1'000;  // nanoseconds

struct Recorder {
  std::mutex mutex;
  Fd file;  // guarded by mutex, as are all below but what is atomic
  std::string unwritten;
  int64_t written_at = 0;
  int rank = 0;
  int64_t offset_ns = 0;
  std::atomic<uint32_t> session{0};  ///< the number of the start, by which threads know that they have yet to be named
  std::atomic<uint64_t> overlapping{0};

  void write_all() {
    if (!file.valid()) return;
    size_t done = 0;
    while (done < unwritten.size()) {
      const ssize_t wrote = ::write(file.get(), unwritten.data() + done, unwritten.size() - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) break;  // the disk is full, say: the training goes on without these events
      done += static_cast<size_t>(wrote);
    }
    unwritten.clear();
    written_at = steady_ns();
  }

  void add_line(const std::string& line) {
    if (!file.valid()) return;
    unwritten += line;
    unwritten += ",\n";
    if (unwritten.size() >= kMostUnwritten || steady_ns() - written_at >= kLongestUnwritten) write_all();
  }
};

Recorder& recorder() {
  static Recorder* const one = new Recorder;  // threads may still record when the process ends
  return *one;
}

/// A forked child has its parent's lines, and must not write them again. It cannot take the lock either, which another
/// thread may have held.
void let_children_alone() {
  static const int asked = ::pthread_atfork(nullptr, nullptr, [] { detail::recording.store(false); });
  (void)asked;
}

/// Microseconds of rank 0's clock.
std::string stamp(int64_t ns) {
  ns -= recorder().offset_ns;
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%03lld", static_cast<long long>(ns / 1000),
                static_cast<long long>(ns % 1000));
  return text;
}

int64_t own_thread() {
  thread_local const int64_t id = ::syscall(SYS_gettid);
  return id;
}

std::string head(const char* phase, const std::string& name, int64_t track) {
  return std::string(R"({"ph":")") + phase + R"(","name":)" + quoted(name) + R"(,"pid":)" +
         std::to_string(recorder().rank) + R"(,"tid":)" + std::to_string(track);
}

std::string tail(const std::string& arguments) { return arguments.empty() ? "}" : R"(,"args":{)" + arguments + "}}"; }

void add_line(const std::string& line) {
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().add_line(line);
}

void name_own_thread() {
  thread_local uint32_t named = 0;
  if (named == session()) return;
  named = session();
  char name[16] = "main";
  if (own_thread() != ::getpid()) ::pthread_getname_np(::pthread_self(), name, sizeof(name));
  name_track(own_thread(), name);
}

}  // namespace

uint32_t session() { return recorder().session.load(std::memory_order_relaxed); }

void start(const std::string& path, int rank, int64_t offset_ns) {
  Recorder& all = recorder();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (is_on()) throw InvalidArgument("a timeline is being recorded already; stop that one first");
    all.file = Fd(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
    if (!all.file.valid()) throw SystemError("cannot write the timeline to " + path, errno);
    all.rank = rank;
    all.offset_ns = offset_ns;
    all.unwritten.clear();
    all.session.fetch_add(1);
    all.add_line(head("M", "process_name", 0) + tail(R"("name":)" + quoted(describe_own(rank))));
    all.add_line(head("M", "process_sort_index", 0) + tail(R"("sort_index":)" + std::to_string(rank)));
    let_children_alone();
    static const int at_exit = std::atexit([] { flush(); });
    (void)at_exit;
  }
  name_track(kModelTrack, "model");
  detail::recording = true;
}

void stop() noexcept {
  if (!detail::recording.exchange(false)) return;
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().write_all();
  recorder().file.reset();
}

void flush() noexcept {
  if (!is_on()) return;
  const std::lock_guard<std::mutex> lock(recorder().mutex);
  recorder().write_all();
}

void add(const char* category, const std::string& name, Interval when, const std::string& arguments, int64_t track) {
  if (!is_on()) return;
  if (track == kOwnThread) name_own_thread();
  add_line(head("X", name, track == kOwnThread ? own_thread() : track) + R"(,"cat":")" + category + R"(","ts":)" +
           stamp(when.began) + R"(,"dur":)" + stamp(when.ended - when.began + recorder().offset_ns) + tail(arguments));
}

void add_overlapping(const char* category, const std::string& name, Interval when, const std::string& arguments) {
  if (!is_on()) return;
  const std::string facts = std::string(R"(,"cat":")") + category + R"(","id":)" +
                            std::to_string(recorder().overlapping.fetch_add(1)) + R"(,"ts":)";
  const std::string begin = head("b", name, own_thread()) + facts + stamp(when.began) + tail(arguments);
  add_line(begin + ",\n" + head("e", name, own_thread()) + facts + stamp(when.ended) + "}");
}

void mark(const char* category, const std::string& name, const std::string& arguments) {
  if (!is_on()) return;
  add_line(head("i", name, kModelTrack) + R"(,"s":"p","cat":")" + category + R"(","ts":)" + stamp(steady_ns()) +
           tail(arguments));
}

void count(const std::string& quantity, int64_t at_ns, double value) {
  if (!is_on()) return;
  char text[40];
  std::snprintf(text, sizeof(text), "%.6g", value);
  add_line(head("C", quantity, 0) + R"(,"ts":)" + stamp(at_ns) + tail(quoted(quantity) + ":" + text));
}

void name_track(int64_t track, const std::string& name) {
  add_line(head("M", "thread_name", track) + tail(R"("name":)" + quoted(name)));
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      result += code;
    } else {
      result += c;
    }
  }
  return result + '"';
}

void Phase::end() noexcept {
  const Interval when{began_, steady_ns()};
  if (when.ended - when.began < kShortestPhase) return;
  try {
    add("phase", name_, when);
  } catch (const std::exception&) {
    // Out of memory: an event less.
  }
}

}  // namespace ours::timeline
