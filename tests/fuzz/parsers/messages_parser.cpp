#include <algorithm>
#include <array>
#include <deque>

#include "collectives/messages/inbox.h"
#include "common/error.h"
#include "fuzz/parser.h"

// The headers of messages that peers send to this rank, which posts receives meanwhile. Each step is a byte that says
// what happens, and what belongs to it.

namespace ours::fuzz {
namespace {

constexpr int kSize = 3;
constexpr size_t kMostWritten = 1 << 16;
enum Step : uint8_t { kReceive, kBegin, kComplete, kSteps };

/// A receive of `bytes` with a tag from a rank, kSize: any.
Bytes receive(uint8_t from, uint8_t tag, uint8_t bytes) {
  return {kReceive, static_cast<char>(from), static_cast<char>(tag), static_cast<char>(bytes)};
}

Bytes message(uint8_t from, const MessageHeader& header) {
  return Bytes{kBegin, static_cast<char>(from)} + bytes_of(header);
}

std::vector<Seed> seeds() {
  const auto float32 = static_cast<uint32_t>(DType::Float32);
  const Bytes complete{kComplete, 1};
  return {{"in_turn", receive(1, 0, 8) + message(1, {8, 0, float32}) + complete},
          {"early", receive(1, 1, 8) + message(1, {4, 0, float32}) + complete + receive(1, 0, 4) +
                        message(1, {8, 1, float32}) + complete},
          {"any_source", receive(kSize, 0, 12) + message(2, {12, 0, float32}) + Bytes{kComplete, 2}},
          {"endless", receive(1, 1, 8) + message(1, {uint64_t{1} << 62, 0, float32}) + complete}};
}

class Box {
 public:
  void receive(Source& source) {
    const int from = source.byte() % (kSize + 1);
    const int tag = source.byte();
    places_.emplace_back(source.byte());
    inbox_.add(std::make_shared<Message>(Op::Recv, places_.back().data(), places_.back().size(), DType::Float32,
                                         from == kSize ? kAnySource : from, tag, nullptr, nullptr));
  }

  void begin(Source& source) {
    const int from = source.byte() % kSize;
    auto header = source.value<MessageHeader>();
    // Sanitizers spend memory on what is only reserved, so a length is either moderate or beyond any machine.
    if (header.bytes > kMostWritten) header.bytes |= uint64_t{1} << 60;
    if (inbox_.is_arriving(from) || !inbox_.begin(from, header)) return;
    require(header.bytes <= kMostWritten, "no memory is promised that there is not");
    coming_[static_cast<size_t>(from)] = header.bytes;
  }

  void complete(Source& source) {
    const int from = source.byte() % kSize;
    if (!inbox_.is_arriving(from)) return;
    std::fill_n(inbox_.place(from), coming_[static_cast<size_t>(from)], std::byte{1});
    inbox_.complete(from);
    Messages ended;
    inbox_.collect(ended);
    for (const auto& one : ended) {
      require(std::count(one->data, one->data + one->bytes, std::byte{1}) == static_cast<ptrdiff_t>(one->bytes),
              "a receive that has ended has its message");
    }
  }

  void step(uint8_t what, Source& source) {
    switch (what % kSteps) {
      case kReceive:
        return receive(source);
      case kBegin:
        return begin(source);
      default:
        return complete(source);
    }
  }

 private:
  Inbox inbox_{0, kSize, [](int rank) { return "rank " + std::to_string(rank); }};
  std::deque<std::vector<std::byte>> places_;
  std::array<size_t, kSize> coming_{};
};

void parse(const Bytes& input) {
  Source source(input);
  Box box;
  while (!source.empty()) box.step(source.byte(), source);
}

const Registration registration("messages", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
