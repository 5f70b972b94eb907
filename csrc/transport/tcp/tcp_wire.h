#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/siphash.h"
#include "common/socket_address.h"
#include "transport/tcp/tcp_config.h"
#include "transport/tcp/tcp_whereabouts.h"
#include "transport/topology.h"

// The messages between two ranks, and what they publish in the store. Everything that comes from the network is
// checked here: magic, version, kinds, lengths. Numbers travel in the byte order of the machine; the magic reveals a
// different one.

namespace ours {

constexpr uint32_t kTcpMagic = 0x7063746f;  // "otcp"
constexpr uint32_t kTcpVersion = 8;

using Nonce = std::array<uint8_t, 16>;

/// Bytes that describe a collective call. They must be equal on all ranks.
using Signature = std::array<uint8_t, 48>;

// --- handshake: the acceptor sends a challenge, the other side a hello, the acceptor a welcome -----------------------

struct Challenge {
  uint32_t magic = kTcpMagic;
  uint32_t version = kTcpVersion;
  Nonce nonce{};
};

struct Hello {
  uint32_t magic = kTcpMagic;
  uint32_t version = kTcpVersion;
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t stream = 0;
  uint32_t mesh = 0;  ///< of the acceptor, as on its card
  Nonce nonce{};
  uint64_t proof = 0;
};

enum class Verdict : uint32_t {
  Welcome = 0,
  Insists,  ///< the acceptor connects to the other side itself
};

struct Welcome {
  uint32_t magic = kTcpMagic;
  uint32_t version = kTcpVersion;
  Verdict verdict = Verdict::Welcome;
  uint32_t unused = 0;
  uint64_t proof = 0;
};

/// Proves that the sender knows the group's secret, and answers this challenge with this message.
uint64_t proof_of(const SipKey& secret, const Nonce& challenge, const Hello& hello);
uint64_t proof_of(const SipKey& secret, const Nonce& challenge, const Nonce& hello, const Welcome& welcome);

bool is_sound(const Challenge& challenge);
/// Whether it is a hello to rank `to` in a group of `size` ranks with `streams` streams, and its proof is right.
bool is_sound(const Hello& hello, const SipKey& secret, const Nonce& challenge, int to, int size, int streams);
bool is_sound(const Welcome& welcome, const SipKey& secret, const Nonce& challenge, const Nonce& hello);

// --- frames ----------------------------------------------------------------------------------------------------------

enum class FrameKind : uint8_t {
  Data = 1,  ///< of a collective; the only kind on data streams, and on those only
  Failure,   ///< the sender's group failed; the payload is the message
  Bye,       ///< the sender leaves in an orderly way; the payload is its reason, or nothing
  Agree,     ///< the sender is in call `call`, and has come to round `part`
  Waiting,   ///< the sender waits in call `call`; the payload names the ranks that are the cause
  Refused,   ///< the sender does not make the call that its users number `call`; the payload says why
  Monitor,   ///< the sender reached (or, rank 0, judged) monitored barrier number `call`
  Park,      ///< the sender would close its connections to the receiver (TcpParking); the payload is a ParkNotice
};

constexpr size_t kMaxFailureBytes = 8 * 1024;
constexpr size_t kMaxCauses = 256;

/// A rank that has made the call that a frame belongs to, and how long ago.
struct Arrived {
  uint32_t rank = UINT32_MAX;  ///< UINT32_MAX: none
  uint32_t us_ago = 0;
};

struct FrameHeader {
  uint32_t magic = kTcpMagic;
  FrameKind kind = FrameKind::Data;
  uint8_t detail = 0;  ///< of Failure: its kind; of Park: 0 means no; of Data: as the collective wants
  uint16_t phase = 0;  ///< of Data: the step of the algorithm
  uint32_t part = 0;   ///< of Data: the number of the chunk
  /// In Data frames: 0 if the payload follows; otherwise an engine moves it (TcpEnginePayloads), and this is its
  /// number there.
  uint32_t engine_number = 0;
  uint64_t call = 0;   ///< of Data: number of the call among the group's
  uint64_t total = 0;  ///< of Data: bytes of the whole message that this is a part of
  uint64_t bytes = 0;  ///< of the payload
  Signature signature{};
  /// In Data and Agree frames, for TcpLateness: the two ranks that came last to the call, as far as the sender knows.
  std::array<Arrived, 2> last{};
  uint64_t us_since_last_call = UINT64_MAX;  ///< since the sender's call before this one ended; UINT64_MAX: none had
  /// In Data and Agree frames: whether the sender knows of a rank that was asked to stop (StopNotice).
  uint64_t stop = 0;
};

static_assert(sizeof(Challenge) == 24 && sizeof(Hello) == 48 && sizeof(Welcome) == 24 && sizeof(FrameHeader) == 120);

/// The number of bytes that follow the header on its connection.
inline uint64_t following_bytes(const FrameHeader& header) { return header.engine_number == 0 ? header.bytes : 0; }

/// What is wrong with a header, or null. `data`: on a data stream.
const char* fault_of(const FrameHeader& header, bool data);

// --- published in the store ------------------------------------------------------------------------------------------

constexpr const char* kTermsKey = "terms";
std::string card_key(int rank);

/// How a rank can be reached.
struct TcpCard {
  std::string machine;  ///< equal on ranks that run under one kernel
  uint32_t mesh = 0;    ///< its number there, since the groups of a process share its addresses
  std::vector<SocketAddress> addresses;
  size_t paths = 1;  ///< how many of them, from the first on, share the data
  AskedPeer whereabouts;

  std::string text() const;
  /// Throws Error unless `text` is a card of this version.
  static TcpCard parse(const std::string& text);
};

/// What a rank says of its connections to a peer when it would close them.
struct ParkNotice {
  /// For each data stream, the number of frames sent and of those received.
  std::vector<uint64_t> frames;
  /// Where to connect again.
  TcpCard card;

  std::string text() const;
  /// Throws Error unless `text` is a notice about that many data streams.
  static ParkNotice parse(const std::string& text, size_t streams);
  /// Whether everything that either of the two ranks had sent has arrived.
  bool agrees_with(const ParkNotice& theirs) const;
};

/// The terms that rank 0 sets for its group, without the rules.
struct TcpTerms {
  SipKey secret{};
  TcpPlan plan;

  std::string text() const;
  static TcpTerms parse(const std::string& text);
};

}  // namespace ours
