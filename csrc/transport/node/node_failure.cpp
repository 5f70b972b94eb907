#include "transport/node/node_failure.h"

#include <sched.h>

#include <cstring>

#include "common/deadline.h"
#include "common/whole_characters.h"

namespace ours {

namespace {

constexpr uint32_t kNoFailure = 0;
constexpr uint32_t kWriting = 1;
constexpr uint32_t kReadable = 2;

}  // namespace

void NodeFailure::fail(FailureKind kind, const std::string& message) noexcept {
  adopt();
  own_.record(kind, message);
  uint32_t expected = kNoFailure;
  if (header_.failure_state.compare_exchange_strong(expected, kWriting)) {
    header_.failure_kind = static_cast<uint32_t>(kind);
    const size_t length = whole_characters(message, sizeof(header_.failure_message) - 1);
    std::memcpy(header_.failure_message, message.data(), length);
    header_.failure_message[length] = '\0';
    // Release: a peer that reads kReadable reads the whole message.
    header_.failure_state.store(kReadable, std::memory_order_seq_cst);
  } else {
    // Peers that still read this rank's memory must find a failure before the memory changes. The writer may have died.
    const Deadline patience = Deadline::after(std::chrono::milliseconds(100));
    while (!told() && !patience.passed()) ::sched_yield();
  }
  for (SleepWord* word : words_) futex_wake_all(word->value);
}

void NodeFailure::fail(const std::exception_ptr& error) noexcept {
  std::string message;
  const FailureKind kind = kind_of(error, message);
  if (kind != FailureKind::None) fail(kind, message);
}

void NodeFailure::adopt() {
  if (own_.failed() || !told()) return;
  own_.record(static_cast<FailureKind>(header_.failure_kind),
              {header_.failure_message, ::strnlen(header_.failure_message, sizeof(header_.failure_message))});
}

bool NodeFailure::failed() const { return own_.failed() || told(); }

bool NodeFailure::told() const {
  // Sequentially consistent: see Places::withdraw().
  return header_.failure_state.load(std::memory_order_seq_cst) == kReadable;
}

void NodeFailure::check() {
  adopt();
  own_.check();
}

void NodeFailure::raise(FailureKind kind, const std::string& message) {
  fail(kind, message);
  throw_as(this->kind(), this->message());
}

FailureKind NodeFailure::kind() {
  adopt();
  return own_.kind();
}

std::string NodeFailure::message() {
  adopt();
  return own_.message();
}

}  // namespace ours
