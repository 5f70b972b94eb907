#include "fuzz/parser.h"
#include "transport/tcp/tcp_wire.h"

// The three messages of a handshake, told apart by their lengths. The last byte says whether the sender knows the
// secret: if so, the proof is made right before the message is judged. It also says which byte is changed after that.

namespace ours::fuzz {
namespace {

const SipKey kSecret = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
const Nonce kChallenge = {16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1};
constexpr int kRank = 1, kSize = 4, kStreams = 3;

Hello hello_of(uint32_t from, uint32_t stream) {
  Hello hello;
  hello.from = from;
  hello.to = kRank;
  hello.stream = stream;
  hello.nonce = kSecret;  // any
  hello.proof = proof_of(kSecret, kChallenge, hello);
  return hello;
}

Welcome welcome_of() {
  Welcome welcome;
  welcome.proof = proof_of(kSecret, kChallenge, kSecret, welcome);
  return welcome;
}

std::vector<Seed> seeds() {
  return {{"hello", bytes_of(hello_of(0, 0)) + '\0'},
          {"last_hello", bytes_of(hello_of(3, 2)) + '\1'},
          {"welcome", bytes_of(welcome_of()) + '\0'},
          {"challenge", bytes_of(Challenge{kTcpMagic, kTcpVersion, kChallenge}) + '\0'}};
}

void judge_hello(Hello hello, bool knows, size_t flipped) {
  if (knows) hello.proof = proof_of(kSecret, kChallenge, hello);
  if (!is_sound(hello, kSecret, kChallenge, kRank, kSize, kStreams)) return;
  require(hello.from < kSize && hello.from != kRank && hello.to == kRank && hello.stream < kStreams,
          "a hello comes from another rank of the group, for one of its streams");
  // The fuzzer sees the proofs that are compared, as nobody else does, so it may find the right one.
  Bytes other = bytes_of(hello);
  other[flipped % sizeof(Hello)] = static_cast<char>(other[flipped % sizeof(Hello)] ^ 1);
  require(!is_sound(Source(other).value<Hello>(), kSecret, kChallenge, kRank, kSize, kStreams),
          "each byte of a hello is proved");
}

void parse(const Bytes& input) {
  Source source(input);
  const bool knows = !input.empty() && (input.back() & 1) != 0;
  if (input.size() == sizeof(Hello) + 1) {
    judge_hello(source.value<Hello>(), knows, static_cast<uint8_t>(input.back()) >> 1);
  } else if (input.size() == sizeof(Welcome) + 1) {
    const auto welcome = source.value<Welcome>();
    const bool sound = is_sound(welcome, kSecret, kChallenge, kSecret);
    require(!sound || bytes_of(welcome) == bytes_of(welcome_of()), "a welcome is believed only as it was said");
  } else if (input.size() == sizeof(Challenge) + 1) {
    const auto challenge = source.value<Challenge>();
    require(is_sound(challenge) == (challenge.magic == kTcpMagic && challenge.version == kTcpVersion),
            "a challenge has the version of this package");
  }
}

const Registration registration("hello", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
