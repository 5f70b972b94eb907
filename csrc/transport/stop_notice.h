#pragma once

#include <atomic>

namespace ours {

/// Whether any rank had been asked to stop when its part of a call began, as far as this rank knows. The notice travels
/// with the call: every synchronisation and every message shows what its sender knows, and the receiver takes it in
/// before it uses the data. So whoever has a result that depends on all ranks' data knows of all ranks.
class StopNotice {
 public:
  /// `asked`: this rank has been. It must not change during the call, so that all ranks come to the same answer.
  explicit StopNotice(bool asked) : known_(asked) {}

  /// What to show the peers.
  bool show() {
    shown_.store(true, std::memory_order_relaxed);
    return known_.load(std::memory_order_relaxed);
  }
  /// After the call: whether a rank had been asked, or false if the call carried no notice.
  bool told() const { return shown_.load(std::memory_order_relaxed) && known_.load(std::memory_order_relaxed); }
  void hear(bool known) {
    if (known) known_.store(true, std::memory_order_relaxed);
  }

 private:
  // Relaxed, because the mesh's lock or a synchronisation lies between a message's arrival and what follows from it.
  // Atomic, because the thread that moves a mesh's data need not be the one that synchronises the node.
  std::atomic<bool> known_;
  std::atomic<bool> shown_{false};
};

}  // namespace ours
