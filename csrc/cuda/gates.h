#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/driver.h"
#include "device/device.h"

namespace ours::cuda {

/// What gates are made of: words in pinned memory, for which streams wait by themselves (cuStreamWaitValue32), without
/// a kernel and without a thread. All of it is allocated when the device is opened: an allocation may wait for all of
/// the device's work, and so for a gate that the allocating thread was to open.
///
/// A word only grows, and a stream waits until it is at least what it waits for, in a comparison that is right across
/// the wrap-around. So a word can be used for the next gate as soon as the last is open, even if streams have not come
/// to their waits yet.
class GateWords : public std::enable_shared_from_this<GateWords> {
 public:
  /// To be called with the device's context. Tries whether streams can wait at all.
  explicit GateWords(CUcontext context);

  /// A gate in the order of calls. Throws DeviceError where too many are closed.
  std::unique_ptr<StreamGate> make_gate();

 private:
  friend class Gate;
  struct Word {
    uint32_t index = 0;
    uint32_t value = 0;  ///< that opens the gate
  };
  /// So many gates can be closed at a time; each is an operation under way.
  static constexpr size_t kWords = size_t{1} << 15;

  Word take();
  void open(Word word) noexcept;
  /// Throws DeviceError where streams cannot wait.
  void hold(Word word, StreamHandle stream) const;
  bool try_to_hold() const;

  CUcontext context_;
  bool can_hold_ = false;
  /// Never freed: streams may wait for it until the process ends. It is not CUDA's, whose memory is gone before the
  /// last gates are opened then.
  uint32_t* host_ = nullptr;
  CUdeviceptr device_ = 0;
  std::mutex mutex_;
  std::vector<Word> free_;  ///< with the value that the word has
};

}  // namespace ours::cuda
