#include "common/siphash.h"

namespace ours {

namespace {

uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

/// Up to 8 bytes, the first one lowest.
uint64_t load(const uint8_t* data, size_t bytes) {
  uint64_t word = 0;
  for (size_t i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(data[i]) << (8 * i);
  return word;
}

struct State {
  uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1;
    v1 = rotate(v1, 13) ^ v0;
    v0 = rotate(v0, 32);
    v2 += v3;
    v3 = rotate(v3, 16) ^ v2;
    v0 += v3;
    v3 = rotate(v3, 21) ^ v0;
    v2 += v1;
    v1 = rotate(v1, 17) ^ v2;
    v2 = rotate(v2, 32);
  }

  void absorb(uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }
};

}  // namespace

uint64_t siphash(const SipKey& key, const void* data, size_t bytes) {
  const uint64_t k0 = load(key.data(), 8);
  const uint64_t k1 = load(key.data() + 8, 8);
  State state{k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du, k0 ^ 0x6c7967656e657261u, k1 ^ 0x7465646279746573u};
  const auto* at = static_cast<const uint8_t*>(data);
  const size_t words = bytes / 8;
  for (size_t i = 0; i < words; ++i) state.absorb(load(at + 8 * i, 8));
  state.absorb(load(at + 8 * words, bytes % 8) | static_cast<uint64_t>(bytes) << 56);
  state.v2 ^= 0xFF;
  for (int i = 0; i < 4; ++i) state.round();
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

}  // namespace ours
