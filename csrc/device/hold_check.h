#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/device.h"

namespace ours {

/// Finds out which streams a gate may hold. Streams share queues of the hardware, and what is given to a stream later
/// than a hold waits behind it where they share one (CUDA's guide on CUDA_DEVICE_MAX_CONNECTIONS, and the warning in
/// the reference of cuStreamWaitValue32). Were that the work that opens the gate, nothing would ever go on. Nor would
/// it where a thread that gives more to the held stream than that takes keeps all threads from giving anything to any.
class HoldCheck {
 public:
  enum class Answer {
    Yes,
    NotNow,  ///< they did not get on in time
    Never,   ///< NotNow so often, though they had nothing else to do, that nobody asks again
  };
  static constexpr int kAttempts = 3;

  /// The one of that device, for all who use it.
  static std::shared_ptr<HoldCheck> of(const std::shared_ptr<Device>& device);

  /// `patience` is what the needed streams have to end what they do, and again to do something small.
  HoldCheck(std::shared_ptr<Device> device, std::chrono::milliseconds patience);
  /// Memory that the device may still write is kept for ever.
  ~HoldCheck();
  HoldCheck(const HoldCheck&) = delete;
  HoldCheck& operator=(const HoldCheck&) = delete;

  /// From now on, until they are released, these streams must go on. They are used here until then.
  void need(const std::vector<StreamHandle>& streams);
  void release(const std::vector<StreamHandle>& streams);

  /// Whether those that are needed go on while `stream` is held. Holds it for a moment to find out, once if they do,
  /// and again when others are needed.
  Answer may_hold(StreamHandle stream);

 private:
  enum class Found { GoesOn, Stands, Busy };
  using Events = std::vector<std::unique_ptr<DeviceEvent>>;
  /// For the small work of one stream: two streams write nothing at once.
  struct Place {
    std::byte* device = nullptr;
    std::byte* host = nullptr;
  };
  struct Needed {
    StreamHandle stream;
    Place place;
  };
  struct Known {
    Place place;
    int vain = 0;        ///< attempts
    size_t answers = 0;  ///< that many of `needs_` when the answer was Yes
  };

  Answer ask_about(std::unique_lock<std::mutex>& lock, StreamHandle stream);
  /// The same for all streams: whether others get on while one that is held has more than it takes.
  Answer ask_about_full_streams(std::unique_lock<std::mutex>& lock);
  std::optional<Answer> known_answer(StreamHandle stream) const;
  /// So many free places at least. Lets go of the lock of `mutex_` meanwhile.
  void make_places(std::unique_lock<std::mutex>& lock, size_t count);
  /// `fill`: so many small kernels more come behind the gate.
  Found try_hold(const Needed& held, int fill);
  /// With `before` reached: gives small work to the stream that is held, and to those that are needed.
  Found see_who_goes_on(const Needed& held, int fill, const Events& after, DeviceEvent& behind);
  Events make_events() const;
  bool reached_in_time(const Events& events) const;
  void give_small_work(const Needed& needed);
  void forget_finished() noexcept;

  const std::shared_ptr<Device> device_;
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;                           // guards all below
  std::vector<std::shared_ptr<void>> memory_;  // given back at the end
  std::vector<Place> free_places_;             // in that memory
  std::vector<Needed> needed_;                 // with one entry for each need()
  size_t needs_ = 0;                           // how often need() was called
  std::map<StreamHandle, Known> known_;
  std::vector<std::shared_ptr<DeviceStream>> own_;  // the last one is filled, those before were of no use
  bool full_goes_on_ = false;
  int full_vain_ = 0;  // attempts
  Events unfinished_;  // behind small work that was not awaited
  bool lost_ = false;  // whether there may be small work that nothing is known of
};

}  // namespace ours
