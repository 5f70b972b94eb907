#include "support/engine_ranks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/error.h"

namespace ours::testing {

Switchboard::Switchboard(bool polls) : polls_(polls) {
  if (!polls) thread_ = std::thread([this] { deliver_until_stopped(); });
}

Switchboard::~Switchboard() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Switchboard::hold() {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_ = true;
}

void Switchboard::fail_after(int messages, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_ = messages;
  failing_ = rank;
}

size_t Switchboard::arrived() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arrived_;
}

std::vector<std::tuple<int, int, size_t>> Switchboard::sent() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sent_;
}

size_t Switchboard::under_way() {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t all = 0;
  for (const auto& one : pairs_) all += one.second.sent.size() + one.second.wanted.size();
  return all;
}

void Switchboard::begin(int from, int to, bool sends, const EndPtr& end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(sends ? from : to);
  if (sends) sent_.emplace_back(from, to, end->bytes);
  Pair& pair = pairs_[{from, to}];
  (sends ? pair.sent : pair.wanted).push_back(end);
  changed_.notify_all();
}

bool Switchboard::done(int rank, int from, int to, const EndPtr& end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check(rank);
  // Delivered only sometimes, so that a rank has to ask again.
  if (polls_ && random_() % 3 != 0) deliver(pairs_[{from, to}]);
  return end->done;
}

void Switchboard::drop(int from, int to, const EndPtr& end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // An engine may use the memory until now, so it must exist. The answer to what was sent may have come there.
  if (end->bytes != 0) static_cast<void>(*static_cast<const volatile std::byte*>(end->data));
  Pair& pair = pairs_[{from, to}];
  for (auto* ends : {&pair.sent, &pair.wanted}) ends->erase(std::remove(ends->begin(), ends->end(), end), ends->end());
}

void Switchboard::set_waker(int rank, std::function<void()> wake) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wakers_[rank] = std::move(wake);
}

void Switchboard::check(int rank) const {
  if (failing_ == rank && left_ == 0) throw Error("the cable was cut");
}

bool Switchboard::deliver(Pair& pair) {
  if (held_ || pair.sent.empty() || pair.wanted.empty()) return false;
  if (left_ > 0) --left_;
  const EndPtr from = pair.sent.front();
  const EndPtr to = pair.wanted.front();
  if (from->number != to->number || from->bytes != to->bytes) {
    std::fprintf(stderr, "switchboard: message %u of %zu bytes meets %u of %zu\n", from->number, from->bytes,
                 to->number, to->bytes);
    std::abort();
  }
  std::memcpy(to->data, from->data, from->bytes);
  from->done = to->done = true;
  pair.sent.pop_front();
  pair.wanted.pop_front();
  ++arrived_;
  return true;
}

void Switchboard::deliver_until_stopped() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    std::vector<std::map<std::pair<int, int>, Pair>::iterator> ready;
    for (auto one = pairs_.begin(); one != pairs_.end(); ++one) {
      if (!one->second.sent.empty() && !one->second.wanted.empty()) ready.push_back(one);
    }
    if (ready.empty() || held_) {
      changed_.wait(lock);
      continue;
    }
    // A random pair, regardless of which was first.
    const auto chosen = ready[random_() % ready.size()];
    deliver(chosen->second);
    for (const int rank : {chosen->first.first, chosen->first.second}) {
      if (wakers_[rank]) wakers_[rank]();
    }
  }
}

namespace {

class SwitchboardEngine final : public Engine {
 public:
  SwitchboardEngine(int rank, std::shared_ptr<Switchboard> board) : rank_(rank), board_(std::move(board)) {}
  ~SwitchboardEngine() override { board_->set_waker(rank_, nullptr); }

  std::string name() const override { return "switchboard"; }
  std::unique_ptr<Engine::Transfer> send(int peer, uint32_t number, const void* data, size_t bytes) override {
    return begin(rank_, peer, true, {number, const_cast<void*>(data), bytes});
  }
  std::unique_ptr<Engine::Transfer> receive(int peer, uint32_t number, void* data, size_t bytes) override {
    return begin(peer, rank_, false, {number, data, bytes});
  }
  void set_waker(std::function<void()> wake) override { board_->set_waker(rank_, std::move(wake)); }
  bool polls() const override { return board_->polls(); }
  void close() noexcept override {}

 private:
  struct Transfer final : Engine::Transfer {
    Transfer(SwitchboardEngine& engine, int from, int to, Switchboard::EndPtr end)
        : rank(engine.rank_), from(from), to(to), board(engine.board_), end(std::move(end)) {}
    ~Transfer() override { board->drop(from, to, end); }
    bool done() override { return board->done(rank, from, to, end); }

    const int rank, from, to;
    const std::shared_ptr<Switchboard> board;
    const Switchboard::EndPtr end;
  };

  std::unique_ptr<Engine::Transfer> begin(int from, int to, bool sends, const Switchboard::End& end) {
    auto shared = std::make_shared<Switchboard::End>(end);
    board_->begin(from, to, sends, shared);
    return std::make_unique<Transfer>(*this, from, to, std::move(shared));
  }

  const int rank_;
  const std::shared_ptr<Switchboard> board_;
};

}  // namespace

std::shared_ptr<Engine> make_engine(int rank, const std::shared_ptr<Switchboard>& board) {
  return std::make_shared<SwitchboardEngine>(rank, board);
}

std::shared_ptr<Switchboard> connect_engines(const Meshes& meshes, bool polls, size_t least_bytes) {
  const auto board = std::make_shared<Switchboard>(polls);
  for (const auto& mesh : meshes) mesh->set_engine(make_engine(mesh->rank(), board), least_bytes);
  return board;
}

}  // namespace ours::testing
