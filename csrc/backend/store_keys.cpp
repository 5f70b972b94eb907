#include "backend/store_keys.h"

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "common/error.h"

namespace ours {

namespace {

using Milliseconds = std::chrono::milliseconds;

/// Runs `body`, whose failures are the store's.
template <class Body>
auto of_store(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const c10::Error& e) {
    throw Error(std::string("the store of the process group failed: ") + e.what_without_backtrace() +
                ". Does the process that serves it still run?");
  } catch (const std::exception& e) {
    throw Error(std::string("the store of the process group failed: ") + e.what() +
                ". Does the process that serves it still run?");
  }
}

}  // namespace

void StoreKeys::set(const std::string& key, const std::string& value) {
  of_store([&] { store_->set(prefix_ + key, value); });
}

std::string StoreKeys::get(const std::string& key, Deadline deadline) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = fetched_.find(key); found != fetched_.end()) return found->second;
  }
  wait({prefix_ + key}, deadline);
  return of_store([&] { return store_->get_to_str(prefix_ + key); });
}

std::vector<std::string> StoreKeys::get_all(const std::vector<std::string>& keys, Deadline deadline) {
  std::vector<std::string> names;
  for (const std::string& key : keys) names.push_back(prefix_ + key);
  wait(names, deadline);
  return of_store([&] {
    std::vector<std::string> values;
    if (store_->hasExtendedApi()) {
      for (const auto& value : store_->multiGet(names)) values.emplace_back(value.begin(), value.end());
    } else {
      for (const std::string& name : names) values.push_back(store_->get_to_str(name));
    }
    return values;
  });
}

std::string StoreKeys::claim(const std::string& key, const std::string& value) {
  return of_store([&] { return store_->compareSet(prefix_ + key, "", value); });
}

void StoreKeys::fetch(const std::vector<std::string>& keys, Deadline deadline) {
  const std::vector<std::string> values = get_all(keys, deadline);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) fetched_[keys[i]] = values[i];
}

bool StoreKeys::has(const std::string& key) {
  return of_store([&] { return store_->check({prefix_ + key}); });
}

void StoreKeys::wait(const std::vector<std::string>& keys, Deadline deadline) {
  // Some stores compute with the time, which must not overflow.
  constexpr Milliseconds kLongest{std::chrono::hours(1)};
  // Who has so little time looks after something else meanwhile. The store's own wait would warn when it is up.
  constexpr Milliseconds kLittle{100};
  // Clocks of stores may tick a little before ours.
  constexpr Milliseconds kTick{2};
  constexpr Milliseconds kBetweenLooks{5};
  while (true) {
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline.at() - Clock::now());
    if (left <= kLittle) {
      if (of_store([&] { return store_->check(keys); })) return;
      if (left <= Milliseconds::zero()) throw TimeoutError("nobody has set " + keys.front());
      std::this_thread::sleep_for(std::min(left, kBetweenLooks));
      continue;
    }
    const auto slice = std::min(left, kLongest);
    const auto end = Clock::now() + slice;
    try {
      store_->wait(keys, slice);
      return;
    } catch (const std::exception&) {
      // Stores throw different types when the time is up. What comes earlier is a failure of the store itself.
      if (Clock::now() + kTick < end) of_store([] { throw; });
    }
  }
}

std::string host_of(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> innermost = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(innermost.get())) {
    innermost = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto* server = dynamic_cast<const c10d::TCPStore*>(innermost.get());
  return server == nullptr ? "" : server->getHost();
}

}  // namespace ours
