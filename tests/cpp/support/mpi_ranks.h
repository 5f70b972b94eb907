#pragma once

#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "engines/mpi_meeting.h"
#include "support/testing.h"

// The ranks of these tests are processes, started by mpirun or mpiexec, or by a test that told them their rank and
// size (OURS_TEST_RANK, OURS_TEST_SIZE). They exchange keys in the folder OURS_TEST_KEYS. All run the same tests in
// the same order.

namespace ours::testing {

/// Keys as files of a folder.
class FileKeys final : public KeyValues {
 public:
  explicit FileKeys(std::string prefix) : prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::string& value) override {
    const std::string unfinished = path(key) + "." + std::to_string(getpid());
    std::ofstream(unfinished) << value;
    std::rename(unfinished.c_str(), path(key).c_str());
  }

  std::string get(const std::string& key, Deadline deadline) override {
    for (;;) {
      if (std::ifstream file(path(key)); file) {
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
      }
      if (deadline.passed()) throw TimeoutError("nobody set " + key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::string path(std::string key) const {
    for (char& c : key) {
      if (c == '/') c = '_';
    }
    return prefix_ + key;
  }

  const std::string prefix_;
};

inline std::string variable(const char* name, const char* otherwise = nullptr) {
  const char* value = std::getenv(name);
  if (value == nullptr && otherwise != nullptr) value = std::getenv(otherwise);
  return value == nullptr ? "" : value;
}

inline int world_rank() {
  const std::string told = variable("OURS_TEST_RANK");
  return told.empty() ? find_mpi_launcher().rank : std::stoi(told);
}

inline int world_size() {
  const std::string told = variable("OURS_TEST_SIZE", "OMPI_COMM_WORLD_SIZE");
  return std::stoi(told.empty() ? variable("PMI_SIZE") : told);
}

/// Keys of one group in one test.
inline std::shared_ptr<FileKeys> keys_of(const std::string& name) {
  return std::make_shared<FileKeys>(variable("OURS_TEST_KEYS") + "/" + name + "_");
}

inline Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

inline MpiMeeting meeting_of(const std::string& name, int rank, int size) {
  return {rank, size, name, keys_of(name), soon(), find_mpi_launcher()};
}

/// An engine of all processes.
inline std::unique_ptr<Engine> open_engine(const std::string& name) {
  return std::unique_ptr<Engine>(ours_open_mpi_engine(meeting_of(name, world_rank(), world_size())));
}

/// Starts MPI like a program that uses MPI itself.
inline void start_mpi(int level) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  CHECK_EQ(provided, level);
}

/// Returns when all processes have come here.
inline void meet(const std::string& name) {
  const auto keys = keys_of(name);
  keys->set(std::to_string(world_rank()), "");
  for (int rank = 0; rank < world_size(); ++rank) keys->get(std::to_string(rank), soon());
}

/// For tests that never end MPI; called before anything else. Some launchers then end the other processes, so all of
/// them first say how their test went.
inline void end_together() {
  std::atexit([] {
    std::fflush(stdout);
    meet("end");
  });
}

inline void finish(Engine::Transfer& transfer) {
  const Deadline deadline = soon();
  while (!transfer.done()) {
    if (deadline.passed()) throw TimeoutError("a transfer does not end");
  }
}

/// The message of that number from `from` to `to`.
inline std::vector<char> contents(int from, int to, uint32_t number, size_t bytes) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 31 + i / 251 + number * 7 + from * 3 + to);
  return data;
}

constexpr size_t kSizes[] = {0, 1, 4096, 4097, 65536, 256 << 10};

/// All ranks exchange messages of all sizes with each other, all under way at the same time.
inline void exchange_all(Engine& engine, int rank, int size, uint32_t first) {
  std::vector<std::vector<char>> sent, received, expected;
  std::vector<std::unique_ptr<Engine::Transfer>> transfers;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    uint32_t number = first;
    for (const size_t bytes : kSizes) {
      sent.push_back(contents(rank, peer, number, bytes));
      transfers.push_back(engine.send(peer, number, sent.back().data(), bytes));
      received.emplace_back(bytes, '?');
      expected.push_back(contents(peer, rank, number, bytes));
      transfers.push_back(engine.receive(peer, number, received.back().data(), bytes));
      ++number;
    }
  }
  for (const auto& transfer : transfers) finish(*transfer);
  CHECK(received == expected);
}

}  // namespace ours::testing
