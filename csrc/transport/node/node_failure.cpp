#include "transport/node/node_failure.h"

#include <algorithm>
#include <cstring>

#include "transport/node/node_wait.h"

namespace ours {

namespace {

constexpr uint32_t kNoFailure = 0;
constexpr uint32_t kWriting = 1;
constexpr uint32_t kReadable = 2;

}  // namespace

void NodeFailure::fail(FailureKind kind, const std::string& message) noexcept {
  adopt();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (kind_ == FailureKind::None) {
      kind_ = kind;
      message_ = message;
    }
    known_.store(true, std::memory_order_release);
  }
  uint32_t expected = kNoFailure;
  if (header_.failure_state.compare_exchange_strong(expected, kWriting)) {
    header_.failure_kind = static_cast<uint32_t>(kind);
    const size_t length = std::min(message.size(), sizeof(header_.failure_message) - 1);
    std::memcpy(header_.failure_message, message.data(), length);
    header_.failure_message[length] = '\0';
    // Release: a peer that reads kReadable reads the whole message.
    header_.failure_state.store(kReadable, std::memory_order_seq_cst);
  }
  for (int r = 0; r < ranks_; ++r) wake_sleepers(blocks_[r]);
}

void NodeFailure::fail(const std::exception_ptr& error) noexcept {
  std::string message;
  const FailureKind kind = kind_of(error, message);
  if (kind != FailureKind::None) fail(kind, message);
}

void NodeFailure::adopt() {
  if (known_.load(std::memory_order_acquire)) return;
  if (header_.failure_state.load(std::memory_order_acquire) != kReadable) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (kind_ == FailureKind::None) {
    kind_ = static_cast<FailureKind>(header_.failure_kind);
    message_.assign(header_.failure_message, ::strnlen(header_.failure_message, sizeof(header_.failure_message)));
  }
  known_.store(true, std::memory_order_release);
}

bool NodeFailure::failed() const { return known_.load(std::memory_order_acquire) || told(); }

bool NodeFailure::told() const {
  // Sequentially consistent: see HeapPlaces::withdraw().
  return header_.failure_state.load(std::memory_order_seq_cst) == kReadable;
}

void NodeFailure::check() {
  if (!failed()) return;
  throw_as(kind(), message());
}

void NodeFailure::raise(FailureKind kind, const std::string& message) {
  fail(kind, message);
  throw_as(this->kind(), this->message());
}

FailureKind NodeFailure::kind() {
  adopt();
  std::lock_guard<std::mutex> lock(mutex_);
  return kind_;
}

std::string NodeFailure::message() {
  adopt();
  std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

}  // namespace ours
