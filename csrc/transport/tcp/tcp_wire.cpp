#include "transport/tcp/tcp_wire.h"

#include <cstring>
#include <sstream>

#include "common/error.h"

namespace ours {

namespace {

constexpr size_t kMaxText = 8 * 1024;
constexpr size_t kMaxAddresses = 64;
constexpr size_t kMaxChunk = size_t{1} << 30;

std::string tag_of_version() { return "ours-tcp" + std::to_string(kTcpVersion); }

template <class Message>
uint64_t proof(const SipKey& secret, const Nonce& challenge, const Nonce& hello, Message message) {
  message.proof = 0;
  std::array<uint8_t, 2 * sizeof(Nonce) + sizeof(Message)> bytes;
  std::memcpy(bytes.data(), challenge.data(), sizeof(Nonce));
  std::memcpy(bytes.data() + sizeof(Nonce), hello.data(), sizeof(Nonce));
  std::memcpy(bytes.data() + 2 * sizeof(Nonce), &message, sizeof(Message));
  return siphash(secret, bytes.data(), bytes.size());
}

std::string text_of(const SipKey& key) {
  std::ostringstream out;
  out << std::hex;
  for (const uint8_t byte : key) out << (byte >> 4) << (byte & 15);
  return out.str();
}

/// Whether `text` is one that text_of() returns, of this key.
bool parse_key(const std::string& text, SipKey& key) {
  if (text.size() != 2 * key.size() || text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  for (size_t i = 0; i < key.size(); ++i) {
    key[i] = static_cast<uint8_t>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
  }
  return true;
}

[[noreturn]] void malformed(const char* what) {
  throw Error(std::string("malformed ") + what +
              " in the store (not shown: it holds a secret); do all ranks use one version of this package, and no "
              "other program the same store?");
}

}  // namespace

uint64_t proof_of(const SipKey& secret, const Nonce& challenge, const Hello& hello) {
  return proof(secret, challenge, hello.nonce, hello);
}

uint64_t proof_of(const SipKey& secret, const Nonce& challenge, const Nonce& hello, const Welcome& welcome) {
  return proof(secret, challenge, hello, welcome);
}

bool is_sound(const Challenge& challenge) { return challenge.magic == kTcpMagic && challenge.version == kTcpVersion; }

bool is_sound(const Hello& hello, const SipKey& secret, const Nonce& challenge, int to, int size, int streams) {
  return hello.magic == kTcpMagic && hello.version == kTcpVersion && hello.to == static_cast<uint32_t>(to) &&
         hello.from < static_cast<uint32_t>(size) && hello.from != hello.to &&
         hello.stream < static_cast<uint32_t>(streams) && hello.proof == proof_of(secret, challenge, hello);
}

bool is_sound(const Welcome& welcome, const SipKey& secret, const Nonce& challenge, const Nonce& hello) {
  return welcome.magic == kTcpMagic && welcome.version == kTcpVersion && welcome.verdict <= Verdict::Insists &&
         welcome.proof == proof_of(secret, challenge, hello, welcome);
}

const char* fault_of(const FrameHeader& header, bool data) {
  if (header.magic != kTcpMagic) return "it does not begin as a message does";
  if (header.engine_number != 0 && header.kind != FrameKind::Data) return "no data, and yet not here";
  switch (header.kind) {
    case FrameKind::Data:
      if (!data) return "data on the connection for control";
      return header.bytes > header.total ? "a part is longer than the whole" : nullptr;
    case FrameKind::Failure:
    case FrameKind::Refused:
    case FrameKind::Bye:
      if (header.bytes > kMaxFailureBytes) return "a failure's message is too long";
      break;
    case FrameKind::Park:
      if (header.bytes > kMaxText) return "a notice about connections is too long";
      break;
    case FrameKind::Waiting:
      if (header.bytes > kMaxCauses * sizeof(uint32_t) || header.bytes % sizeof(uint32_t) != 0) {
        return "a list of ranks has a wrong length";
      }
      break;
    case FrameKind::Agree:
    case FrameKind::Monitor:
      if (header.bytes != 0) return "a message that should be empty is not";
      break;
    default:
      return "a message of unknown kind";
  }
  return data ? "control on a connection for data" : nullptr;
}

std::string card_key(int rank) { return "card/" + std::to_string(rank); }

std::string TcpCard::text() const {
  std::ostringstream out;
  out << tag_of_version() << ' ' << machine << ' ' << text_of(whereabouts.key) << ' ' << mesh << ' ' << addresses.size()
      << ' ' << paths;
  for (const auto* list : {&addresses, &whereabouts.addresses}) {
    for (const SocketAddress& address : *list) out << ' ' << address.text();
  }
  return out.str();
}

TcpCard TcpCard::parse(const std::string& text) {
  TcpCard card;
  std::istringstream in(text.size() <= kMaxText ? text : "");
  std::string tag, key;
  size_t count = 0;
  in >> tag >> card.machine >> key >> card.mesh >> count >> card.paths;
  if (!in || tag != tag_of_version() || card.paths == 0 || card.paths > count ||
      !parse_key(key, card.whereabouts.key)) {
    malformed("card of a rank");
  }
  for (std::string word; in >> word;) {
    const auto address = SocketAddress::parse(word);
    auto& list = card.addresses.size() < count ? card.addresses : card.whereabouts.addresses;
    if (!address || address->port() == 0 || list.size() == kMaxAddresses) malformed("card of a rank");
    list.push_back(*address);
  }
  if (card.addresses.size() < count) malformed("card of a rank");
  return card;
}

std::string ParkNotice::text() const {
  std::ostringstream out;
  for (const uint64_t count : frames) out << count << ' ';
  out << card.text();
  return out.str();
}

ParkNotice ParkNotice::parse(const std::string& text, size_t streams) {
  ParkNotice notice;
  std::istringstream in(text.size() <= kMaxText ? text : "");
  notice.frames.resize(2 * streams);
  for (uint64_t& count : notice.frames) in >> count;
  std::string card;
  if (!std::getline(in >> std::ws, card)) malformed("notice about connections");
  notice.card = TcpCard::parse(card);
  return notice;
}

bool ParkNotice::agrees_with(const ParkNotice& theirs) const {
  bool agrees = frames.size() == theirs.frames.size();
  for (size_t i = 0; agrees && i < frames.size(); i += 2) {
    agrees = frames[i] == theirs.frames[i + 1] && frames[i + 1] == theirs.frames[i];
  }
  return agrees;
}

std::string TcpTerms::text() const {
  std::ostringstream out;
  out << tag_of_version() << ' ' << text_of(secret) << ' ' << plan.streams << ' ' << plan.chunk_bytes << ' '
      << static_cast<int>(plan.wire);
  return out.str();
}

TcpTerms TcpTerms::parse(const std::string& text) {
  TcpTerms terms;
  std::istringstream in(text.size() <= kMaxText ? text : "");
  std::string tag, secret;
  int wire = 0;
  in >> tag >> secret >> terms.plan.streams >> terms.plan.chunk_bytes >> wire;
  if (!in || tag != tag_of_version() || !parse_key(secret, terms.secret) || terms.plan.streams < 1 ||
      terms.plan.streams > 16 || terms.plan.chunk_bytes < 64 || terms.plan.chunk_bytes > kMaxChunk ||
      terms.plan.chunk_bytes % 64 != 0 || wire < 0 || wire > static_cast<int>(WireType::Float16)) {
    malformed("terms of a group");
  }
  terms.plan.wire = static_cast<WireType>(wire);
  return terms;
}

}  // namespace ours
