#include "fuzz/parser.h"
#include "transport/tcp/tcp_wire.h"

// What a peer says of its connections to this rank when it would close them, after a byte for the number of streams.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  TcpCard card;
  card.machine = "0c6d8d1e-6b6e-4c0b-9d6e-0f5b7f1f2a3b";
  card.addresses = {*SocketAddress::parse("10.0.0.1:20001")};
  const ParkNotice one{{3, 4}, card}, two{{0, 0, 1, 7}, card};
  return {{"one_stream", Bytes{1} + one.text()}, {"two_streams", Bytes{2} + two.text()}};
}

void parse(const Bytes& input) {
  if (input.empty()) return;
  const size_t streams = 1 + (static_cast<unsigned char>(input[0]) - 1U) % 16;
  const ParkNotice notice = ParkNotice::parse(input.substr(1), streams);
  require(notice.frames.size() == 2 * streams, "two numbers for each stream");
  require(!notice.card.addresses.empty(), "the peer can be reached");
  require(ParkNotice::parse(notice.text(), streams).text() == notice.text(), "what was understood can be written");
  require(notice.agrees_with(notice) == notice.agrees_with(ParkNotice::parse(notice.text(), streams)),
          "a notice compares alike whichever way it came");
}

const Registration registration("notice", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
