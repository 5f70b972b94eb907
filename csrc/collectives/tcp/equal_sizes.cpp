#include "collectives/tcp/equal_sizes.h"

#include <algorithm>
#include <cstring>

namespace ours {

namespace {

/// The phase of the first tables of sizes; later ones count down, while the phases of blocks count up from 0.
constexpr uint16_t kSizes = UINT16_MAX;

}  // namespace

std::string sizes_differ(const std::string& a, uint64_t bytes_a, const std::string& b, uint64_t bytes_b,
                         const std::string& from, const CallRecord& record) {
  return a + " expects " + std::to_string(bytes_a) + " bytes from " + from + ", " + b + " expects " +
         std::to_string(bytes_b) + " bytes, in " + describe_record(record) +
         ". Make the sizes of the tensors agree on all ranks";
}

void compare_sizes(const Members& members, const std::vector<uint64_t>& sizes, const CallRecord& record) {
  TcpCall& tcp = members.tcp;
  const size_t bytes = sizes.size() * sizeof(uint64_t);
  std::byte* const ours = tcp.keep(bytes);
  std::byte* const incoming = tcp.keep(bytes);
  std::memcpy(ours, sizes.data(), bytes);
  std::vector<uint64_t> theirs(sizes.size());
  uint16_t phase = kSizes;
  for (size_t distance = 1; distance < members.size(); distance *= 2, --phase) {
    const int before = members.rank_at(members.place + members.size() - distance);
    Tally tally;
    tcp.send({members.rank_at(members.place + distance), phase, bytes}, ours, tally);
    tcp.receive({before, phase, bytes}, incoming, tally);
    members.wait([&] { return tally.complete(); });
    std::memcpy(theirs.data(), incoming, bytes);
    const auto differs = std::mismatch(sizes.begin(), sizes.end(), theirs.begin());
    if (differs.first == sizes.end()) continue;
    const auto from = static_cast<int>(differs.first - sizes.begin());
    tcp.mismatch(sizes_differ(tcp.describe(members.rank_at(members.place)), *differs.first, tcp.describe(before),
                              *differs.second, tcp.describe(from), record));
  }
}

}  // namespace ours
