#pragma once

#include <atomic>
#include <cstdint>

namespace ours {

/// Which of a queue's collectives told all ranks that one of them had been asked to stop. Only those count in which
/// every rank hears from every other, since only for these do all ranks come to the same answer. Numbers are the
/// queue's.
class StopRecord {
 public:
  void note_called(uint64_t number) { called_.store(number); }
  void note_ended(uint64_t number, bool told) {
    uint64_t none = 0;
    if (told) first_told_.compare_exchange_strong(none, number);
    ended_.store(number);
  }

  /// The last one that has been called; 0: none.
  uint64_t last_called() const { return called_.load(); }
  bool has_ended(uint64_t number) const { return ended_.load() >= number; }
  /// Whether one up to that number told.
  bool told_by(uint64_t number) const {
    const uint64_t first = first_told_.load();
    return first != 0 && first <= number;
  }

 private:
  std::atomic<uint64_t> called_{0};
  std::atomic<uint64_t> ended_{0};
  std::atomic<uint64_t> first_told_{0};
};

}  // namespace ours
