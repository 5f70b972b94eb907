#include "transport/tcp/tcp_wire.h"

#include <random>
#include <string>

#include "common/error.h"
#include "support/testing.h"
#include "transport/tcp/tcp_handshake.h"

namespace ours::testing {
namespace {

TEST(headers_from_the_wire_are_checked) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    FrameHeader header;
    header.kind = static_cast<FrameKind>(random() % 10);
    header.bytes = random() >> (random() % 64);
    header.total = random() >> (random() % 64);
    const bool data = i % 2 == 0;
    if (fault_of(header, data) != nullptr) continue;
    CHECK_EQ(data, header.kind == FrameKind::Data);
    CHECK(data ? header.bytes <= header.total : header.bytes <= kMaxFailureBytes);
  }
  FrameHeader foreign;
  foreign.magic = __builtin_bswap32(kTcpMagic);
  CHECK(fault_of(foreign, true) != nullptr);
}

TEST(a_welcome_of_another_version_is_refused) {
  const SipKey secret = draw_nonce();
  const Nonce challenge = draw_nonce(), hello = draw_nonce();
  Welcome welcome;
  welcome.proof = proof_of(secret, challenge, hello, welcome);
  CHECK(is_sound(welcome, secret, challenge, hello));
  welcome.verdict = static_cast<Verdict>(2);
  welcome.proof = proof_of(secret, challenge, hello, welcome);
  CHECK(!is_sound(welcome, secret, challenge, hello));
  welcome.verdict = Verdict::Insists;
  ++welcome.version;
  welcome.proof = proof_of(secret, challenge, hello, welcome);
  CHECK(!is_sound(welcome, secret, challenge, hello));
}

TEST(what_lies_in_the_store_is_checked) {
  TcpCard card;
  card.machine = "abc";
  card.mesh = 3;
  card.addresses = {*SocketAddress::parse("10.0.0.1:80"), *SocketAddress::parse("[fd00::1]:81")};
  card.whereabouts = {draw_nonce(), {*SocketAddress::parse("10.0.0.1:82")}};
  CHECK_EQ(TcpCard::parse(card.text()).text(), card.text());
  TcpTerms terms;
  terms.secret = draw_nonce();
  terms.plan.streams = 3;
  CHECK(TcpTerms::parse(terms.text()).secret == terms.secret);
  CHECK_EQ(TcpTerms::parse(terms.text()).plan.streams, 3);
  std::mt19937 random(9);
  for (const std::string& good : {card.text(), terms.text()}) {
    for (int i = 0; i < 500; ++i) {
      std::string bad = good.substr(0, random() % good.size());
      if (!bad.empty()) bad[random() % bad.size()] = static_cast<char>(random());
      try {
        (void)TcpCard::parse(bad);
        (void)TcpTerms::parse(bad);
      } catch (const Error&) {
        continue;  // as it should
      }
    }
  }
  CHECK_THROWS(Error, TcpCard::parse(""));
  CHECK_THROWS(Error, TcpCard::parse("ours-tcp6 machine"));
  CHECK_THROWS(Error, TcpCard::parse(card.text() + std::string(1 << 20, ' ')));
  CHECK_THROWS(Error, TcpTerms::parse("ours-tcp6 00 1 4096 1024 16"));
  terms.plan.chunk_bytes = ~size_t{63};  // which a stream reads from "-64" as well
  CHECK_THROWS(Error, TcpTerms::parse(terms.text()));
}

TEST(a_notice_about_connections_survives_the_wire) {
  ParkNotice notice;
  notice.frames = {7, 0, UINT64_MAX, 3};
  notice.card.machine = "machine";
  notice.card.mesh = 5;
  notice.card.addresses = {*SocketAddress::parse("10.0.0.1:20001")};
  const ParkNotice same = ParkNotice::parse(notice.text(), 2);
  CHECK(same.frames == notice.frames);
  CHECK_EQ(same.card.text(), notice.card.text());

  ParkNotice theirs = notice;
  CHECK(!notice.agrees_with(theirs));
  theirs.frames = {0, 7, 3, UINT64_MAX};
  CHECK(notice.agrees_with(theirs));
  theirs.frames[0] = 1;  // it has sent something that has not arrived
  CHECK(!notice.agrees_with(theirs));

  CHECK_THROWS(Error, ParkNotice::parse(notice.text(), 1));
  CHECK_THROWS(Error, ParkNotice::parse(notice.text(), 3));
  CHECK_THROWS(Error, ParkNotice::parse("1 2 3 4", 2));
  CHECK_THROWS(Error, ParkNotice::parse("", 2));
}

}  // namespace
}  // namespace ours::testing
