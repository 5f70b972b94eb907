#include "fuzz/parser.h"
#include "transport/tcp/tcp_whereabouts_wire.h"

// The packets by which ranks ask each other where they are, which anyone may send to them. No sender that does not know
// the key is believed.

namespace ours::fuzz {
namespace {

const SipKey kKey = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
const Nonce kNonce = {16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1};

std::vector<Seed> seeds() {
  const RollQuestion question = question_to(kKey, kNonce, 1);
  return {{"question", bytes_of(question)},
          {"answer", bytes_of(answer_to(question, kKey, "is at train.py:41 in load"))},
          {"long_answer", bytes_of(answer_to(question, kKey, std::string(2000, 'x')))}};
}

void parse(const Bytes& input) {
  Source source(input);
  if (input.size() == sizeof(RollQuestion)) {
    const auto question = source.value<RollQuestion>();
    if (!is_sound(question, kKey)) return;
    const RollQuestion genuine = question_to(kKey, question.nonce, question.number);
    require(bytes_of(genuine) == input, "a question is believed only as it was asked");
    return;
  }
  if (input.size() != sizeof(RollAnswer)) return;  // as recvfrom() does
  const std::vector<AskedPeer> peers(3, AskedPeer{kKey, {}});
  const auto answer = source.value<RollAnswer>();
  require(text_of(answer).size() <= sizeof(answer.text), "a text ends where it should");
  if (!is_sound(answer, kNonce, peers)) return;
  RollAnswer other = answer;
  other.text[answer.to.nonce[0] % sizeof(other.text)] ^= 1;
  require(!is_sound(other, kNonce, peers), "each byte of an answer is proved");
}

const Registration registration("whereabouts", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
