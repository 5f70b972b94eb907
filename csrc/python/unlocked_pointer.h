#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace ours {

/// A pointer in a holder of pybind11's, which drops its object without the GIL: the end of a Work, and that of the last
/// owner of another backend's group, may wait for threads that need the GIL.
template <class Pointer>
class UnlockedPointer {
 public:
  UnlockedPointer() = default;
  explicit UnlockedPointer(Pointer pointer) : pointer_(std::move(pointer)) {}
  UnlockedPointer(const UnlockedPointer&) = default;
  UnlockedPointer& operator=(const UnlockedPointer&) = default;
  UnlockedPointer(UnlockedPointer&&) noexcept = default;
  UnlockedPointer& operator=(UnlockedPointer&&) noexcept = default;
  ~UnlockedPointer() {
    if (!pointer_ || Py_IsInitialized() == 0 || PyGILState_Check() == 0) return;
    const pybind11::gil_scoped_release unlocked;
    pointer_ = Pointer();
  }
  auto* get() const { return pointer_.get(); }

 private:
  Pointer pointer_;
};

}  // namespace ours
