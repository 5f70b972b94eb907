#include "backend/joining/store_keys.h"

#include <algorithm>
#include <condition_variable>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "common/background_thread.h"
#include "common/error.h"
#include "common/interrupts.h"

namespace ours {

namespace {

/// Runs `body`, and throws the store's failures as Error.
template <class Body>
auto of_store(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& e) {
    throw Error(std::string("the store of the process group failed: ") + e.what_without_backtrace() +
                ". Does the process that serves it still run?");
  } catch (const std::exception& e) {
    throw Error(std::string("the store of the process group failed: ") + e.what() +
                ". Does the process that serves it still run?");
  }
}

/// Shared by the thread that asks and the thread that waits for the answer.
struct Inquiry {
  std::mutex mutex;
  std::condition_variable ended;
  bool over = false;         // guarded by mutex
  std::exception_ptr error;  // guarded by mutex
  std::atomic<bool> dropped{false};

  void end(const std::exception_ptr& with) {
    const std::lock_guard<std::mutex> lock(mutex);
    error = with;
    over = true;
    ended.notify_all();
  }
};

/// Waits until all of `names` are set, by checking again and again: a wait inside the store would keep other threads of
/// this process from using it.
std::vector<std::string> wait_for(c10d::Store& store, const std::vector<std::string>& names,
                                  const StoreKeys::Terms& terms, Deadline deadline, const std::atomic<bool>& dropped) {
  for (auto pause = terms.pause / 100; !store.check(names); pause = std::min(2 * pause, terms.pause)) {
    if (deadline.passed() || dropped) throw TimeoutError("no rank has set " + names.front());
    try {
      if (terms.check) terms.check(store);
    } catch (...) {
      // The key may have been set by a rank that ended afterwards.
      if (!store.check(names)) throw;
    }
    std::this_thread::sleep_for(pause);
  }
  return values_in(store, names);
}

}  // namespace

std::vector<std::string> values_in(c10d::Store& store, const std::vector<std::string>& names) {
  std::vector<std::string> values;
  if (store.hasExtendedApi()) {
    for (const auto& value : store.multiGet(names)) values.emplace_back(value.begin(), value.end());
  } else {
    for (const std::string& name : names) values.push_back(store.get_to_str(name));
  }
  return values;
}

void run_inquiry(const StorePtr& store, Deadline deadline, const std::function<void()>& look_around,
                 std::function<void(c10d::Store&, const std::atomic<bool>&)> question) {
  // A question with the same deadline can say more about what was waited for, so it may throw first.
  constexpr std::chrono::milliseconds kGrace{250};
  const auto inquiry = std::make_shared<Inquiry>();
  const auto ask = [inquiry, store, question = std::move(question)] {
    try {
      of_store([&] { question(*store, inquiry->dropped); });
      inquiry->end(nullptr);
    } catch (...) {
      inquiry->end(std::current_exception());
    }
  };
  try {
    start_background_thread("ours_store", ask);
  } catch (const std::system_error&) {
    ask();  // without a thread, it may take as long as the store needs
  }
  const struct Drop {
    Inquiry& inquiry;
    ~Drop() { inquiry.dropped = true; }
  } drop{*inquiry};
  Interrupts interrupts;
  bool late = false;
  std::unique_lock<std::mutex> lock(inquiry->mutex);
  while (!inquiry->ended.wait_for(lock, Interrupts::kBetweenLooks, [&] { return inquiry->over; })) {
    lock.unlock();
    if (const std::string name = interrupts.look(); !name.empty()) {
      throw Error("a call of the store was interrupted (" + name + ")");
    }
    if (look_around) look_around();
    // A process that was stopped wakes up late, and the answer comes a moment after that.
    if (late) {
      throw StoreSilent("the store of the process group does not answer. Is the process that serves it stopped?");
    }
    late = Clock::now() - kGrace > deadline.at();
    lock.lock();
  }
  if (inquiry->error) std::rethrow_exception(inquiry->error);
}

StorePtr connect_anew(const StorePtr& store, Deadline deadline) {
  return ask_store(store, deadline, [](c10d::Store& from, const auto&) { return from.clone(); });
}

void StoreKeys::set(const std::string& key, const std::string& value) {
  ask_store(store_, terms_.deadline,
            [name = prefix_ + key, value](c10d::Store& store, const auto&) { store.set(name, value); });
}

std::string StoreKeys::get(const std::string& key, Deadline deadline) { return await(key, deadline, {}); }

std::string StoreKeys::await(const std::string& key, Deadline deadline, const std::function<void()>& look_around) {
  const std::string value = known(key);
  return value.empty() ? get_all({key}, deadline, look_around).front() : value;
}

std::string StoreKeys::known(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = fetched_.find(key);
  return found == fetched_.end() ? "" : found->second;
}

std::vector<std::string> StoreKeys::get_all(const std::vector<std::string>& keys, Deadline deadline,
                                            const std::function<void()>& look_around) {
  std::vector<std::string> names;
  for (const std::string& key : keys) names.push_back(prefix_ + key);
  return ask_store(
      store_, deadline,
      [names, deadline, terms = terms_](c10d::Store& store, const std::atomic<bool>& dropped) {
        return wait_for(store, names, terms, deadline, dropped);
      },
      look_around);
}

std::string StoreKeys::claim(const std::string& key, const std::string& value, Deadline deadline) {
  return ask_store(store_, deadline, [name = prefix_ + key, value](c10d::Store& store, const auto&) {
    return store.compareSet(name, "", value);
  });
}

std::vector<size_t> StoreKeys::missing(const std::vector<std::string>& keys, size_t most, Deadline deadline) {
  return ask_store(store_, deadline, [keys, most, prefix = prefix_](c10d::Store& store, const auto& dropped) {
    std::vector<size_t> unset;
    for (size_t i = 0; i < keys.size() && unset.size() < most && !dropped; ++i) {
      if (!store.check({prefix + keys[i]})) unset.push_back(i);
    }
    return unset;
  });
}

void StoreKeys::fetch(const std::vector<std::string>& keys, Deadline deadline) {
  const std::vector<std::string> values = get_all(keys, deadline);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) fetched_[keys[i]] = values[i];
}

std::string host_of(const StorePtr& store) {
  StorePtr innermost = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(innermost.get())) {
    innermost = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto* server = dynamic_cast<const c10d::TCPStore*>(innermost.get());
  return server == nullptr ? "" : server->getHost();
}

}  // namespace ours
