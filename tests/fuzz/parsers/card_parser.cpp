#include "fuzz/parser.h"
#include "transport/tcp/tcp_wire.h"

// How a rank can be reached, as it is published in the store.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  TcpCard card;
  card.machine = "0c6d8d1e-6b6e-4c0b-9d6e-0f5b7f1f2a3b";
  card.addresses = {*SocketAddress::parse("10.0.0.1:20001"), *SocketAddress::parse("[fd00::1]:20002")};
  const Bytes quiet = card.text();
  card.whereabouts = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, {*SocketAddress::parse("10.0.0.1:82")}};
  return {{"quiet", quiet}, {"full", card.text()}};
}

void parse(const Bytes& input) {
  const TcpCard card = TcpCard::parse(input);
  require(!card.addresses.empty(), "a card has an address");
  require(card.addresses.size() <= 64 && card.whereabouts.addresses.size() <= 64, "a card is short");
  for (const SocketAddress& address : card.addresses) require(address.port() != 0, "an address has a port");
  require(TcpCard::parse(card.text()).text() == card.text(), "what was understood can be written");
}

const Registration registration("card", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
