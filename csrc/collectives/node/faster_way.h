#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/deadline.h"

namespace ours {

/// The class of `bytes` among `classes`: sizes from one power of two times `least` to the next are one, and the last
/// class has no end.
size_t size_class(size_t bytes, size_t least, size_t classes);

/// Measures two ways of doing the same thing, and says which is faster.
class FasterWay {
 public:
  /// Whether to take the second way in the next call; or in the one after it, if the caller always asks a call ahead.
  /// The slower way is tried again and again, more often in the beginning, and the more rarely the slower it is.
  bool next();

  /// What a call that did so much work took, done in the second way or not.
  void took(bool second, Clock::duration time, size_t work);

 private:
  /// The cheapest of the last calls counts, since others may have been interrupted.
  static constexpr size_t kKept = 4;

  struct Costs {
    std::array<double, kKept> ns{};  ///< a unit of work
    size_t known = 0;

    double cheapest() const;
  };

  std::array<Costs, 2> costs_;
  uint64_t calls_ = 0;
  uint64_t next_try_ = 0;
  double between_tries_ = 4;  ///< calls, if the other way is no slower
};

}  // namespace ours
