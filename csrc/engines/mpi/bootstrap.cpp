#include "engines/mpi/bootstrap.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "common/error.h"
#include "common/fd.h"

namespace ours::mpi {

namespace {

using Fields = std::map<std::string, std::string>;

constexpr const char* kVariables[] = {"PMI_FD", "PMI_RANK", "PMI_SIZE"};

/// "cmd=put kvsname=a key=b value=c d" by name; the value of the last field goes to the end of the line.
Fields parse(const std::string& line) {
  Fields fields;
  size_t at = 0;
  while (at < line.size()) {
    const size_t equals = line.find('=', at);
    if (equals == std::string::npos) break;
    const std::string name = line.substr(at, equals - at);
    const size_t end = name == "value" ? std::string::npos : line.find(' ', equals);
    fields[name] = line.substr(equals + 1, end == std::string::npos ? end : end - equals - 1);
    if (end == std::string::npos) break;
    at = end + 1;
  }
  return fields;
}

}  // namespace

/// The side that answers. It belongs to its thread, which ends with the process.
struct Bootstrap::State {
  explicit State(const MpiMeeting& of)
      : meeting{of.rank, of.size, of.group, nullptr, of.deadline, of.launcher}, keys(of.keys) {}

  const MpiMeeting meeting;  // without its keys
  std::mutex mutex;
  std::shared_ptr<KeyValues> keys;  // guarded by mutex; null once finished
  Fd server;
  int barriers = 0;
  std::string mine;  // what this rank has put since the last barrier
  Fields known;      // what all had put before it

  std::string answer(const Fields& asked);
  std::string get(const std::string& key) const;
  void barrier();
  void serve();
};

std::string Bootstrap::State::answer(const Fields& asked) {
  const auto field = [&](const char* name) {
    const auto found = asked.find(name);
    return found == asked.end() ? std::string() : found->second;
  };
  const std::string command = field("cmd");
  const std::string size = std::to_string(meeting.size);
  if (command == "init") return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0";
  if (command == "get_maxes") return "cmd=maxes kvsname_max=256 keylen_max=256 vallen_max=4096";
  if (command == "get_appnum") return "cmd=appnum appnum=0";
  if (command == "get_my_kvsname") return "cmd=my_kvsname kvsname=ours";
  if (command == "get_universe_size") return "cmd=universe_size size=" + size;
  if (command == "barrier_in") {
    barrier();
    return "cmd=barrier_out rc=0";
  }
  if (command == "put") {
    mine += field("key") + "=" + field("value") + "\n";
    return "cmd=put_result rc=0 msg=success";
  }
  if (command == "get") return get(field("key"));
  if (command == "finalize") return "cmd=finalize_ack rc=0";
  if (command == "abort") throw Error("MPI ends this process");
  return "cmd=" + command + "_result rc=-1 msg=unknown_command";
}

/// Whoever asks for a key does so after the barrier that follows its being put.
std::string Bootstrap::State::get(const std::string& key) const {
  const auto found = known.find(key);
  if (found == known.end()) return "cmd=get_result rc=-1 msg=key_not_found value=unknown";
  return "cmd=get_result rc=0 msg=success value=" + found->second;
}

/// Two keys a rank: what it has put, and, from rank 0, what all have. Once finished, nothing.
void Bootstrap::State::barrier() {
  const std::shared_ptr<KeyValues> shared = [this] {
    const std::lock_guard<std::mutex> lock(mutex);
    return keys;
  }();
  if (!shared) return;
  const std::string name = "barrier/" + std::to_string(barriers++) + "/";
  if (meeting.rank == 0) {
    for (int rank = 1; rank < meeting.size; ++rank) mine += shared->get(name + std::to_string(rank), meeting.deadline);
    shared->set(name + "all", mine);
  } else {
    shared->set(name + std::to_string(meeting.rank), mine);
    mine = shared->get(name + "all", meeting.deadline);
  }
  std::istringstream lines(mine);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    known[line.substr(0, equals)] = line.substr(equals + 1);
  }
  mine.clear();
}

/// Answers line by line until the process, or MPI, closes the other end.
void Bootstrap::State::serve() {
  std::string pending;
  char bytes[4096];
  for (;;) {
    const ssize_t count = read(server.get(), bytes, sizeof(bytes));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    pending.append(bytes, static_cast<size_t>(count));
    for (size_t end = pending.find('\n'); end != std::string::npos; end = pending.find('\n')) {
      const std::string line = pending.substr(0, end);
      pending.erase(0, end + 1);
      std::string reply;
      try {
        reply = answer(parse(line)) + "\n";
      } catch (const std::exception&) {
        return;  // the store is gone or the others are late: MPI_Init finds its launcher gone
      }
      if (send(server.get(), reply.data(), reply.size(), MSG_NOSIGNAL) < 0) return;
    }
  }
}

Bootstrap::Bootstrap(const MpiMeeting& meeting) : state_(new State(meeting)) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw SystemError("socketpair", errno);
  // Every rank is a node, which they would find out by many more keys.
  state_->known["PMI_process_mapping"] = "(vector,(0," + std::to_string(meeting.size) + ",1))";
  state_->server = Fd(ends[0]);
  client_ = ends[1];
  std::thread([state = state_] { state->serve(); }).detach();
  const std::string values[] = {std::to_string(client_), std::to_string(meeting.rank), std::to_string(meeting.size)};
  for (size_t i = 0; i < 3; ++i) setenv(kVariables[i], values[i].c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
}

Bootstrap::~Bootstrap() {
  // The thread stays, for what MPI says at its end, but may not keep the group's store until then.
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->keys.reset();
  }
  // So that processes which this one starts do not take themselves for ranks.
  for (const char* variable : kVariables) unsetenv(variable);  // NOLINT(concurrency-mt-unsafe)
}

}  // namespace ours::mpi
