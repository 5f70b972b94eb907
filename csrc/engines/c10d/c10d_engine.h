#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "transport/engine.h"

namespace ours {

/// Lets any torch.distributed backend that sends from CPU memory serve as an engine.
///
/// Such a backend reports the end of a message only to a thread that waits for it. So there are threads that wait: one
/// for each peer and direction, for one message after another. They start when they are needed and end when the engine
/// is closed.
class C10dEngine final : public Engine {
 public:
  /// `ends_at_once`: an aborted message no longer touches its memory, and neither aborting nor the end of the backend
  /// waits for peers. Otherwise messages are copied to and from memory of their own, which outlives them.
  C10dEngine(std::string name, c10::intrusive_ptr<c10d::Backend> backend, bool ends_at_once);
  ~C10dEngine() override;

  std::string name() const override { return name_; }
  std::unique_ptr<Engine::Transfer> send(int peer, uint32_t number, const void* data, size_t bytes) override;
  std::unique_ptr<Engine::Transfer> receive(int peer, uint32_t number, void* data, size_t bytes) override;
  void set_waker(std::function<void()> wake) override;
  bool polls() const override { return false; }
  void close() noexcept override;

 private:
  struct Job;
  struct Waker;
  class Line;
  class Transfer;

  c10d::Backend& backend() const;
  std::unique_ptr<Engine::Transfer> follow(int peer, bool sends, std::shared_ptr<Job> job);

  const std::string name_;
  const bool ends_at_once_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<Waker> waker_;
  std::map<std::pair<int, bool>, std::shared_ptr<Line>> lines_;
};

}  // namespace ours
