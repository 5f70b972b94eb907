#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/tcp/tcp_whereabouts.h"
#include "transport/tcp/tcp_wire.h"

// The packets of the roll call between machines (tcp_whereabouts.h). Whoever can reach the port can send any.

namespace ours {

struct RollQuestion {
  uint32_t magic = 0x6572656f;  // "oere"
  uint32_t version = 1;
  Nonce nonce{};        ///< of this asking
  uint64_t number = 0;  ///< which of the asked processes this one is
  uint64_t proof = 0;
};

struct RollAnswer {
  RollQuestion to;
  char text[952] = {};
  uint64_t proof = 0;
};

static_assert(sizeof(RollQuestion) == 40);
// A packet of the smallest kind of network, with room for what tunnels add.
static_assert(sizeof(RollAnswer) <= 1024);

/// A question to the process that has this key.
RollQuestion question_to(const SipKey& key, const Nonce& nonce, size_t number);
/// Whether its sender knows the key of the process that is asked.
bool is_sound(const RollQuestion& question, const SipKey& key);

/// An answer with as much of the text as there is room for.
RollAnswer answer_to(const RollQuestion& question, const SipKey& key, const std::string& text);
/// Whether one of `peers` gave it to a question with that nonce, and the question was for that process.
bool is_sound(const RollAnswer& answer, const Nonce& nonce, const std::vector<AskedPeer>& peers);
std::string text_of(const RollAnswer& answer);

}  // namespace ours
