#include "backend/rendezvous.h"

#include <unistd.h>

#include <algorithm>

#include "backend/errors.h"

namespace ours {

namespace {

using Milliseconds = std::chrono::milliseconds;

std::string self_description(int rank) {
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  return "rank " + std::to_string(rank) + " (host " + host + ", pid " + std::to_string(::getpid()) + ")";
}

/// One attempt of the ranks to meet.
class Attempt {
 public:
  explicit Attempt(const Meeting& meeting) : meeting_(meeting), deadline_(Deadline::after(meeting.timeout)) {
    const int64_t number = store().add("ours/attempts/" + std::to_string(meeting.rank), 1);
    const std::string prefix = "ours/" + std::to_string(number) + "/";
    address_key_ = prefix + "address";
    error_key_ = prefix + "error";
  }

  std::shared_ptr<NodeSession> run() {
    auto session = meeting_.rank == 0 ? lead() : follow();
    session->wait_attached(deadline_, [this] { check_error(); });
    return session;
  }

 private:
  c10d::Store& store() const { return *meeting_.store; }

  std::shared_ptr<NodeSession> lead() {
    std::shared_ptr<NodeSession> session;
    try {
      session = NodeSession::create(0, meeting_.size, NodeConfig::from_options(meeting_.size));
    } catch (const Error& e) {
      fail(self_description(0) + " cannot make the shared memory of " + meeting_.group + ": " + e.what());
    }
    store().set(address_key_, self_description(0) + '\n' + session->address());
    return session;
  }

  std::shared_ptr<NodeSession> follow() {
    const std::string published = wait_for_leader();
    const size_t end = published.find('\n');
    TORCH_CHECK(end != std::string::npos, "malformed address in the store: '", published, "'");
    const std::string leader = published.substr(0, end);
    try {
      return NodeSession::open(meeting_.rank, meeting_.size, published.substr(end + 1));
    } catch (const NotSameNode& e) {
      fail(self_description(meeting_.rank) + " and " + leader + " share no memory: " + e.what() +
           ". This release connects the ranks of one machine (and of one container, or containers that share the "
           "process "
           "namespace): start all ranks of " +
           meeting_.group + " there, or use backend 'gloo' for several machines");
    } catch (const Error& e) {
      fail(self_description(meeting_.rank) + " cannot join " + leader + " in " + meeting_.group + ": " + e.what());
    }
  }

  /// What rank 0 published. Waits in slices, since an error may come in its place.
  std::string wait_for_leader() {
    constexpr Milliseconds kSlice{5000};
    while (true) {
      const auto left = std::chrono::duration_cast<Milliseconds>(deadline_.at() - Clock::now());
      const auto slice = std::clamp(left, Milliseconds(1), kSlice);
      const auto slice_end = Clock::now() + slice;
      try {
        store().wait({address_key_}, slice);
        return store().get_to_str(address_key_);
      } catch (const std::exception&) {
        // Stores throw different types when the time is up. What comes earlier is a failure of the store itself.
        if (Clock::now() < slice_end) throw;
      }
      check_error();
      if (deadline_.passed()) {
        throw TimeoutError(
            "rank 0 of " + meeting_.group + " did not publish its address within " +
            std::to_string(meeting_.timeout.count()) + " ms (" + self_description(meeting_.rank) +
            " waited for it). Was it started, did it fail, and is the store not left over from another run?");
      }
    }
  }

  void check_error() const {
    if (store().check({error_key_})) throw Error(store().get_to_str(error_key_));
  }

  /// Makes all ranks raise the first error that any of them reports.
  [[noreturn]] void fail(const std::string& message) const { throw Error(store().compareSet(error_key_, "", message)); }

  const Meeting& meeting_;
  const Deadline deadline_;
  std::string address_key_;
  std::string error_key_;
};

}  // namespace

std::shared_ptr<NodeSession> meet_on_node(const Meeting& meeting) {
  return with_torch_errors("", [&] { return Attempt(meeting).run(); });
}

}  // namespace ours
