#include "backend/recent_calls.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "collectives/call_number.h"
#include "common/process_wide.h"
#include "common/whole_characters.h"

namespace ours {

namespace {

/// What a line can show.
struct RecentCall {
  Op op;
  uint64_t number;
  int64_t elements;
  at::ScalarType type;
  std::array<char, 24> group;  ///< the beginning of its description
  pthread_t thread;
};

constexpr size_t kKept = 3;

struct RecentCalls {
  std::array<RecentCall, kKept> calls;
  size_t count = 0;

  void add(const RecentCall& call) { calls[count++ % kKept] = call; }
  /// `ago`: 1 is the last one.
  const RecentCall& at(size_t ago) const { return calls[(count - ago) % kKept]; }

  void in_child() { count = 0; }
};

const at::Tensor* first_tensor(const CallTrace& call) {
  if (!call.inputs.empty()) return &call.inputs.front();
  if (!call.outputs.empty() && !call.outputs.front().empty()) return &call.outputs.front().front();
  return nullptr;
}

std::string describe(const RecentCall& call) {
  const std::string group(call.group.data());
  const std::string tensor = call.elements < 0 ? "" : std::to_string(call.elements) + " x " + c10::toString(call.type);
  const std::string details = tensor + (tensor.empty() || group.empty() ? "" : ", ") + group;
  return std::string(name_of(call.op)) + ' ' + describe_number(call.number) +
         (details.empty() ? "" : " (" + details + ")");
}

}  // namespace

void remember(const CallTrace& call) {
  const at::Tensor* const tensor = first_tensor(call);
  RecentCall recent{call.op, call.sequence, -1, at::kByte, {}, ::pthread_self()};
  if (tensor != nullptr) {
    recent.elements = tensor->numel();
    recent.type = tensor->scalar_type();
  }
  const std::string& group = call.group.description.empty() ? call.group.name : call.group.description;
  std::memcpy(recent.group.data(), group.data(), whole_characters(group, recent.group.size() - 1));
  auto& own = ProcessWide<RecentCalls>::get();
  const std::lock_guard<std::mutex> lock(own.mutex);
  own.value.add(recent);
}

std::string describe_recent_calls() {
  auto& own = ProcessWide<RecentCalls>::get();
  const std::lock_guard<std::mutex> lock(own.mutex);
  const size_t known = std::min(own.value.count, kKept);
  if (known == 0) return "it has made no call";
  std::string text = known == 1 ? "its only call was " : "its last calls were ";
  for (size_t i = 1; i <= known; ++i) {
    text += (i == 1 ? "" : i == known ? " and " : ", ") + describe(own.value.at(i));
  }
  return text;
}

pthread_t last_caller() {
  auto& own = ProcessWide<RecentCalls>::get();
  const std::lock_guard<std::mutex> lock(own.mutex);
  return own.value.count == 0 ? pthread_t{} : own.value.at(1).thread;
}

}  // namespace ours
