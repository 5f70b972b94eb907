#include "transport/tcp/tcp_whereabouts_wire.h"

#include <cstring>

#include "common/printable.h"
#include "common/whole_characters.h"

namespace ours {

namespace {

/// Proves that the sender knows the key of the process that is asked.
template <class Message>
uint64_t proof_by(const SipKey& key, Message message) {
  message.proof = 0;
  return siphash(key, &message, sizeof(message));
}

}  // namespace

RollQuestion question_to(const SipKey& key, const Nonce& nonce, size_t number) {
  RollQuestion question;
  question.nonce = nonce;
  question.number = number;
  question.proof = proof_by(key, question);
  return question;
}

bool is_sound(const RollQuestion& question, const SipKey& key) {
  constexpr RollQuestion kOurs{};
  return question.magic == kOurs.magic && question.version == kOurs.version &&
         question.proof == proof_by(key, question);
}

RollAnswer answer_to(const RollQuestion& question, const SipKey& key, const std::string& text) {
  RollAnswer answer;
  answer.to = question;
  std::memcpy(answer.text, text.data(), whole_characters(text, sizeof(answer.text) - 1));
  answer.proof = proof_by(key, answer);
  return answer;
}

bool is_sound(const RollAnswer& answer, const Nonce& nonce, const std::vector<AskedPeer>& peers) {
  return answer.to.nonce == nonce && answer.to.number < peers.size() &&
         answer.proof == proof_by(peers[answer.to.number].key, answer);
}

std::string text_of(const RollAnswer& answer) {
  return printable({answer.text, ::strnlen(answer.text, sizeof(answer.text))});
}

}  // namespace ours
