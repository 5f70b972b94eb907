#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "common/deadline.h"
#include "transport/engine.h"
#include "transport/key_values.h"

namespace ours {

/// Sends messages as files in a folder that all nodes share.
class SpoolEngine final : public Engine {
 public:
  SpoolEngine(int rank, std::filesystem::path folder) : rank_(rank), folder_(std::move(folder)) {}
  ~SpoolEngine() override;

  std::string name() const override { return "spool (" + folder_.string() + ")"; }
  std::unique_ptr<Engine::Transfer> send(int peer, uint32_t number, const void* data, size_t bytes) override;
  std::unique_ptr<Engine::Transfer> receive(int peer, uint32_t number, void* data, size_t bytes) override;
  void set_waker(std::function<void()> /*wake*/) override {}
  bool polls() const override { return true; }
  void close() noexcept override {}

 private:
  struct Sent;
  struct Received;

  std::filesystem::path file(int from, int to, uint32_t number) const;

  const int rank_;
  const std::filesystem::path folder_;
};

/// Rank 0 makes the folder and tells the other ranks its name. Throws Error if that fails, and TimeoutError.
std::shared_ptr<Engine> make_spool_engine(int rank, const std::shared_ptr<KeyValues>& keys, Deadline deadline);

}  // namespace ours
