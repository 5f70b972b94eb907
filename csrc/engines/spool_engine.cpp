#include "engines/spool_engine.h"

#include <unistd.h>

#include <fstream>
#include <system_error>

#include "common/error.h"

namespace ours {

namespace fs = std::filesystem;

struct SpoolEngine::Sent final : Engine::Transfer {
  bool done() override { return true; }  // the message is in its file
};

struct SpoolEngine::Received final : Engine::Transfer {
  Received(fs::path file, void* data, size_t bytes) : file(std::move(file)), data(data), bytes(bytes) {}

  bool done() override {
    if (read) return true;
    std::ifstream in(file, std::ios::binary);
    if (!in) return false;
    in.read(static_cast<char*>(data), static_cast<std::streamsize>(bytes));
    if (static_cast<size_t>(in.gcount()) != bytes) throw Error(file.string() + " is shorter than its message");
    fs::remove(file);
    read = true;
    return true;
  }

  const fs::path file;
  void* const data;
  const size_t bytes;
  bool read = false;
};

SpoolEngine::~SpoolEngine() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("to" + std::to_string(rank_) + "-", 0) == 0) fs::remove(entry.path(), ignored);
  }
  fs::remove(folder_, ignored);  // the last rank finds it empty
}

fs::path SpoolEngine::file(int from, int to, uint32_t number) const {
  return folder_ / ("to" + std::to_string(to) + "-" + std::to_string(from) + "-" + std::to_string(number));
}

std::unique_ptr<Engine::Transfer> SpoolEngine::send(int peer, uint32_t number, const void* data, size_t bytes) {
  const fs::path whole = file(rank_, peer, number);
  fs::path part = whole;
  part += ".part";
  {
    std::ofstream out(part, std::ios::binary);
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    if (!out.flush()) throw Error("cannot write " + part.string() + "; is the disk full?");
  }
  fs::rename(part, whole);  // a peer sees the whole message or none
  return std::make_unique<Sent>();
}

std::unique_ptr<Engine::Transfer> SpoolEngine::receive(int peer, uint32_t number, void* data, size_t bytes) {
  return std::make_unique<Received>(file(peer, rank_, number), data, bytes);
}

std::shared_ptr<Engine> make_spool_engine(int rank, const std::shared_ptr<KeyValues>& keys, Deadline deadline) {
  if (rank == 0) {
    std::string folder = (fs::temp_directory_path() / "ours-spool-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) throw Error("cannot make " + folder);
    keys->set("folder", folder);
  }
  return std::make_shared<SpoolEngine>(rank, keys->get("folder", deadline));
}

}  // namespace ours
