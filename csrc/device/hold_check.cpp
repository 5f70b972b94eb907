#include "device/hold_check.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <system_error>
#include <utility>

#include "common/background_thread.h"
#include "device/keep_forever.h"
#include "device/stream_filler.h"

namespace ours {
namespace {

constexpr size_t kBytes = 64;
constexpr size_t kPlaces = 64;  // that are made at once
constexpr size_t kMostOwn = 8;  // streams to fill, before all share a queue with one that is needed

/// In the device's part of a Place.
void give_small_kernel(Device& device, std::byte* place, StreamHandle stream) {
  device.flatten(place + kBytes, DType::Float32, {{place, 0, 1}}, DType::Float32, 1.0, stream);
}

/// Opens a gate on another thread after a while, unless it is destroyed before: this one may be in a call to the device
/// that waits for the stream which the gate holds.
class OpensLater {
 public:
  OpensLater(std::shared_ptr<StreamGate> gate, std::chrono::milliseconds delay) {
    start_background_thread("ours_gate", [state = state_, gate = std::move(gate), at = Deadline::after(delay).at()] {
      std::unique_lock<std::mutex> lock(state->mutex);
      if (!state->changed.wait_until(lock, at, [&] { return state->over; })) gate->open();
    });
  }
  ~OpensLater() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->over = true;
    state_->changed.notify_all();
  }
  OpensLater(const OpensLater&) = delete;
  OpensLater& operator=(const OpensLater&) = delete;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace

std::shared_ptr<HoldCheck> HoldCheck::of(const std::shared_ptr<Device>& device) {
  // Never destroyed, as groups may end with the process.
  static auto* const kMutex = new std::mutex;
  static auto* const kAll = new std::map<const Device*, std::weak_ptr<HoldCheck>>;
  const std::lock_guard<std::mutex> lock(*kMutex);
  std::weak_ptr<HoldCheck>& known = (*kAll)[device.get()];
  std::shared_ptr<HoldCheck> check = known.lock();
  if (!check) known = check = std::make_shared<HoldCheck>(device, device->patience());
  return check;
}

HoldCheck::HoldCheck(std::shared_ptr<Device> device, std::chrono::milliseconds patience)
    : device_(std::move(device)), patience_(patience) {}

HoldCheck::~HoldCheck() {
  forget_finished();
  if (unfinished_.empty() && !lost_) return;
  for (const auto& memory : memory_) keep_forever(memory);
}

void HoldCheck::need(const std::vector<StreamHandle>& streams) {
  std::unique_lock<std::mutex> lock(mutex_);
  make_places(lock, streams.size());
  for (const StreamHandle stream : streams) {
    needed_.push_back({stream, free_places_.back()});
    free_places_.pop_back();
  }
  ++needs_;
}

void HoldCheck::make_places(std::unique_lock<std::mutex>& lock, size_t count) {
  while (free_places_.size() < count) {
    // Without the lock: to make memory may wait for the device.
    lock.unlock();
    const std::shared_ptr<void> host = device_->pinned_memory(2 * kBytes * kPlaces);
    const std::shared_ptr<void> device = device_->memory(2 * kBytes * kPlaces);
    lock.lock();
    memory_.insert(memory_.end(), {host, device});
    for (size_t i = 0; i < kPlaces; ++i) {
      free_places_.push_back({static_cast<std::byte*>(device.get()) + i * 2 * kBytes,
                              static_cast<std::byte*>(host.get()) + i * 2 * kBytes});
    }
  }
}

void HoldCheck::release(const std::vector<StreamHandle>& streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const StreamHandle stream : streams) {
    const auto found =
        std::find_if(needed_.begin(), needed_.end(), [&](const Needed& needed) { return needed.stream == stream; });
    if (found == needed_.end()) continue;
    free_places_.push_back(found->place);
    needed_.erase(found);
  }
}

HoldCheck::Answer HoldCheck::may_hold(StreamHandle stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  const Answer answer = ask_about(lock, stream);
  return answer == Answer::Yes ? ask_about_full_streams(lock) : answer;
}

HoldCheck::Answer HoldCheck::ask_about_full_streams(std::unique_lock<std::mutex>& lock) {
  const int fill = device_->more_than_a_stream_takes();
  if (fill == 0 || full_goes_on_) return Answer::Yes;
  if (full_vain_ == kAttempts) return Answer::Never;
  // Not with a stream of the program's, which may have much to do already. No stream is held yet, so one can be made.
  if (own_.empty()) own_.emplace_back(device_->make_stream());
  const StreamHandle stream = own_.back()->handle();
  switch (ask_about(lock, stream)) {
    case Answer::Yes:
      break;
    case Answer::NotNow:
      return Answer::NotNow;
    case Answer::Never:  // it shares a queue with one that is needed; another one may not
      if (own_.size() == kMostOwn) return Answer::Never;
      own_.emplace_back(device_->make_stream());
      return Answer::NotNow;
  }
  const Found found = try_hold({stream, known_[stream].place}, fill);
  full_goes_on_ = found == Found::GoesOn;
  if (found == Found::Stands) ++full_vain_;
  if (full_goes_on_) return Answer::Yes;
  return full_vain_ == kAttempts ? Answer::Never : Answer::NotNow;
}

HoldCheck::Answer HoldCheck::ask_about(std::unique_lock<std::mutex>& lock, StreamHandle stream) {
  if (const auto answer = known_answer(stream)) return *answer;
  make_places(lock, 1);
  if (const auto answer = known_answer(stream)) return *answer;
  Known& known = known_[stream];
  if (known.place.device == nullptr) {
    known.place = free_places_.back();
    free_places_.pop_back();
  }
  switch (try_hold({stream, known.place}, 0)) {
    case Found::GoesOn:
      known.vain = 0;
      known.answers = needs_;
      return Answer::Yes;
    case Found::Stands:
      ++known.vain;
      break;
    case Found::Busy:
      break;
  }
  return known.vain == kAttempts ? Answer::Never : Answer::NotNow;
}

std::optional<HoldCheck::Answer> HoldCheck::known_answer(StreamHandle stream) const {
  const auto found = known_.find(stream);
  if (found == known_.end()) return std::nullopt;
  if (found->second.vain == kAttempts) return Answer::Never;
  if (found->second.answers == needs_) return Answer::Yes;
  return std::nullopt;
}

HoldCheck::Found HoldCheck::try_hold(const Needed& held, int fill) {
  forget_finished();
  // All is made before anything is held, since what makes something may wait for all streams.
  const Events before = make_events();
  Events after = make_events();
  std::unique_ptr<DeviceEvent> behind = device_->make_event();
  for (size_t i = 0; i < needed_.size(); ++i) before[i]->record(needed_[i].stream);
  if (!reached_in_time(before)) return Found::Busy;
  try {
    const Found found = see_who_goes_on(held, fill, after, *behind);
    unfinished_.push_back(std::move(behind));
    if (found == Found::Busy) std::move(after.begin(), after.end(), std::back_inserter(unfinished_));
    return found;
  } catch (const std::system_error&) {
    lost_ = true;
    return Found::Busy;  // there can be no more threads
  } catch (...) {
    lost_ = true;
    throw;
  }
}

HoldCheck::Found HoldCheck::see_who_goes_on(const Needed& held, int fill, const Events& after, DeviceEvent& behind) {
  const std::shared_ptr<StreamGate> gate = device_->make_gate();
  const OpensLater later(gate, 5 * patience_);
  gate->hold(held.stream);
  // What waits behind the gate may be of any kind, and those kinds have queues of their own.
  give_small_work(held);
  // The filler's thread may be in a call yet when this is gone.
  StreamFiller filler(
      fill, [device = device_, own = own_, held] { give_small_kernel(*device, held.place.device, held.stream); });
  filler.wait_until_it_stands(patience_);
  const int given = filler.given();
  const bool was_tried = !gate->is_open() && (given != 0 || fill == 0);
  for (size_t i = 0; i < needed_.size(); ++i) {
    give_small_work(needed_[i]);
    after[i]->record(needed_[i].stream);
  }
  const bool reached = reached_in_time(after);
  const bool was_held = !gate->is_open();
  const bool was_full = filler.given() == given;
  gate->open();
  if (filler.stop(patience_)) {
    behind.record(held.stream);
  } else {
    lost_ = true;
  }
  if (reached && was_held) return was_tried && was_full ? Found::GoesOn : Found::Busy;
  // What goes on only now, the gate had kept; the rest has other work.
  return reached_in_time(after) && was_tried ? Found::Stands : Found::Busy;
}

HoldCheck::Events HoldCheck::make_events() const {
  Events events;
  for (size_t i = 0; i < needed_.size(); ++i) events.push_back(device_->make_event());
  return events;
}

bool HoldCheck::reached_in_time(const Events& events) const {
  const Deadline deadline = Deadline::after(patience_);
  try {
    for (const auto& event : events) wait_reached(*event, deadline, nullptr, "a stream");
    return true;
  } catch (const TimeoutError&) {
    return false;
  }
}

/// Copies there and back, and a kernel.
void HoldCheck::give_small_work(const Needed& needed) {
  const Place& place = needed.place;
  device_->copy(place.device, place.host, sizeof(float), needed.stream);
  give_small_kernel(*device_, place.device, needed.stream);
  device_->copy(place.host + kBytes, place.device + kBytes, sizeof(float), needed.stream);
}

void HoldCheck::forget_finished() noexcept {
  const auto reached = [](const std::unique_ptr<DeviceEvent>& event) {
    try {
      return event->reached();
    } catch (const DeviceError&) {
      return false;
    }
  };
  unfinished_.erase(std::remove_if(unfinished_.begin(), unfinished_.end(), reached), unfinished_.end());
}

}  // namespace ours
