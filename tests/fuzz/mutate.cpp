#include "fuzz/mutate.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace ours::fuzz {

namespace {

constexpr size_t kMostBytes = 8 * 1024;

/// A number at an edge of its type, where mistakes are.
uint64_t edge(Random& random) {
  const uint64_t power = uint64_t{1} << random() % 64;
  switch (random() % 4) {
    case 0:
      return power;
    case 1:
      return power - 1;
    case 2:
      return ~power + 1;
    default:
      return random();
  }
}

void change(Bytes& bytes, const Bytes& other, Random& random) {
  const size_t at = random() % (bytes.size() + 1);
  const size_t length = std::min<size_t>(random() % 32, bytes.size() - at);
  switch (random() % 7) {
    case 0:
      if (at < bytes.size()) bytes[at] = static_cast<char>(random());
      break;
    case 1:
      if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
      break;
    case 2:
      bytes.erase(at, length);
      break;
    case 3:
      bytes.insert(at, bytes.substr(at, length));
      break;
    case 4:
      bytes.insert(at, 1, static_cast<char>(random()));
      break;
    case 5: {
      const uint64_t number = edge(random);
      const size_t width = std::min<size_t>(size_t{1} << random() % 4, bytes.size() - at);
      if (width > 0) std::memcpy(&bytes[at], &number, width);
      break;
    }
    default:
      bytes.insert(at, other.substr(random() % (other.size() + 1), random() % 64));
      break;
  }
}

}  // namespace

Bytes mutate(const std::vector<Bytes>& seeds, Random& random) {
  Bytes bytes = seeds[random() % seeds.size()];
  for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
    change(bytes, seeds[random() % seeds.size()], random);
  }
  if (bytes.size() > kMostBytes) bytes.resize(kMostBytes);
  return bytes;
}

std::vector<Seed> read_seeds(const std::filesystem::path& place) {
  std::vector<Seed> seeds;
  const auto read = [&](const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    seeds.push_back({path.filename(), Bytes{std::istreambuf_iterator<char>(file), {}}});
  };
  if (std::filesystem::is_regular_file(place)) read(place);
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(place, missing)) read(entry.path());
  std::sort(seeds.begin(), seeds.end(), [](const Seed& a, const Seed& b) { return a.name < b.name; });
  return seeds;
}

}  // namespace ours::fuzz
